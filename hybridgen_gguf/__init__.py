"""Run GGUF models on a machine whose GPU is too small for them."""
