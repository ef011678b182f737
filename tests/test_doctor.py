"""Each finding from a described machine, and none from a machine with nothing to mend."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import gpu, machine

from hybridgen_gguf.doctor import Facts, examine, read_facts
from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.hardware import Hardware, NumaNode, Pcie

GOOD = Facts(gpu_backends=("CUDA",), nvidia_seen=True)
FINE = machine(8, 60, 32, gpu("GPU0", 8, 400, 30), link=24)
SLOT = Pcie("0000:01:00.0", 4, 16, 4, 16)


def names(hardware: Hardware, facts: Facts = GOOD) -> set[str]:
    return {finding.name for finding in examine(hardware, facts)}


def with_cpu(**changes: object) -> Hardware:
    return replace(FINE, cpu=replace(FINE.cpu, **changes))  # type: ignore[arg-type]


def with_memory(**changes: object) -> Hardware:
    return replace(FINE, memory=replace(FINE.memory, **changes))  # type: ignore[arg-type]


def with_slot(slot: Pcie) -> Hardware:
    return replace(FINE, devices=(replace(FINE.devices[0], pcie=slot),))


def test_nothing_to_mend() -> None:
    assert names(FINE) == set()
    assert names(with_slot(SLOT)) == set()
    assert names(with_slot(replace(SLOT, generation=1))) == set(), "an idle card lowers its generation"


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        (with_slot(replace(SLOT, width=4)), "pcie GPU0"),
        (with_slot(replace(SLOT, generation_max=5)), "pcie GPU0"),  # 24 of 63 GB/s were measured
        (with_cpu(governor="powersave"), "cpu governor"),
        (with_cpu(quota=2.5, affinity=tuple(range(8))), "cpu quota"),
        (with_cpu(numa=(NumaNode(0, (0, 1)), NumaNode(1, (2, 3)))), "numa"),
        (with_cpu(kernels=()), "no profile"),
        (with_memory(limit=1 << 30), "memory limit"),
        (with_memory(memlock=8 << 20), "memlock"),
        (with_memory(swap_total=1 << 30, swappiness=60, memlock=8 << 20), "swap"),
        (with_memory(transparent_huge_pages="never"), "huge pages"),
    ],
)
def test_findings_of_a_machine(hardware: Hardware, name: str) -> None:
    assert name in names(hardware)


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (replace(GOOD, engine=False, problem="not found"), "engine missing"),
        (replace(GOOD, patched=False), "engine unpatched"),
        (replace(GOOD, gpu_backends=()), "engine without GPU"),
        (replace(GOOD, driver_answers=False, notes=("the NVIDIA driver does not answer: x",)), "driver mismatch"),
        (replace(GOOD, wait_policy="PASSIVE"), "wait policy"),
    ],
)
def test_findings_of_the_software(facts: Facts, name: str) -> None:
    assert names(FINE, facts) == {name}


def test_every_finding_is_complete() -> None:
    worst = with_cpu(governor="powersave", quota=1.0, kernels=())
    for finding in examine(worst, Facts(engine=False, problem="not found")):
        assert finding.what and finding.cost and finding.mend
        assert set(finding.as_json()) == {"name", "what", "cost", "measured", "mend"}


def test_facts_of_this_machine(engine: Library) -> None:
    facts = read_facts(engine)
    assert facts.engine and facts.patched
