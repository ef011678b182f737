"""Which engine this version was made for: the facts of patches/pin.json, which no installed package holds.

Knows no library and loads none. Invariant: a test compares the two files.
"""

#: upstream commit of the sources in the binding's archive
COMMIT = "0c1e57098"
GGML_VERSION = "0.25.3"
#: version of llama-cpp-python
BINDING = "0.3.36"
#: of the source archive, which also holds the converter
SOURCE_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
