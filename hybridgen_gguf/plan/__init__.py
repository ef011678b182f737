"""(Hardware, ModelShape, Limits) → Plan: what will lie and run where, and why. Pure: no I/O, no clock, no engine.

types    Limits (what the user allows), Draft (what an engine is opened with) and Plan (what will be done)
make     the steps of planning in order; start here
check    settings that cannot be, refused by name
threads  how many threads
choose   which layers and parts lie on which device
search   the fastest assignment under the budgets, with its exact bytes
assign   the same by arithmetic alone: seconds of an assignment, exhaustive or greedy
fill     uses up leftover device memory with part of one FFN
tiers    KV cells in device and host memory
border   where attention to host cells is computed
inputs   what every step reads, and the budgets
cost     seconds of each part of a model at measured rates
buffers  where each tensor lies, by the engine's rules
predict  tokens a second, wherever the tensors lie
explain  reasons of bytes, locks and predictions
idle     settings of the user without an effect
"""

from .inputs import BytesOf
from .make import make_plan
from .predict import predict
from .types import GOALS, Draft, KvPlan, Limits, MemoryUse, Plan, Predicted, Reason

__all__ = [
    "GOALS",
    "BytesOf",
    "Draft",
    "KvPlan",
    "Limits",
    "MemoryUse",
    "Plan",
    "Predicted",
    "Reason",
    "make_plan",
    "predict",
]
