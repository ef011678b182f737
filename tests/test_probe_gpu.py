"""Cards of an NVIDIA driver made of Python: CUDA's order, what is visible, what a card cannot tell."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_system import GIB, Write

from hybridgen_gguf.machine.hardware import Pcie
from hybridgen_gguf.machine.probe_gpu import has_driver, read_gpus


class NVMLError(Exception):
    pass


class FakeNvml:
    """Two or three cards in bus order; the second is the fastest."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1

    def __init__(self, cards: int = 3, broken: str = "") -> None:
        self.cards, self.broken, self.open = cards, broken, 0

    def _check(self, name: str) -> None:
        if self.broken == name:
            raise NVMLError("broken")

    def nvmlInit(self) -> None:  # noqa: N802
        self._check("init")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._check("count")
        return self.cards

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid != "MIG-1":
            raise NVMLError("unknown")
        return 7

    def nvmlDeviceGetNumGpuCores(self, handle: int) -> int:  # noqa: N802
        self._check("cores")
        return [1000, 9000, 2000][handle]

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return 1500

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}{handle}-x"

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return f"card {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        self._check("memory")
        return SimpleNamespace(total=8 * GIB, free=6 * GIB)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return 9, 0

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        self._check("pci")
        return SimpleNamespace(busId=f"00000000:0{handle}:00.0")

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        return 8

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        return 16


def cards(tmp_path: Path, **environ: str) -> list[str]:
    nvml = FakeNvml()
    devices, notes = read_gpus(tmp_path, environ, nvml)
    assert (notes, nvml.open) == ((), 0)
    assert [device.name for device in devices] == [f"CUDA{i}" for i in range(len(devices))]
    return [device.description.removeprefix("card ") for device in devices]


def test_cards_in_cudas_order(tmp_path: Path) -> None:
    assert cards(tmp_path) == ["1", "0", "2"]
    assert cards(tmp_path, CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", ["0"]),
        ("2,0", ["2", "0"]),
        (" 1 , 2 ", ["1", "2"]),
        ("0,9,1", ["0"]),
        ("0,x,1", ["0"]),
        ("0,-1,1", ["0"]),
        ("0,0", []),
        ("GPU-11-x", ["1"]),
        ("GPU-1,0", ["1", "0"]),
        ("GPU-11-x,1", []),
        ("GPU-", []),
        ("GPU-5", []),
        ("MIG-1", ["7"]),
        ("MIG-2,0", []),
        ("²", []),
    ],
)
def test_cuda_visible_devices(tmp_path: Path, variable: str, expected: list[str]) -> None:
    assert cards(tmp_path, CUDA_VISIBLE_DEVICES=variable, CUDA_DEVICE_ORDER="PCI_BUS_ID") == expected


def test_card_in_full(write: Write, tmp_path: Path) -> None:
    write("sys/bus/pci/devices/0000:00:00.0/numa_node", "1")
    (device,), _ = read_gpus(tmp_path, {}, FakeNvml(1))
    assert (device.name, device.kind, device.uuid, device.driver) == ("CUDA0", "gpu", "GPU-00-x", "580.1")
    assert (device.memory_total, device.memory_free, device.compute_capability) == (8 * GIB, 6 * GIB, "9.0")
    assert device.pcie == Pcie("0000:00:00.0", 1, 8, 5, 16)
    assert device.numa_node == 1


@pytest.mark.parametrize("broken", ["init", "count"])
def test_driver_that_does_not_answer_is_a_note(tmp_path: Path, broken: str) -> None:
    devices, notes = read_gpus(tmp_path, {}, FakeNvml(broken=broken))
    assert devices == ()
    assert notes == ("the NVIDIA driver does not answer: broken",)


@pytest.mark.parametrize("broken", ["memory", "pci", "cores"])
def test_card_that_cannot_tell_something(tmp_path: Path, broken: str) -> None:
    devices, notes = read_gpus(tmp_path, {}, FakeNvml(1, broken))
    assert (len(devices), notes) == (1, ())


def test_without_a_driver_its_package_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import would raise
    assert not has_driver(tmp_path)
    assert read_gpus(tmp_path, {}) == ((), ())
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert has_driver(tmp_path)
    assert "nvidia-ml-py is not" in read_gpus(tmp_path, {})[1][0]
