"""What `hgguf bench` measures.

measure    llama-bench's tests on an open model
attention  the CPU attention alone, stock and ours alternating
report     the tests as a table, JSON, JSON lines or CSV
"""
