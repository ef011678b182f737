"""C declarations: each stands once, every function has argument types, and mirrored structs are the engine's."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from hybridgen_gguf.engine.abi import Table, declare, ggml, hg, llama
from hybridgen_gguf.engine.abi.ggml import InitParams, Tensor
from hybridgen_gguf.engine.library import Library

ENGINE = Path(__file__).resolve().parents[2] / "hybridgen_gguf" / "engine"
MODULES = (ggml, hg, llama)


def tables() -> dict[str, Table]:
    return {
        f"{module.__name__}.{name}": value
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, dict) and name.isupper() and name != "DEVICE_TYPES"
    }


def test_no_function_is_declared_twice() -> None:
    names = [name for table in tables().values() for name in table]
    assert len(names) > 80 and sorted(names) == sorted(set(names))


def test_each_stands_under_its_c_line() -> None:
    for module in MODULES:
        text = Path(str(module.__file__)).read_text(encoding="utf-8")
        entries = re.findall(r'((?:    # .*\n)+)    "(\w+)": ', text)
        declared = {name for key, table in tables().items() if key.startswith(module.__name__ + ".") for name in table}
        assert {name for comment, name in entries if re.search(rf"\b{name}\(", comment)} == declared


def test_only_abi_declares() -> None:
    outside = [path for path in ENGINE.rglob("*.py") if path.parent.name != "abi"]
    found = [path.name for path in outside if re.search(r"\.(restype|argtypes)\b|_fields_ =", path.read_text("utf-8"))]
    assert found == []


def test_the_engine_has_all_of_them(engine: Library) -> None:
    cpu = ctypes.CDLL(str(next(path for path in engine.folder.iterdir() if path.name.startswith("libggml-cpu."))))
    libraries = (engine.base, engine.ggml, engine.llama, cpu, engine.rpc())
    for name, table in tables().items():
        assert any(declare(library, table) for library in libraries), name
    assert engine.has_tiers and engine.has_sampler and engine.has_device_sampler


@pytest.mark.parametrize("shape", [(64, 3, 2, 5), (32, 1, 1, 1)])
def test_the_mirrored_tensor_is_the_engines(engine: Library, shape: tuple[int, int, int, int]) -> None:
    base = engine.base
    context = base.ggml_init(InitParams(1 << 20, None, False))
    try:
        one, two = (base.ggml_new_tensor_4d(context, 1, *shape) for _ in range(2))
        added = base.ggml_add(context, one, two)
        tensor = Tensor.from_address(added)
        assert tuple(tensor.ne) == shape and tensor.type == 1 and tensor.nb[0] == 2 and tensor.nb[1] == 2 * shape[0]
        assert base.ggml_op_name(tensor.op) == b"ADD" and tensor.data == base.ggml_get_data(added)
        assert [ctypes.addressof(tensor.src[i].contents) for i in range(2)] == [one, two] and not tensor.src[2]
        view = Tensor.from_address(base.ggml_permute(context, one, 0, 2, 1, 3))
        assert view.view_src == one and tuple(view.ne) == (shape[0], shape[2], shape[1], shape[3])
        assert view.name.endswith(b"(permuted)")
        # struct ggml_object is four words; a tensor's overhead is both
        assert ctypes.sizeof(Tensor) == base.ggml_tensor_overhead() - 32
        assert one + ctypes.sizeof(Tensor) <= base.ggml_get_data(one)
    finally:
        base.ggml_free(context)
