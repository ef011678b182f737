"""Measuring: llama-bench's tests on an open model, and the attention kernel alone."""
