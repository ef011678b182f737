"""The bottom edge: everything that touches the engine's libraries. ctypes lives in this package and nowhere else.

library   find and load the right engine, and say what it is
abi       declarations that the binding does not have, each under its C line
settings  what a model and a context are opened with: plain data
handles   open, use and close; errors instead of NULL
child     the same in a child process, because the engine can abort
fake      the same methods in memory, for tests
"""
