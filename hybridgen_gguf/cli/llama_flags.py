"""llama.cpp's flags that we do not have under the same name: done another way, without a meaning here, or answered.

A command copied from a guide then works or says which flag does not, and what to use; the parser of flags would read
`-hf` as `-h -f` and `-no-cnv` as `-n o-cnv`. Knows names alone.
Invariant: every flag of the pinned llama.cpp's arg.cpp is ours, or here; a test walks them.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection, Iterator, Mapping

from ..errors import UsageError

#: flag → ours; a None takes nothing on the command line
_SAME_AS: dict[str, tuple[str, ...]] = {
    "-no-cnv": ("--raw",), "--no-conversation": ("--raw",),
    "-cmoe": ("--n-cpu-moe", "999"), "--cpu-moe": ("--n-cpu-moe", "999"),
    "--chat-template-file": ("--chat-template",),
}  # fmt: skip
#: what is so here in any case, or shows nothing; a flag with a value takes it along
_NO_MEANING = (
    *("-cnv", "--conversation", "-st", "--single-turn", "--warmup", "--no-warmup", "--perf", "--no-perf", "-co"),
    *("--color", "--simple-io", "--log-disable", "--no-display-prompt", "--show-timings", "--no-show-timings"),
    *("-kvo", "--kv-offload", "--op-offload", "--no-escape", "--no-context-shift", "--log-prefix", "--no-log-prefix"),
    *("--log-timestamps", "--no-log-timestamps", "--offline"),
)
_NO_MEANING_VALUE = ("--log-colors", "-lv", "--verbosity", "--log-verbosity", "--poll", "--poll-batch")

_SERVER = "a server is to come; `hgguf run` answers one prompt"
_CHAT = "a chat is to come; `hgguf run` answers one prompt"
_SPECULATIVE = "speculative decoding is to come; leave it out"
_MEDIA = "only text goes in here; llama.cpp's llama-mtmd-cli takes pictures and sound"
_ADAPTERS = "adapters are to come; merge it into the model with llama.cpp's llama-export-lora"
_GRAMMAR = "grammars are to come; leave it out"
_ROPE = "rope settings are taken from the model; leave it out"
_PINNING = "threads follow the process's CPU affinity: taskset -c 0-3 hgguf run ..."
_CACHE = "kept KV is to come; one command reads its prompt once"
_PROGRAM = "it belongs to another program of llama.cpp"
_PLAN = "the planner fits the model into --vram and --ram by itself"
_OUTPUT = "redirect it: hgguf run ... > answer.txt 2> log.txt"
_ANSWERS: dict[str, str] = {
    _SERVER: (
        "--host --port --reuse-port --path --cors-* --no-cors-* --api-* --ui* --no-ui* --webui* --no-webui* "
        "--tools* --mcp-* -ag --agent -no-ag --no-agent --embedding* --rerank* --ssl-* -to --timeout --sse-* "
        "--threads-http --metrics --props --slot* --no-slots --media-path --models-* --no-models-* -sps "
        "--sleep-* -np --parallel -ns --sequences -cb --cont-batching -nocb --no-cont-batching -a --alias "
        "--tags --server-base --lora-init-* --no-jinja --prefill-assistant --no-prefill-assistant "
        "--skip-chat-parsing --no-skip-chat-parsing --log-prompts-dir --cache-reuse --cache-idle-slots "
        "--no-cache-idle-slots -cram --cache-ram"
    ),
    _CHAT: (
        "-i --interactive -if --interactive-first -mli --multiline-input --in-prefix* --in-suffix "
        "--reasoning-preserve --no-reasoning-preserve"
    ),
    _SPECULATIVE: (
        "--spec-* --no-spec-* --draft* --*-draft -hfd -hfrd -td -tbd -Cd -Crd -Cbd -Crbd -ctkd -ctvd -otd "
        "-cmoed -ncmoed -devd -ngld -md -lcs -lcd --lookup-* --mtp --dflash --eagle3 --*-draft-batch"
    ),
    _MEDIA: "-mm -mmu --mmproj* --no-mmproj* --image* --audio --video* --mtmd-* --tts-*",
    _ADAPTERS: "--lora* --control-vector*",
    _GRAMMAR: "--grammar* -j -jf --json-schema*",
    _ROPE: "--rope-* --yarn-* -gan --grp-attn-n -gaw --grp-attn-w",
    _PINNING: "-C --cpu-mask* -Cr --cpu-range* --cpu-strict* --prio* -Cb -Crb",
    _CACHE: (
        "--prompt-cache* --cache-prompt --no-cache-prompt -ctxcp --ctx-checkpoints --swa-* -cms "
        "--checkpoint-* -kvu --kv-unified* -no-kvu --no-kv-unified -dt --defrag-thold"
    ),
    _PLAN: "-fit* --fit* -ncffn --n-cpu-ffn -lzm --lazy-mode --repack -nr --no-repack --no-host --no-op-offload",
    _OUTPUT: "--log-file --log-jsonl --no-log-jsonl -o --output* -ptc --print-token-count",
    "tokens that must stay are kept by giving a context that is large enough (-c)": "--keep --context-shift",
    "use --json: it holds the count of tokens, and `-v` shows the plan": "--verbose-prompt --display-prompt",
    'give the text itself: -sys "$(cat FILE)"': "-sysf --system-prompt-file",
    "give the text with -f FILE": "-bf --binary-file --in-file --context-file",
    "escapes are the shell's here: -p $'a\\nb'": "-e --escape",
    "control tokens are never shown": "-sp --special --parse-special --no-parse-special",
    "use --samplers: steps by name, separated by semicolons": "--sampler-seq --sampling-seq",
    "leave it out; use --top-k, --top-p, --min-p or --samplers": (
        "--mirostat* --adaptive-* -bs --backend-sampling --dry-sequence-breaker"
    ),
    "use --reasoning-budget alone": "--reasoning-budget-message",
    "an embedding model is not for `run`": "--pooling --attention --embd-* --cls-*",
    "`hgguf doctor` and `hgguf engine` list what there is": "--list-devices -cl --cache-list",
    "`hgguf validate` reads all weights": "--check-tensors",
    "change the file instead: it is read as it is": "--override-kv",
    "give user/repo[:QUANT], and log in with: hf auth login": "-dr --docker-repo -hft --hf-token",
    "give the name of a model; `hgguf models` lists those known": "--*-default --fim-*",
    "use --help": "--usage --completion-bash --no-bos",
    "llama.cpp's llama-diffusion-cli takes it": "--diffusion-*",
    _PROGRAM: (
        "--hellaswag* --winogrande* --multiple-choice* --kl-* --save-* --ppl* --no-ppl --chunk* --from-chunk "
        "--junk --pos -ofreq --process-output --show-* --ids --stdin -pps -tgs -npp -ntg -npl --positive-file "
        "--negative-file --pca-* --method -lr -lr-min --learning-rate* -decay-epochs -wd --weight-decay "
        "-val-split --val-split -epochs --epochs -opt --optimizer --check --logits-* --tensor-filter "
        "--spm-infill --embd-separator"
    ),
}
_LOAD_MODES = {"mmap": (), "none": ("--no-mmap",), "mlock": ("--no-mmap", "--mlock"), "mmap+mlock": ("--mlock",)}
_FITS = {"on": (), "off": ()}


def answer_to(flag: str) -> str | None:
    """What to do instead of llama.cpp's `flag`; None for a name that llama.cpp does not have either."""
    for hint, patterns in _ANSWERS.items():
        if any(fnmatch.fnmatchcase(flag, pattern) for pattern in patterns.split()):
            return hint
    return None


def is_taken(flag: str) -> bool:
    """Whether llama.cpp's `flag` is done in our way, or changes nothing here."""
    return (
        flag in _SAME_AS or flag in _NO_MEANING or flag in _NO_MEANING_VALUE or flag in ("-lm", "--load-mode", "-fit")
    )


def in_our_words(words: list[str], takes_value: Mapping[str, bool]) -> list[str]:
    """The command line `words` of a verb with llama.cpp's flags as ours. `takes_value`: the verb's own flags.

    Raises UsageError for a flag of llama.cpp that has no meaning here, by its name.
    """
    return list(_translated(iter(words), takes_value))


def _translated(words: Iterator[str], takes_value: Mapping[str, bool]) -> Iterator[str]:
    for word in words:
        name, equals, value = word.partition("=")
        if word == "--":
            yield word
            yield from words
        elif not word.startswith("-") or name in takes_value:
            yield word
            if not equals and takes_value.get(name):
                yield from _next(words)
        elif name in ("-lm", "--load-mode", "-fit", "--fit"):
            yield from _of_value(name, value if equals else next(iter(_next(words)), ""))
        elif name in _NO_MEANING:
            continue
        elif name in _NO_MEANING_VALUE:
            _ = equals or list(_next(words))
        elif name in _SAME_AS:
            yield from _SAME_AS[name]
        elif (hint := answer_to(name)) is not None:
            raise UsageError(f"{name} is a flag of llama.cpp that hgguf does not have", hint)
        else:
            yield word


def _next(words: Iterator[str]) -> list[str]:
    word = next(words, None)
    return [] if word is None else [word]


def _of_value(name: str, value: str) -> tuple[str, ...]:
    known = _LOAD_MODES if "l" in name else _FITS
    if value not in known:
        raise UsageError(f"{name} {value} is not known", f"one of: {', '.join(known)}")
    return known[value]


def unread_variables(read: Collection[str]) -> tuple[str, ...]:
    """llama.cpp's variables that are set and that no flag of ours reads."""
    named = (name for name, value in os.environ.items() if name.startswith("LLAMA_ARG_") and value)
    return tuple(sorted(name for name in named if name not in read))
