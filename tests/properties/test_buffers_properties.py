"""The device that is foretold for every tensor is the one whose buffer the engine then gives it.

Two RPC servers, in a process of its own since devices stay registered; the engine's own map of tensors is read.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import serving
from seed import SEED
from tinygguf import build

from hybridgen_gguf.cli.arguments import _overrides
from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.errors import UsageError
from hybridgen_gguf.model_file.shape import read_shape
from hybridgen_gguf.plan import Draft
from hybridgen_gguf.plan.buffers import idle_patterns, layer_devices, lying, tensor_pattern
from hybridgen_gguf.settings import ContextSettings, ModelSettings, name_patterns, placement_of

CASES = 200
# llama_internal_get_tensor_map gives a std::vector of (std::string, ggml_tensor *): 40 bytes each in libstdc++.
_ASKS = """
import ctypes, json, sys
from pathlib import Path
from hybridgen_gguf.engine.handles import Model, start
from hybridgen_gguf.settings import ModelSettings, placement_of

library = start()
for endpoint in json.loads(sys.argv[2]):
    library.add_rpc(endpoint)
devices = {d.name: d for d in library.devices() if d.name.startswith("RPC")}
tensors_of = library.llama["_Z29llama_internal_get_tensor_mapB5cxx11PK11llama_model"]
tensors_of.restype, tensors_of.argtypes = ctypes.POINTER(ctypes.c_void_p), (ctypes.c_void_p,)
base = library.base
base.ggml_backend_buffer_name.restype, base.ggml_backend_buffer_name.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
base.ggml_backend_buffer_get_type.restype = ctypes.c_void_p
base.ggml_backend_buffer_get_type.argtypes = (ctypes.c_void_p,)
base.ggml_backend_buft_get_device.restype = ctypes.c_void_p
base.ggml_backend_buft_get_device.argtypes = (ctypes.c_void_p,)
base.ggml_backend_dev_name.restype, base.ggml_backend_dev_name.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)


class Tensor(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p))


def found(path, layers, placement):
    place = {name: d.buffer_type for name, d in devices.items()}
    placement["overrides"] = [(p, place.get(to, to)) for p, to in placement["overrides"]]
    with Model(Path(path), ModelSettings(layers, placement_of(placement))) as model:
        begin, end = tensors_of(model.handle)[0:2]
        rows = []
        for at in range(begin, end, 40):
            name = ctypes.string_at(*(ctypes.c_size_t.from_address(at + 8 * i).value for i in (0, 1))).decode()
            tensor = Tensor.from_address(ctypes.c_size_t.from_address(at + 32).value)
            device = base.ggml_backend_buft_get_device(base.ggml_backend_buffer_get_type(tensor.buffer))
            rows.append((name, base.ggml_backend_dev_name(device).decode() if device else "CPU"))
        return rows


cases = json.loads(Path(sys.argv[1]).read_text())
free = {name: d.memory_free for name, d in devices.items()}
print(json.dumps({"free": free, "found": [found(*case) for case in cases]}))
"""


def some_case(rng: random.Random, models: list[Path]) -> tuple[Path, int, dict[str, Any]]:
    """A model, layers on devices, a placement as JSON. Ends of ranges come often."""
    path = rng.choice(models)
    names = [tensor.name for tensor in read_shape(path).file.tensors]
    part = rng.choice(names)[: rng.randint(4, 20)]
    patterns = ["ffn", r"blk\.[[:digit:]]\.attn", "attn_(q|k)", r"^output\.weight$", "exps", "token_embd", r"\.1\.",
                "norm",
                "gate_up", part.replace(".", r"\."), "nosuch", r"blk\.(?!0)\d+\.ffn_down", r"(\d)\.\w+_up"]  # fmt: skip
    chosen = rng.sample(patterns, rng.choice((0, 1, 1, 2, 3)))
    texts = [f"{pattern}={rng.choice(('CPU', 'CPU', 'RPC0', 'RPC1'))}" for pattern in chosen]
    split = rng.choice((None, (1.0, 1.0), (3.0, 1.0), (0.3, 0.7), (0.0, 1.0), (1.0,), (0.1, 0.2)))
    placement = {
        "overrides": _overrides(texts, rng.choice((None, None, 1, 2, 99))),
        "on_host": rng.sample(names, rng.choice((0, 0, 1, 3))),
        # the CPU's own memory counts as each server's, and changes: without proportions one device is used
        "devices": rng.choice((["RPC0"], ["RPC1"], [])) if split is None else rng.choice((None, ["RPC1", "RPC0"])),
        "tensor_split": split or (),
        "split_mode": rng.choice(("layer", "layer", "layer", "none")),
        "main_gpu": 0,
    }
    return path, rng.choice((0, 1, 2, 3, 5, 99)), placement


def test_foretold_and_given(engine: Library, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    models = [
        build(tmp_path / "dense.gguf", layers=3),
        build(tmp_path / "untied.gguf", layers=5, tied=False),
        build(tmp_path / "experts.gguf", layers=4, experts=4, tied=False),
    ]
    cases = [some_case(rng, models) for _ in range(CASES)]
    asked = tmp_path / "cases.json"
    asked.write_text(json.dumps([(str(path), layers, place) for path, layers, place in cases]), encoding="utf-8")
    with serving() as one, serving() as two:
        command = [sys.executable, "-c", _ASKS, str(asked), json.dumps([one, two])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    kinds = set()
    for (path, layers, place), found in zip(cases, answer["found"], strict=True):
        shape, placement = read_shape(path), placement_of(json.loads(json.dumps(place)))
        draft = Draft(ModelSettings(layers, placement), ContextSettings(256, placement=placement))
        homes = layer_devices(draft, shape.n_layers, answer["free"])
        assert homes is not None
        names = [tensor.name for tensor in shape.file.tensors]
        foretold = lying(names, placement, homes, {name: name for name in answer["free"]})
        assert foretold == {(name, device) for name, device in found}, (path.name, layers, place)
        kinds |= {device for _, device in foretold}
    assert kinds == {"CPU", "RPC0", "RPC1"}, "the cases are not all the same"


def test_patterns_are_found_in_the_names_alone(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    path = build(tmp_path / "model.gguf", layers=12, experts=2, tied=False)
    names = [tensor.name for tensor in read_shape(path).file.tensors]
    for count in (0, 1, 2, 5, 20, len(names)):
        chosen = rng.sample(names, count)
        patterns = [tensor_pattern(text) for text in name_patterns(chosen)]
        assert {name for name in names if any(pattern.search(name) for pattern in patterns)} == set(chosen)


@pytest.mark.parametrize("layers", [1, 2, 10, 11, 99, 100, 123])
def test_ncmoe_finds_what_the_engine_finds(layers: int) -> None:
    """common.h: one pattern a layer, up to the given number; fused gate and up and chunked experts too."""
    ((pattern, kind),) = _overrides((), layers)
    assert kind == "CPU"
    for layer in range(130):
        for name in ("up_exps", "gate_exps", "down_exps", "gate_up_exps", "gate_chexps"):
            assert bool(tensor_pattern(pattern).search(f"blk.{layer}.ffn_{name}.weight")) == (layer < layers), (
                layer,
                name,
            )
        for name in ("up", "gate_inp", "up_shexp", "exp_probs_b"):
            assert not tensor_pattern(pattern).search(f"blk.{layer}.ffn_{name}.weight")


def test_posix_classes_and_what_is_no_pattern() -> None:
    names = ["blk.1.ffn_up.weight", "output.weight"]
    assert idle_patterns(names, ((r"blk\.[[:digit:]]\.", "CPU"), ("out", "CPU"), ("nosuch", "CPU"))) == ["nosuch"]
    with pytest.raises(UsageError, match="no regular expression"):
        tensor_pattern("(")
