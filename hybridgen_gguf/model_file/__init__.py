"""What a GGUF file holds, from its header alone. Believes nothing that was not checked.

header       the reader of a header, over byte_reader
types        ggml's types: names, block sizes, bytes of a row
split        a model in several files
foreign      what a file is that is no GGUF
layers       heads, windows and experts of each layer
shape        ModelShape: layers, tensor groups, bytes
adapter      whether a LoRA fits a model
kinds        which models write no text
inspection   what `inspect` shows
validation   what `validate` finds
"""

from .header import Header, TensorInfo, read_header
from .shape import ModelShape, read_shape
from .split import ModelFile, open_model_file

__all__ = ["Header", "ModelFile", "ModelShape", "TensorInfo", "open_model_file", "read_header", "read_shape"]
