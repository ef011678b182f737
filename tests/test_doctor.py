"""Each finding from a described machine, and none from a machine with nothing to mend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planned import gpu, machine

from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.machine.doctor import examine
from hybridgen_gguf.machine.doctor_facts import Clock, Facts, read_facts
from hybridgen_gguf.machine.hardware import Hardware, NumaNode, Pcie

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
        (with_memory(transparent_huge_pages="madvise"), "huge pages"),
        (with_cpu(governor="conservative"), "cpu governor"),
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
        (replace(GOOD, clock=Clock("intel_pstate", "power")), "cpu energy preference"),
    ],
)
def test_findings_of_the_software(facts: Facts, name: str) -> None:
    assert names(FINE, facts) == {name}


def test_every_finding_is_complete() -> None:
    worst = with_cpu(governor="powersave", quota=1.0, kernels=())
    for finding in examine(worst, Facts(engine=False, problem="not found")):
        assert finding.what and finding.cost and finding.source and finding.mend
        assert "estimate" not in finding.cost
        assert set(finding.as_json()) == {"name", "what", "cost", "source", "mend"}


def cost_of(hardware: Hardware, facts: Facts, name: str) -> tuple[str, str]:
    return next((f.cost, f.source) for f in examine(hardware, facts) if f.name == name)


def test_powersave_follows_the_load_under_some_drivers() -> None:
    hardware = with_cpu(governor="powersave")
    assert "cpu governor" not in names(hardware, replace(GOOD, clock=Clock("amd-pstate-epp", "performance")))
    slow = replace(GOOD, clock=Clock("acpi-cpufreq", "", 800_000_000, 4_500_000_000))
    assert cost_of(hardware, slow, "cpu governor")[0].startswith("0.8 of 4.5 GHz")


def test_costs_that_were_measured_here() -> None:
    """A profile's figure takes the place of a document's."""
    narrow = with_slot(replace(SLOT, width=4))
    cost, source = cost_of(narrow, GOOD, "pcie GPU0")
    assert cost.startswith("24.0 GB/s of the 31.5") and source == "this machine's profile"
    cost, source = cost_of(replace(narrow, links=()), GOOD, "pcie GPU0")
    assert cost.startswith("7.9 GB/s of the 31.5") and "specification" in source
    assert "GFLOP/s" in cost_of(FINE, replace(GOOD, gpu_backends=()), "engine without GPU")[0]


def test_facts_of_a_described_system(tmp_path: Path) -> None:
    files = {
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq": "1500000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3700000\n",
        "sys/devices/system/node/node0/distance": "10 32\n",
        "sys/devices/system/node/node1/distance": "32 10\n",
        "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    facts = read_facts(None, "not built", root=tmp_path)
    assert facts.clock == Clock("acpi-cpufreq", "", 1_500_000_000, 3_700_000_000)
    assert facts.numa_distance == 32 and facts.nvidia_seen and not facts.engine
    two = with_cpu(numa=(NumaNode(0, (0, 1)), NumaNode(1, (2, 3))))
    assert cost_of(two, facts, "numa")[0].startswith("3.2 times")


def test_nothing_can_be_read(tmp_path: Path) -> None:
    facts = read_facts(None, root=tmp_path)
    assert facts.clock == Clock() and facts.numa_distance == 0 and not facts.nvidia_seen


def test_facts_of_this_machine(engine: Library) -> None:
    facts = read_facts(engine)
    assert facts.engine and facts.patched
