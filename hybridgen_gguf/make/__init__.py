"""Model files made from others: convert, quantize, importance matrices, reports. The work runs in child processes.

pipeline     quantize with its report, or convert and quantize: what the verbs call
convert      a Hugging Face folder → GGUF, by llama.cpp's converter (converter, confine) on a checked folder (folder)
quantize     GGUF → smaller GGUF, by the engine; forecast and recipe say before what comes out
allocate     types by tensor for a size, from sensitivity
importance   whether a matrix fits a model and its types
imatrix      an importance matrix from a text
report       what quantizing cost in quality
enough       whether text and room will do
target       writing a file complete or not at all
ternary      types for models of few values, and their cost elsewhere
file_types   names of file types
job          one piece of work in a child process
"""
