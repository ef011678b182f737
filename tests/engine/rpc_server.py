"""Serves the CPU as an RPC device until killed: python rpc_server.py HOST:PORT"""

import ctypes
import sys

from hybridgen_gguf.engine.handles import start

library = start()
device = library.ggml.ggml_backend_dev_by_name(b"CPU")
devices = (ctypes.c_void_p * 1)(device)
library.rpc().ggml_backend_rpc_start_server(sys.argv[1].encode(), None, 2, 1, devices)
