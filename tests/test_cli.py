"""Flags, configuration, JSON keys and exit codes of the verbs; each flag is documented once and everywhere the same."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tinygguf
from command_line import call, refused, spawn

import hybridgen_gguf
from hybridgen_gguf import processes
from hybridgen_gguf.cli import app as cli
from hybridgen_gguf.cli.environment import VARIABLES
from hybridgen_gguf.engine.library import Library

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hybridgen_gguf"
Capture = pytest.CaptureFixture[str]
OPTIONS = [(verb, p) for verb, c in cli.known_verbs().items() for p in c.params if p.param_type_name == "option"]
PLAN_KEYS = {
    *("placement", "n_gpu_layers", "n_layers", "n_ctx", "kv", "threads", "batch", "bytes", "predicted", "reasons"),
    *("flash_attention", "overrides", "warnings"),
}


# --- JSON, as promised ---


def test_run_json(tiny: Path, capsys: Capture) -> None:
    done = call(capsys, "run", tiny, "-p", "hi", "-n", 3, "-s", 7, "--json")
    reply = done.json
    assert done.code == 0 and done.err == ""
    assert list(reply) == ["text", "tokens", "finish_reason", "seed", "usage", "timings", "plan"]
    assert set(reply["usage"]) == {"prompt_tokens", "completion_tokens", "reused_tokens"}
    assert set(reply["timings"]) == {"load_s", "ttft_s", "prompt_tps", "decode_tps"}
    assert reply["seed"] == 7 and len(reply["tokens"]) == reply["usage"]["completion_tokens"] <= 3
    assert set(reply["plan"]) >= PLAN_KEYS


def test_run_json_with_draws_and_log_probabilities(tiny: Path, capsys: Capture) -> None:
    reply = call(capsys, "run", tiny, "-p", "hi", "-n", 2, "-s", 7, "--json", "--draws", 3, "--logprobs", 2).json
    assert len(reply["draws"]) == len(reply["logprobs"]) == len(reply["tokens"])
    assert all(len({draw["token"] for draw in draws}) == 3 for draws in reply["draws"])
    assert all(len(entry["top"]) == 2 for entry in reply["logprobs"])


def test_plan_json(tiny: Path, capsys: Capture) -> None:
    plan = call(capsys, "plan", tiny, "--json").json["plan"]
    assert set(plan) >= PLAN_KEYS
    assert set(plan["kv"]) >= {"type_k", "type_v", "cells_device", "cells_host", "bytes"}
    assert set(plan["bytes"]) == {"device", "host"}
    assert plan["bytes"]["host"] == sum(use["total"] for use in plan["placement"])
    assert {reason["name"] for reason in plan["reasons"]} >= {"threads", "n_ctx", "n_gpu_layers", "memory CPU"}
    assert all(set(reason) == {"name", "value", "why"} for reason in plan["reasons"])


def test_inspect_json_and_text(tiny: Path, capsys: Capture) -> None:
    seen = call(capsys, "inspect", tiny, "--json").json
    assert list(seen) == ["model", "tensors", "metadata"]
    assert seen["model"]["n_layers"] == 2 and len(seen["tensors"]) == seen["model"]["n_tensors"] == 20
    text = call(capsys, "inspect", tiny).out
    summary, metadata, tensors = (text.index(part) for part in ("architecture ", "general.name = tiny", "blk.0.attn_k"))
    assert summary < metadata < tensors


def test_validate_json_reports_every_file(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    done = call(capsys, "validate", tmp_path / "bad.gguf", tiny, "no-such-model", "--json")
    assert done.code == 1
    assert [list(entry) for entry in done.json["files"]] == [["path", "ok", "problems"]] * 3
    assert [entry["ok"] for entry in done.json["files"]] == [False, True, False]
    assert [bool(entry["problems"]) for entry in done.json["files"]] == [True, False, True]


def test_validate_exit_codes(tiny: Path, capsys: Capture) -> None:
    assert call(capsys, "validate", tiny, tiny).code == 0
    assert call(capsys, "validate", "no-such-model").code == 4
    assert call(capsys, "validate").code == 2


def test_pull_and_models_json(smollm2: Path, capsys: Capture) -> None:
    done = call(capsys, "pull", "smollm2-135m", "--json")
    assert done.json == {
        "path": str(smollm2),
        "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "bytes": smollm2.stat().st_size,
    }
    listed = {entry["alias"]: entry for entry in call(capsys, "models", "--json").json["models"]}
    assert len(listed) >= 12 and listed["smollm2-135m"]["path"] == str(smollm2)
    assert call(capsys, "models").out.count("\n") == len(listed) + 1


def test_pull_of_a_file(tiny: Path, capsys: Capture) -> None:
    refused(call(capsys, "pull", tiny), 4, "is a file here")


def test_engine_json(capsys: Capture) -> None:
    seen = call(capsys, "engine", "--json").json
    assert {"path", "commit", "patched", "patches", "switches", "backends", "devices"} <= set(seen)
    assert seen["patched"] and seen["patches"][0].startswith("0001") and "CPU" in seen["backends"]
    assert all({"value", "values"} == set(switch) for switch in seen["switches"].values())
    assert seen["commit"] in call(capsys, "engine").out


BENCH = ("-p", "8", "-n", "4,0", "-d", "0,4", "-r", "2")
BENCH_TESTS = ["pp8", "tg4", "pp8 @ d4", "tg4 @ d4"]


@pytest.fixture(scope="module")
def measured(tiny: Path) -> dict[str, str]:
    """What `bench` writes in each format."""
    done = {form: spawn("bench", tiny, *BENCH, "-o", form) for form in ("md", "json", "jsonl", "csv")}
    assert all(d.code == 0 and d.err == "" for d in done.values())
    return {form: d.out for form, d in done.items()}


def test_bench_formats_agree(measured: dict[str, str]) -> None:
    tables: dict[str, Any] = {
        "json": json.loads(measured["json"]),
        "jsonl": [json.loads(line) for line in measured["jsonl"].splitlines()],
        "csv": list(csv.DictReader(io.StringIO(measured["csv"]))),
    }
    for records in tables.values():
        assert sorted(record["test"] for record in records) == sorted(BENCH_TESTS)
        assert all({"mean", "stdev", "median", "samples", "model", "engine", "threads"} <= set(r) for r in records)
    assert all(len(record["samples"]) == 2 for record in tables["json"])
    rows = [line for line in measured["md"].splitlines() if line.startswith("| ")]
    assert {row.split("|")[1].strip() for row in rows} >= set(BENCH_TESTS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-p", "x"), "-p x"),
        (("-n", "1,,2"), "-n 1,,2"),
        (("-p", "-5"), "negative"),
        (("-p", "0", "-n", "0"), "nothing to measure"),
        (("-d", "-1"), "negative"),
        (("-r", "0"), "-r"),
        (("-o", "xml"), "-o xml"),
        (("-p", "99999999999"), "99999999999"),
    ],
)
def test_bench_refuses(tiny: Path, capsys: Capture, arguments: tuple[str, ...], says: str) -> None:
    refused(call(capsys, "bench", tiny, *arguments), 2, says)


# --- usage errors ---


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (("modells",), "no such command 'modells'", "hgguf --help"),
        (("run", "--temprature", "0"), "--temprature (Possible options: --chat-template, --temp", "hgguf run --help"),
        (("run", "-n"), "'-n' requires an argument", "hgguf run --help"),
        (("run", "-n", "abc"), "-n/--predict/--n-predict: a whole number is needed", "hgguf run --help"),
        (("plan", "MODEL", "--ram", "2XB"), "--ram: '2XB' is not a size", ""),
        (("run", "-p", "x"), "no model was given", "hgguf models"),
        (("run", "-p", "x", ""), "no model was given", "hgguf models"),
        (("plan", "MODEL", "--format", "xml"), "--format xml", "table, args"),
        (("validate",), "missing argument 'FILE...'", "hgguf validate --help"),
        (("run", "MODEL", "-p", "a", "-f", "b"), "-p and -f", ""),
        (("run", "MODEL", "-p", ""), "the prompt is empty", ""),
        (("run", "MODEL", "-p", "x", "--raw", "-sys", "y"), "-sys", ""),
        (("run", "MODEL", "-p", "x", "-n", "-5"), "-n -5", ""),
        (("run", "MODEL", "-p", "x", "--stop", ""), "a stop string cannot be empty", ""),
        (("run", "MODEL", "-p", "x", "--numa", "foo"), "--numa foo", "distribute"),
        (("plan", "MODEL", "--numa", "foo"), "--numa foo", "distribute"),
        (("plan", "MODEL", "-dev", "CUDA7"), "no device 'CUDA7'", "hgguf engine"),
        (("plan", "MODEL", "-dev", ","), "-dev", "hgguf engine"),
        (("plan", "MODEL", "-mg", "-1"), "-mg -1", ""),
        (("plan", "MODEL", "-ts", "0,0"), "-ts 0,0", ""),
        (("plan", "MODEL", "-ts", "1," * 20 + "1"), "21 shares", ""),
        (("plan", "MODEL", "-ts", "nan"), "-ts nan", ""),
        (("plan", "MODEL", "-ot", "x"), "-ot x", ""),
        (("plan", "MODEL", "-ot", "(=CPU"), "-ot (=CPU", ""),
        (("plan", "MODEL", "-ot", "x=FOO"), "no buffer type 'FOO'", "CPU"),
        (("plan", "MODEL", "-ncmoe", "-1"), "-ncmoe -1", ""),
        (("plan", "MODEL", "-ncmoe", "999999999"), "-ncmoe 999999999", ""),
        (("plan", "MODEL", "-ngl", "1e3"), "-ngl 1e3", "auto"),
        (("plan", "MODEL", "-ngl", "-7"), "-ngl -7", ""),
        (("plan", "MODEL", "--rpc", "foo"), "--rpc foo", "192.168.1.5:50052"),
        (("plan", "MODEL", "-sm", "foo"), "-sm foo", "layer"),
        (("plan", "MODEL", "-fa", "maybe"), "-fa maybe", "auto"),
        (("plan", "MODEL", "-ctk", "q9"), "-ctk q9", "q8_0"),
    ],
)
def test_usage_errors(tiny: Path, capsys: Capture, arguments: tuple[str, ...], says: str, hint: str) -> None:
    done = call(capsys, *(str(tiny) if word == "MODEL" else word for word in arguments))
    refused(done, 2, says)
    assert hint in done.err.splitlines()[-1]


def test_no_verb_shows_the_help(capsys: Capture) -> None:
    done = call(capsys)
    assert done.code == 2 and "Usage: hgguf" in done.out and done.err == ""
    assert call(capsys, "--version").out == f"hgguf {hybridgen_gguf.__version__}\n"


def test_an_rpc_server_that_is_not_there(tiny: Path, capsys: Capture) -> None:
    refused(call(capsys, "plan", tiny, "--rpc", "127.0.0.1:1"), 1, "127.0.0.1:1 does not answer")


def test_near_matches_of_an_alias(capsys: Capture) -> None:
    done = call(capsys, "run", "smolm2-135m", "-p", "x", "-n", 1)
    refused(done, 4, "'smolm2-135m'")
    assert "did you mean smollm2-135m" in done.err


# --- where a value comes from ---


def threads(capsys: Capture, tiny: Path, *arguments: str, **environment: str) -> int:
    settings = {"HGGUF_THREADS": "", **environment}
    return int(call(capsys, "plan", tiny, "--json", *arguments, **settings).json["plan"]["threads"]["decode"])


def test_flag_before_environment_before_configuration(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[plan]\nthreads = 4\n", encoding="utf-8")
    others: dict[str, str] = {"HGGUF_CONFIG": str(config)}
    assert threads(capsys, tiny, **others) == 4
    others["LLAMA_ARG_THREADS"] = "3"
    assert threads(capsys, tiny, **others) == 3
    others["HGGUF_THREADS"] = "2"
    assert threads(capsys, tiny, **others) == 2
    assert threads(capsys, tiny, "-t", "1", **others) == 1


def test_the_users_configuration_folder(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "hgguf").mkdir()
    (tmp_path / "hgguf" / "config.toml").write_text(f'[plan]\nmodel = "{tiny}"\nformat = "args"\n', encoding="utf-8")
    done = call(capsys, "plan", XDG_CONFIG_HOME=str(tmp_path))
    assert done.out.startswith(f"-m {tiny} --fit off -c 256 -ngl 0 ")


def test_model_from_the_environment(tiny: Path, capsys: Capture) -> None:
    assert call(capsys, "plan", LLAMA_ARG_MODEL=str(tiny)).code == 0
    assert call(capsys, "plan", HGGUF_MODEL=str(tiny), LLAMA_ARG_MODEL="nothing").code == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[run]\nthread = 1", "'thread' in [run]"),
        ("[rum]\na = 1", "'rum'"),
        ("a = 1", "'a'"),
        ("[run", "not valid TOML"),
        ("[run]\nubatch_size = 'x'", "ubatch_size in the configuration file: a whole number is needed"),
        ("[run]\nubatch_size = [1]", "ubatch_size in the configuration file: a whole number is needed"),
        ("[run]\nstop = 'x'", "stop in the configuration file: a list is needed"),
        ("[run]\nmlock = 'maybe'", "mlock in the configuration file: yes or no is needed"),
        ("[run.threads]\na = 1", "'threads' in [run]"),
        ("[run]\nctx_size = 99999999999999999999999", "-c 99999999999999999999999"),
        ("\udcff", "not valid TOML"),
    ],
)
def test_wrong_configuration(tiny: Path, tmp_path: Path, capsys: Capture, text: str, says: str) -> None:
    config = tmp_path / "c.toml"
    config.write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(call(capsys, "run", tiny, "-p", "x", "-n", 1, HGGUF_CONFIG=str(config)), 2, says)


def test_a_configuration_that_is_not_there(capsys: Capture, tmp_path: Path) -> None:
    refused(call(capsys, "models", HGGUF_CONFIG=str(tmp_path / "none.toml")), 2, "none.toml, which does not exist")
    refused(call(capsys, "models", HGGUF_CONFIG=str(tmp_path)), 2, "cannot be read")


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("LLAMA_ARG_THREADS", "abc", "a whole number"),
        ("HGGUF_MLOCK", "maybe", "yes or no"),
        ("LLAMA_ARG_TEMPERATURE", "x", "a number"),
    ],
)
def test_wrong_environment(tiny: Path, capsys: Capture, name: str, value: str, needed: str) -> None:
    done = call(capsys, "run", tiny, "-p", "x", "-n", 1, **{"HGGUF_THREADS": "", name: value})
    refused(done, 2, f"environment variable {name}={value}: {needed} is needed")


# --- plans, in and out ---


def test_a_saved_plan_fixes_what_flags_leave_open(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    saved = tmp_path / "plan.json"
    saved.write_text(
        call(capsys, "plan", tiny, "--json", "-c", 512, "-t", 2, "-b", 64, "-ub", 32).out, encoding="utf-8"
    )
    again = call(capsys, "plan", tiny, "--json", "--plan", saved, HGGUF_THREADS="").json["plan"]
    assert (again["n_ctx"], again["threads"]["decode"]) == (512, 2)
    assert again["batch"] == {"n_batch": 64, "n_ubatch": 32}
    mixed = call(capsys, "plan", tiny, "--json", "--plan", saved, "-c", 256).json["plan"]
    assert (mixed["n_ctx"], mixed["threads"]["decode"]) == (256, 1)
    assert call(capsys, "run", tiny, "--plan", saved, "-p", "x", "-n", 1).code == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "5",
        "{}",
        '{"plan": []}',
        '{"plan": {"n_ctx": 1e400}}',
        "[" * 100_000,
        "\x00",
        '{"plan": {"n_ctx": -5}}',
    ],
)
def test_what_is_no_plan(tiny: Path, tmp_path: Path, capsys: Capture, text: str) -> None:
    saved = tmp_path / "plan.json"
    saved.write_text(text, encoding="utf-8")
    refused(call(capsys, "plan", tiny, "--plan", saved), 2, "plan.json is not a plan")


def test_a_plan_with_nonsense_in_it(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    plan = call(capsys, "plan", tiny, "--json").json
    plan["plan"]["threads"]["decode"] = -7
    (tmp_path / "p.json").write_text(json.dumps(plan), encoding="utf-8")
    refused(call(capsys, "plan", tiny, "--plan", tmp_path / "p.json", HGGUF_THREADS=""), 2, "-t -7")
    refused(call(capsys, "plan", tiny, "--plan", tmp_path / "none.json"), 4, "none.json cannot be read")


def test_dry_run_and_explain(tiny: Path, capsys: Capture) -> None:
    dry = call(capsys, "run", tiny, "-p", "x", "--dry-run")
    assert dry.code == 0 and "context " in dry.out and "because" not in dry.out
    assert "because" in call(capsys, "run", tiny, "-p", "x", "--dry-run", "--explain").out
    assert "because" in call(capsys, "plan", tiny, "--explain").out
    assert set(call(capsys, "run", tiny, "-p", "x", "--dry-run", "--json").json) == {"plan"}
    told = call(capsys, "run", tiny, "-p", "x", "-n", 1, "--explain").err
    assert "threads: 1 (set by the user)" in told
    assert call(capsys, "run", tiny, "-p", "x", "-n", 1, "-q").err == ""


def test_format_args_is_a_command_line_of_ours_too(tiny: Path, capsys: Capture) -> None:
    flags = call(capsys, "plan", tiny, "--format", "args", "-ncmoe", 12, "-dev", "none", "-ub", 64, "-nkvo").out.split()
    fit = flags.index("--fit")  # stock llama.cpp's flag against changing what was planned
    again = [flag.strip("'") for flag in flags[:fit] + flags[fit + 2 :]]
    assert call(capsys, "plan", "--format", "args", *again).out.split() == flags


# --- every flag, once ---


def test_the_reference_is_the_code() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "gen_docs", "--check"], check=True, cwd=ROOT)


@pytest.mark.parametrize("verb", cli.known_verbs())
def test_every_flag_and_variable_is_documented(verb: str) -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {verb}\n")[2].partition("\n## ")[0]
    command = cli.known_verbs()[verb]
    assert command.help and command.help in section
    for parameter in command.params:
        assert parameter.help, f"{verb} {parameter.name} has no help"
        if parameter.param_type_name == "option":
            words = [*parameter.opts, *parameter.secondary_opts, *(parameter.envvar or ())]
            assert all(f"`{word}`" in section for word in words), words


def test_every_environment_variable_is_documented() -> None:
    """Those of users in docs/cli.md, those of tests and benchmarks in docs/testing.md."""
    read = re.compile(r"\bHGGUF_[A-Z_]*[A-Z]\b")
    folders = (PACKAGE, ROOT / "scripts", ROOT / "patches", ROOT / ".ci")
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    used = {name for path in files for name in read.findall(path.read_text(encoding="utf-8"))}
    texts = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("cli.md", "testing.md")]
    assert {name for name in used if not any(f"`{name}" in text for text in texts)} == set()


def test_every_switch_of_the_engine_is_documented(engine: Library) -> None:
    named = {name for group in VARIABLES.values() for name in group}
    assert {
        "HGGUF_" + name.upper().replace("-", "_") for name in (switch.name for switch in engine.switches())
    } <= named


@pytest.mark.parametrize(("verb", "option"), OPTIONS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_long_flags_are_keys_and_variables(verb: str, option: Any) -> None:
    longs = [name for name in option.opts if name.startswith("--")]
    assert longs, f"{option.opts} has no long flag"
    keys = cli._config_keys(cli.known_verbs()[verb])
    assert all(keys[name[2:].replace("-", "_")] == option.name for name in longs)
    if option.envvar:
        own = {"HGGUF_" + name[2:].upper().replace("-", "_") for name in longs}
        assert option.envvar[0] in own
        assert all(name.startswith("LLAMA_ARG_") for name in option.envvar[1:])


def test_no_flag_has_two_meanings() -> None:
    for verb, command in cli.known_verbs().items():
        names = [name for p in command.params if p.param_type_name == "option" for name in p.opts]
        assert len(names) == len(set(names)), verb


def test_llama_cpps_spellings_are_taken() -> None:
    given = {name for verb, option in OPTIONS if verb == "run" for name in option.opts}
    assert given >= {
        *("-m", "-p", "--prompt", "-f", "--file", "-sys", "-n", "--predict", "-c", "--ctx-size", "-b", "-ub", "-t"),
        *("--threads", "-tb", "-ngl", "--n-gpu-layers", "-ot", "--override-tensor", "-ncmoe", "-ctk", "-ctv", "-fa"),
        *("-sm", "-ts", "-mg", "-dev", "--mlock", "--no-mmap", "--numa", "--temp", "--top-k", "--top-p", "--min-p"),
        *("-s", "--seed", "--repeat-penalty", "--jinja", "--chat-template", "--rpc", "--vram", "--ram", "--plan"),
        *("--dry-run", "--explain", "--raw", "--json"),
    }


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        *((["x.gguf", "-p", "hi"], "hgguf run x.gguf"), (["smollm2-135m"], "hgguf run smollm2-135m")),
        *((["chat", "x"], "hgguf run MODEL"), (["ls"], "hgguf models"), (["version"], "hgguf --version")),
        *(
            (["download", "x"], "hgguf pull NAME"),
            (["rum", "x"], "see `hgguf --help`"),
            (["xyz"], "see `hgguf --help`"),
        ),
        *((["run", "x.gguf", "hello"], '-p "..."'), (["plan", "x.gguf", "hello"], "see `hgguf plan --help`")),
        (["help", "nope"], "see `hgguf --help`"),
    ],
)
def test_common_slips(capsys: pytest.CaptureFixture[str], words: list[str], hint: str) -> None:
    done = call(capsys, *words)
    refused(done, 2)
    assert hint in done.err.splitlines()[1]
    broken = call(capsys, *words, HGGUF_MODELS_FILE="/nowhere")
    assert broken.code == 2 and "Traceback" not in broken.err


def test_help_is_a_verb_too(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ((), ("run",), ("bench", "attention")):
        done = call(capsys, "help", *verb)
        assert done.code == 0 and done.out == call(capsys, *verb, "--help").out


# --- the edges ---


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "import_module" in ast.dump(node.func)]
    names |= {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    ("module", "homes"),
    [
        ("ctypes", ("engine/",)),
        ("llama_cpp", ("engine/",)),
        ("rich", ("cli/",)),
        ("typer", ("cli/",)),
        ("huggingface_hub", ("models/",)),
        ("pickle", ()),
    ],
)
def test_each_library_lives_in_one_place(module: str, homes: tuple[str, ...]) -> None:
    users = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if module in imports(path)]
    assert [user for user in users if not user.startswith(homes or ("-",))] == []
    assert users or not homes


@pytest.mark.parametrize(
    "code",
    [
        "import hybridgen_gguf",
        "import hybridgen_gguf.cli.app",
        "from hybridgen_gguf.cli import app; app._run(['run', '--help'])",
        "from hybridgen_gguf.cli import app; app._run(['models', '--json'])",
    ],
)
def test_what_starts_quickly_loads_little(code: str) -> None:
    heavy = ("numpy", "llama_cpp", "huggingface_hub", "gguf", "jinja2", "torch")
    ask = f"{code}\nimport sys\nsys.exit(' '.join(m for m in {heavy!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stderr.strip() == ""


def test_public_names_are_sorted_and_there() -> None:
    assert list(hybridgen_gguf.__all__) == sorted(hybridgen_gguf.__all__)
    assert all(getattr(hybridgen_gguf, name) is not None for name in hybridgen_gguf.__all__)


def test_text_for_users_names_no_place_of_this_checkout() -> None:
    for name in ("README.md", "docs/cli.md"):
        text = (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).exists() else ""
        assert not re.search(r"/(work|home|root)/", text), name


def test_a_model_without_layers(tmp_path: Path, capsys: Capture) -> None:
    path = tinygguf.build(tmp_path / "none.gguf", sets=["llama.block_count=u32:0"])
    refused(call(capsys, "run", path, "-p", "x", "-n", 1), 1, "none.gguf")


def test_run_starts_one_child_and_counts_a_long_prompt_there(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    start = processes.start

    def counted(module: str, *arguments: str, **options: Any) -> processes.Child:
        started.append(module)
        return start(module, *arguments, **options)

    monkeypatch.setattr(processes, "start", counted)
    path = tinygguf.build(tmp_path / "tiny.gguf", ctx=16384)
    done = call(capsys, "run", path, "--raw", "-p", "a" * 9000, "-n", 1, "--json")
    assert done.code == 0
    tokens = done.json["usage"]["prompt_tokens"]
    assert tokens >= 9000 and tokens + 256 <= done.json["plan"]["n_ctx"] <= tokens + 1024  # a template, an answer
    assert started == ["hybridgen_gguf.engine.child"]
