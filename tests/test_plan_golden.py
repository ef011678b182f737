"""Plans for described machines, as files that a person can read. HGGUF_GOLDEN=write makes them anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from planned import counted, dense, gpu, machine, moe

from hybridgen_gguf.machine.hardware import Hardware
from hybridgen_gguf.model_file.shape import ModelShape
from hybridgen_gguf.plan import Limits, Plan, make_plan
from hybridgen_gguf.units import format_size

GOLDEN = Path(__file__).resolve().parent / "golden"
MACHINES = {
    "laptop_8gb": machine(8, 45, 28, gpu("GPU0", 7.2, 250, 20), link=12),
    "desktop_12gb": machine(8, 60, 28, gpu("GPU0", 11.2, 430, 40), link=24),
    "desktop_24gb": machine(16, 75, 60, gpu("GPU0", 23, 900, 100), link=24, split=4e-5),
    "two_unequal_cards": machine(8, 60, 28, gpu("GPU0", 11.2, 430, 40), gpu("GPU1", 5.6, 180, 12), link=12),
    "cpu_only": machine(8, 45, 14),
}
MODELS = {
    "8B dense": dense(32, 4096, 14336, 32, 8, 128256),
    "32B dense": dense(64, 5120, 27648, 40, 8, 152064),
    "30B-A3B experts": moe(48, 2048, 768, 32, 4, 151936, 128, 8),
}
USES = ((8192, 4096, "decode"), (8192, 4096, "prompt"), (32768, 32768, "decode"))


def described(hardware: Hardware, shape: ModelShape, limits: Limits) -> Plan:
    alone = tuple(device.name for device in hardware.devices)
    return make_plan(hardware, shape, limits, lambda plan: counted(shape, plan) if alone else counted(shape, plan)[:1])


@pytest.mark.parametrize("name", MACHINES)
def test_golden(name: str) -> None:
    lines = [f"{name}: plans for a context of 8192 tokens, 4096 of them in use, and for 32768, all of them in use\n"]
    for model, shape in MODELS.items():
        for n_ctx, depth, goal in USES:
            title = f"\n== {model}, {n_ctx} tokens, goal {goal}\n"
            try:
                plan = described(MACHINES[name], shape, Limits(n_ctx=n_ctx, depth=depth, goal=goal, ram=60 << 30))
            except Exception as error:  # the golden file says what a user would read
                lines.append(f"{title}{type(error).__name__}: {error}\n")
                continue
            lines.append(f"{title}{' '.join(plan.as_arguments())}\n")
            for use in plan.memory:
                sizes = [f"{format_size(size):>10}" for size in (use.weights, use.kv, use.compute, use.total)]
                lines.append("{:5} weights {}, KV {}, scratch {}, total {}\n".format(use.device, *sizes))
            lines += [f"{reason.name}: {reason.value} ({reason.why})\n" for reason in plan.reasons
                      if not reason.name.startswith(("memory", "kv type", "n_ctx"))]  # fmt: skip
    text, path = "".join(lines), GOLDEN / f"plan_{name}.txt"
    if os.environ.get("HGGUF_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"the plan changed: look at it, then HGGUF_GOLDEN=write ({path})"
