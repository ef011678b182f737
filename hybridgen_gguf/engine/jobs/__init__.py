"""Work that a child process does with the engine: each is a function of plain data that returns plain data.

quantize      GGUF → GGUF; and its forecast
imatrix       an importance matrix, kept by imatrix_file
compare       two models' distributions over a text, by evaluate
type_error    error of each type on a tensor
check         whether a text can be tokenized
digest        SHA-256 of a file while it is written
"""
