"""Small graphs of ggml, built to be timed or checked.

kernels    matrix products by type and thread count, memory bandwidth
attention  one attention, stock or ours
"""
