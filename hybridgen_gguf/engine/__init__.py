"""The bottom edge: everything that touches the engine's libraries. ctypes lives in this package and nowhere else.

library        find and load the right engine, and say what it is
abi/           C declarations that the binding does not have, each under its C line
handles        open, use and close a model and a context; errors instead of NULL
changes        adapters, overridden metadata, rotary positions
grammar        grammars, and JSON schemas as grammars
tiers          KV in two memories
native_sample  the sampler's passes in C++; device_sample: candidates from the device
child          the same questions in a child process, because the engine can abort
log            the engine's log while something is opened; giving_up: its last words; refusals: what they mean
pin            which engine this version was made for
fake           the same methods in memory, for tests
jobs/          work of child processes: quantize, imatrix, compare
graphs/        small graphs to time kernels
"""
