"""Open, use and close a model and a context of the engine: errors instead of NULL, numpy instead of pointers.

Knows tokens and logits, but neither text nor plans.
Invariant: whatever was opened is closed once, in the right order, also after an error or at interpreter exit.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..closing import Closing
from ..errors import DoesNotFit, EngineError, HgError, UsageError
from ..settings import FLASH_ATTENTION, KV_TYPES, NUMA, SPLIT_MODES, BufferBytes, ContextSettings, ModelSettings
from . import changes, forking, giving_up, log, refusals
from .abi.hg import MemoryEntry
from .abi.llama import TensorOverride
from .device_sample import DeviceSample
from .library import Library, load
from .native_sample import NativeSample, native_sampler
from .tiers import TierCounters, Tiers, counters, pending, set_cpu_tokens

_ABORTED = 2
_LONGEST_TEXT = 2**31 - 16  # bytes; the engine counts in 32 bits
_NO_ROOM = 1
_ATTR_UNKNOWN, _ATTR_CONTROL = 1 << 0, 1 << 3  # enum llama_token_attr
_LOAD_MODES = {
    (False, False): 0,
    (True, False): 1,
    (False, True): 2,
    (True, True): 3,
}  # (mmap, mlock), enum llama_load_mode


def start(*, echo_log: bool = False) -> Library:
    """Loads the engine, takes over its log and starts its backends. Cheap when done before."""
    library = load()
    log.capture(library.api, echo=echo_log)
    giving_up.listen(library)
    forking.survive()
    library.api.llama_backend_init()
    return library


def set_numa(strategy: str) -> None:
    """How threads meet NUMA nodes, for the whole process. Raises UsageError for an unknown strategy."""
    if strategy not in NUMA:
        raise UsageError(f"--numa {strategy} is not known", f"one of: {', '.join(NUMA)}")
    start().api.llama_numa_init(NUMA[strategy])


class Model(Closing):
    """An open model. Raises EngineError when the engine refuses the file."""

    def __init__(
        self,
        path: Path,
        settings: ModelSettings,
        *,
        vocab_only: bool = False,
        no_alloc: bool = False,
        progress: Callable[[float], bool] | None = None,
    ) -> None:
        self.library = start()
        self.api = self.library.api
        self.path = path
        self.settings = settings
        self._pieces: dict[tuple[int, bool], bytes] = {}  # asked for each token that is written
        self._ends: dict[int, bool] = {}
        self._kept: list[object] = []  # memory that the engine reads during the load
        parameters = self._parameters(settings, vocab_only, no_alloc, progress)
        log.lines.clear()
        log.overrides.clear()
        self.handle: Any = self.api.llama_model_load_from_file(os.fsencode(path), parameters)
        if not self.handle:
            hint = "the engine may not take the patterns of -ot" if settings.placement.overrides else ""
            why = log.last_error()
            hint = hint or (refusals.refusal_of(why).hint if why else "")
            raise _failed(f"the engine cannot load {path}", why or "it does not say why", hint)
        self.overridden = changes.overridden(settings.override_kv)
        self.vocab = self.api.llama_model_get_vocab(self.handle)
        self.n_vocab = int(self.api.llama_vocab_n_tokens(self.vocab))
        self.adapters: tuple[Any, ...] = ()
        if not vocab_only:
            self._load_adapters()

    def _parameters(
        self, settings: ModelSettings, vocab_only: bool, no_alloc: bool, progress: Callable[[float], bool] | None
    ) -> Any:
        parameters = self.api.llama_model_default_params()
        parameters.n_gpu_layers = settings.n_gpu_layers
        parameters.split_mode = SPLIT_MODES[settings.placement.split_mode]
        parameters.main_gpu = settings.placement.main_gpu
        parameters.load_mode = 0 if no_alloc else _LOAD_MODES[settings.placement.use_mmap, settings.placement.use_mlock]
        parameters.vocab_only = vocab_only
        parameters.no_alloc = no_alloc
        if settings.placement.tensor_split:
            shares = (ctypes.c_float * self.api.llama_max_devices())(*settings.placement.tensor_split)
            self._kept.append(shares)
            parameters.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
        if settings.placement.devices is not None:
            parameters.devices = ctypes.cast(self._devices(settings.placement.devices), ctypes.c_void_p)
        if patterns := settings.placement.patterns:
            parameters.tensor_buft_overrides = ctypes.cast(self._overrides(patterns), ctypes.c_void_p)
        if settings.override_kv:
            array = changes.override_array(self.api, settings.override_kv)
            self._kept.append(array)
            parameters.kv_overrides = ctypes.cast(array, ctypes.POINTER(self.api.llama_model_kv_override))
        if progress is not None:
            callback = self.api.llama_progress_callback(lambda share, _data: progress(share))
            self._kept.append(callback)
            parameters.progress_callback = callback
        return parameters

    def _load_adapters(self) -> None:
        """The engine frees them with the model. A context sees those that were loaded before it was made."""
        try:
            self.adapters = tuple(changes.load_adapter(self.api, self.handle, a) for a in self.settings.adapters)
        except BaseException:
            self.close()
            raise

    def adapter_bytes(self) -> tuple[BufferBytes, ...]:
        """What the adapters take, by device. Empty on an engine without our patches."""
        devices = self.layer_devices() if self.adapters else ()
        return changes.adapter_bytes(self.settings, devices) if devices else ()

    def _devices(self, names: Sequence[str]) -> Any:
        handles = [self.library.ggml.ggml_backend_dev_by_name(name.encode()) for name in names]
        for name, handle in zip(names, handles, strict=True):
            if not handle:
                raise UsageError(f"there is no device '{name}'", "see `hgguf engine` for the devices")
        array = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
        self._kept.append(array)
        return array

    def _overrides(self, overrides: Sequence[tuple[str, str]]) -> Any:
        ggml, base = self.library.ggml, self.library.base
        types: dict[str, int] = {}
        for index in range(ggml.ggml_backend_dev_count()):
            buffer_type = base.ggml_backend_dev_buffer_type(ggml.ggml_backend_dev_get(index))
            types.setdefault(base.ggml_backend_buft_name(buffer_type).decode(), buffer_type)
        unknown = [name for _, name in overrides if name not in types]
        if unknown:
            raise UsageError(f"there is no buffer type '{unknown[0]}'", f"one of: {', '.join(types)}")
        rows = [TensorOverride(pattern.encode(), types[name]) for pattern, name in overrides]
        array = (TensorOverride * (len(rows) + 1))(*rows, TensorOverride(None, None))
        self._kept.append(array)
        return array

    # --- vocabulary ---

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of UTF-8 `text`. `add_special`: with the model's own start and end tokens.

        `parse_special`: text such as `<|im_start|>` becomes the control token. Raises UsageError for a text of 2 GiB,
        and EngineError where the vocabulary has no token for a part of the text.
        """
        if len(text) > _LONGEST_TEXT:
            raise UsageError("the text is too long to tokenize", "split it")
        if not self.has_vocabulary:
            raise UsageError(f"{self.path} has no vocabulary, so it cannot read text", "give a model with a tokenizer")
        capacity = len(text) + 8
        while True:
            tokens = (ctypes.c_int32 * capacity)()
            count = self.api.llama_tokenize(self.vocab, text, len(text), tokens, capacity, add_special, parse_special)
            if count >= 0:
                return list(tokens[:count])
            if count == -(2**31):
                why = log.last_error() or "the text cannot be tokenized"
                raise EngineError(f"with the vocabulary of {self.path} {why}", "`hgguf validate` checks it")
            capacity = -count

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for; control tokens give none unless `special`."""
        known = self._pieces.get((token, special))
        if known is None:
            known = self._pieces[token, special] = self._piece(token, special)
        return known

    def _piece(self, token: int, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self.api.llama_token_to_piece(self.vocab, token, buffer, size, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def token_text(self, token: int) -> str:
        """The text of a vocabulary entry as the file has it."""
        return (self.api.llama_vocab_get_text(self.vocab, token) or b"").decode("utf-8", "replace")

    def walk_vocabulary(self) -> None:
        """Tokenizes a text and each byte, and spells each token: some damaged vocabularies abort the process there."""
        if not self.has_vocabulary:
            return
        self.tokenize("Aa 1\n\té漢😀".encode(), True, True)
        for byte in range(256):  # a SentencePiece vocabulary may lack one
            self.tokenize(bytes((byte,)), False, False)
        buffer, spell = ctypes.create_string_buffer(256), self.api.llama_token_to_piece
        for token in range(self.n_vocab):
            spell(self.vocab, token, buffer, 256, 0, True)

    @property
    def has_vocabulary(self) -> bool:
        """False for a file whose tokenizer is `no_vocab`: the engine's functions on tokens abort with it."""
        return bool(self.api.llama_vocab_type(self.vocab))

    def is_end(self, token: int) -> bool:
        """Whether generation ends with this token."""
        known = self._ends.get(token)
        if known is None:
            known = self._ends[token] = bool(self.api.llama_vocab_is_eog(self.vocab, token))
        return known

    def has_control_text(self, token: int) -> bool:
        """Whether the tokenizer knows this token by its spelling and only under `parse_special`."""
        return bool(self.api.llama_vocab_get_attr(self.vocab, token) & (_ATTR_UNKNOWN | _ATTR_CONTROL))

    def special_ids(self) -> tuple[int, ...]:
        """Start, end, separator and similar tokens that this vocabulary has."""
        names = ("bos", "eos", "eot", "sep", "nl", "pad", "mask", "fim_pre", "fim_suf", "fim_mid", "fim_pad")
        found = (int(getattr(self.api, f"llama_vocab_{name}")(self.vocab)) for name in names)
        return tuple(sorted({token for token in found if token >= 0}))

    @property
    def bos_id(self) -> int | None:
        """The start token, if the vocabulary has one."""
        token = int(self.api.llama_vocab_bos(self.vocab))
        return token if token >= 0 else None

    @property
    def eos_id(self) -> int | None:
        """The end token, if the vocabulary has one."""
        token = int(self.api.llama_vocab_eos(self.vocab))
        return token if token >= 0 else None

    @property
    def add_bos(self) -> bool:
        return bool(self.api.llama_vocab_get_add_bos(self.vocab))

    @property
    def n_ctx_train(self) -> int:
        return int(self.api.llama_model_n_ctx_train(self.handle))

    @property
    def has_decoder(self) -> bool:
        return bool(self.api.llama_model_has_decoder(self.handle))

    def layer_devices(self) -> tuple[str, ...]:
        """The device of each layer, the output layer last. Empty on an engine without our patches."""
        if not self.library.patched:
            return ()
        count = self.api.llama_model_n_layer(self.handle)
        names = (self.library.llama.hg_layer_device(self.handle, layer) for layer in range(count + 1))
        return tuple((name or b"CPU").decode() for name in names)

    def native_sampler(self) -> NativeSample | None:
        """The engine's passes over logits; None for an engine without them or under HGGUF_SAMPLER=numpy."""
        return native_sampler(self.library.llama)

    def close(self) -> None:
        if self.handle:
            self.api.llama_model_free(self.handle)
            self.handle = None


def _failed(what: str, why: str, hint: str = "") -> HgError:
    """The error for a call that the engine refused: DoesNotFit when memory could not be had."""
    if memory := log.failed_allocation():
        hint = "give a smaller -c, smaller KV types (-ctk q8_0 -ctv q8_0), or keep less on the device (-ngl, --kv-vram)"
        return DoesNotFit(f"{what}: {memory}", hint)
    return EngineError(f"{what}: {why}", hint)


def _tiers_of(settings: ContextSettings) -> Tiers | None:
    tiers = settings.tiers
    if tiers is None:
        return None
    kinds = tiers.type, tiers.type
    return Tiers(tiers.cells, *kinds, tiers.policy, cpu_tokens=tiers.cpu_tokens, share=tiers.share or 0.0)


class _Ask:
    """A question that the engine asks in the middle of a step; what it raises is kept until the step has ended.

    A signal that came while C code ran is raised where Python goes on: on entering the question, before any `try` of
    ours. ctypes reports such an exception to `sys.unraisablehook` and drops it.
    """

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked = asked
        self._raised: BaseException | None = None

    def __call__(self, _data: object) -> bool:
        try:
            return self._raised is not None or self._asked()
        except BaseException as error:
            self._raised = error
            return True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around a step: raises at its end what was raised in its questions."""
        others = sys.unraisablehook

        def keep(lost: Any) -> None:
            if lost.object is self:
                self._raised = lost.exc_value
            else:
                others(lost)

        sys.unraisablehook = keep
        try:
            yield
        finally:
            sys.unraisablehook = others
            raised, self._raised = self._raised, None
        if raised is not None:
            raise raised


class Context(Closing):
    """An open context: the KV cache and the scratch memory. Raises EngineError when it cannot be made."""

    def __init__(self, model: Model, settings: ContextSettings) -> None:
        self.model = model
        self.api = model.api
        self.settings = settings
        parameters = self.api.llama_context_default_params()
        parameters.n_ctx = settings.n_ctx
        parameters.n_batch = settings.n_batch
        parameters.n_ubatch = settings.n_ubatch
        parameters.n_outputs_max = settings.n_outputs
        parameters.n_seq_max = settings.n_sequences
        parameters.kv_unified = settings.n_sequences > 1  # one pool: any sequence may take all, forks copy nothing
        parameters.type_k, parameters.type_v = KV_TYPES[settings.type_k], KV_TYPES[settings.type_v]
        parameters.flash_attn_type = FLASH_ATTENTION[settings.flash_attention]
        parameters.offload_kqv = settings.placement.kv_offload
        parameters.swa_full = False  # windowed layers keep their window alone, as llama.cpp's own programs do
        parameters.n_threads, parameters.n_threads_batch = settings.threads, settings.threads_batch
        changes.set_rope(parameters, settings.rope)
        log.lines.clear()
        with pending(model.library, _tiers_of(settings)) as asked:
            self.handle: Any = self.api.llama_init_from_model(model.handle, parameters)
        self.tier_note = asked.note
        if not self.handle:
            raise _failed(f"the engine cannot make a context of {settings.n_ctx} tokens", log.last_error())
        if model.adapters and changes.set_adapters(self.api, self.handle, model):
            self.close()
            raise _failed("the engine cannot apply the adapters", log.last_error())
        self.n_ctx = int(self.api.llama_n_ctx(self.handle))
        self._memory = self.api.llama_get_memory(self.handle)
        self._window = int(self.api.llama_model_n_swa(model.handle))
        self._tokens = (ctypes.c_int32 * max(settings.n_batch, 1))()
        self._batch = self.api.llama_batch_get_one(self._tokens, 0)
        self._abort: object = None
        self._ask: _Ask | None = None
        self._logits_at = 0
        self._logits = np.empty(0, np.float32)

    def decode(self, tokens: Sequence[int]) -> bool:
        """Reads at most n_batch tokens after those already in the cache. False when the abort callback stopped it."""
        count = len(tokens)
        self._tokens[:count] = list(tokens)
        self._batch.n_tokens = count
        log.lines.clear()
        if self._ask is None:
            status = self.api.llama_decode(self.handle, self._batch)
        else:
            with self._ask.listening():
                status = self.api.llama_decode(self.handle, self._batch)
        if status == 0:
            return True
        if status == _ABORTED:
            return False
        if status == _NO_ROOM:
            raise EngineError(f"the context of {self.n_ctx} tokens is full", "give a larger -c, or a shorter prompt")
        raise _failed(f"decoding failed (code {status})", log.last_error())

    def logits(self) -> NDArray[np.float32]:
        """Logits of the last token read, float32 [n_vocab]; a view that is valid until the next decode."""
        pointer = self.api.llama_get_logits_ith(self.handle, -1)
        if not pointer:
            raise EngineError("the engine gives no logits")
        address = ctypes.addressof(pointer.contents)
        if address != self._logits_at:  # making the view costs more than drawing from it, and it rarely moves
            self._logits_at = address
            self._logits = np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab,))
        return self._logits

    def set_abort(self, asked: Callable[[], bool] | None) -> None:
        """While set, the CPU backend asks before each operation whether to stop (llama_set_abort_callback).

        What `asked` raises, Ctrl-C among it, stops the step and is raised by `decode`.
        """
        self._ask = _Ask(asked) if asked else None
        self._abort = self.api.ggml_abort_callback(self._ask or 0)
        self.api.llama_set_abort_callback(self.handle, self._abort, None)

    def synchronize(self) -> None:
        self.api.llama_synchronize(self.handle)

    def set_threads(self, decode: int, prompt: int) -> None:
        self.api.llama_set_n_threads(self.handle, decode, prompt)

    def clear(self) -> None:
        """Forgets all tokens; the memory stays."""
        self.api.llama_memory_clear(self._memory, False)

    def keep_prefix(self, length: int) -> bool:
        """Forgets all tokens after the first `length`. False when that cannot be done: recurrent state, or a sliding
        window whose cells before `length` are gone already."""
        first_needed = max(0, length - self._window)
        if self._window and self.api.llama_memory_seq_pos_min(self._memory, 0) > first_needed:
            return False
        return bool(self.api.llama_memory_seq_rm(self._memory, 0, length, -1))

    def memory_use(self) -> tuple[BufferBytes, ...]:
        """Bytes by buffer type, model included. Empty on an engine without our patches."""
        if not self.model.library.patched:
            return ()
        entries = (MemoryEntry * 32)()
        count = self.model.library.llama.hg_memory(self.handle, entries, len(entries))
        buffers = tuple(
            BufferBytes(e.buffer_type.decode(), e.device.decode(), bool(e.is_host), e.model, e.context, e.compute)
            for e in entries[:count]
        )
        return buffers + self.model.adapter_bytes()

    def device_sample(self, count: int, probabilities: bool = False) -> DeviceSample:
        """The `count` largest logits of each decode, found on the device. Raises EngineError when that cannot be."""
        llama, n_vocab = self.model.library.llama, self.model.n_vocab
        return DeviceSample(llama, self.handle, n_vocab=n_vocab, count=count, probabilities=probabilities)

    def tier_counters(self) -> TierCounters | None:
        """What the KV tiers have done so far; None with one memory."""
        return counters(self.model.library, self.handle)

    def set_cpu_tokens(self, cpu_tokens: int) -> bool:
        """From now on the CPU attends to host cells for micro-batches of at most so many tokens."""
        return set_cpu_tokens(self.model.library, self.handle, cpu_tokens)

    def close(self) -> None:
        if self.handle:
            self.api.llama_free(self.handle)
            self.handle = None
