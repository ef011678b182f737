"""Finds and loads the engine's libraries, checks that they are the right ones, and says what they are.

Looks, in this order, at HGGUF_ENGINE, LLAMA_CPP_LIB_PATH, the link that scripts/build_engine left in the virtual
environment, and the library inside an installed llama-cpp-python. Knows nothing of models.
Invariant: no function of the engine is called before its commit has been checked, because the binding's structs match
one commit and no other.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import socket
import struct
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import EngineError, EngineMismatch, UsageError
from .abi import declare, ggml, hg, llama
from .pin import BINDING, COMMIT, GGML_VERSION

_BUILD = "build it again: scripts/setup"
_ELF = struct.Struct("<16s24xQ10xHH2x")  # e_ident, e_shoff, e_shentsize, e_shnum


@dataclass(frozen=True)
class BackendDevice:
    """A device as the engine sees it. Bytes are zero where the backend does not tell."""

    name: str
    kind: str
    description: str
    memory_free: int
    memory_total: int
    buffer_type: str


@dataclass(frozen=True)
class Switch:
    """A run-time switch of a patch: its value now and the values it may have (default first)."""

    name: str
    value: str
    values: tuple[str, ...]


class Library:
    """The loaded engine: `api` is the binding's module; `llama`, `ggml`, `base` are handles of our own to the libraries
    behind it, declared by `abi`. `patched`, `has_tiers`, `has_sampler`, `has_device_sampler`,
    `has_grammar`: which of ours it has."""

    def __init__(self, folder: Path, api: Any) -> None:
        self.folder = folder
        self.api = api
        self.llama, self.ggml, self.base = (
            ctypes.CDLL(str(_file(folder, name))) for name in ("llama", "ggml", "ggml-base")
        )
        stock = [(self.base, table) for table in (ggml.VERSION, ggml.BASE, ggml.GRAPHS, ggml.GGUF)]
        stock += [(self.ggml, ggml.REGISTRY), (self.llama, llama.SAMPLERS)]
        if not all(declare(library, table) for library, table in stock):
            raise EngineMismatch(f"the engine in {folder} lacks functions of its version", "run scripts/setup again")
        self.patched = declare(self.base, hg.IDENTITY) and declare(self.llama, hg.API)
        self.has_tiers = declare(self.llama, hg.TIERS)
        self.has_sampler = declare(self.llama, hg.SAMPLE)
        self.has_device_sampler = declare(self.llama, hg.SAMPLE_DEVICE)
        self.has_grammar = declare(self.llama, hg.GRAMMAR)

    @property
    def commit(self) -> str:
        return str(self.base.hg_commit().decode()) if self.patched else "unknown"

    @property
    def patches(self) -> tuple[str, ...]:
        return tuple(self.base.hg_patches().decode().split(",")) if self.patched else ()

    def switches(self) -> tuple[Switch, ...]:
        found: list[Switch] = []
        while self.patched and (name := self.base.hg_switch_name(len(found))) is not None:
            values = self.base.hg_switch_values(len(found)).decode().split("|")
            found.append(Switch(name.decode(), self.base.hg_switch_get(name).decode(), tuple(values)))
        return tuple(found)

    def set_switch(self, name: str, value: str) -> None:
        """Sets a run-time switch for the whole process. Raises UsageError for an unknown name or value."""
        if not self.patched or not self.base.hg_switch_set(name.encode(), value.encode()):
            raise UsageError(f"the engine has no switch '{name}' with a value '{value}'", "see `hgguf engine`")

    def backends(self) -> tuple[str, ...]:
        count = self.ggml.ggml_backend_reg_count()
        return tuple(
            self.base.ggml_backend_reg_name(self.ggml.ggml_backend_reg_get(index)).decode() for index in range(count)
        )

    def devices(self) -> tuple[BackendDevice, ...]:
        return tuple(self._device(index) for index in range(self.ggml.ggml_backend_dev_count()))

    def _device(self, index: int) -> BackendDevice:
        handle = self.ggml.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.base.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        return BackendDevice(
            name=self.base.ggml_backend_dev_name(handle).decode(),
            kind=ggml.DEVICE_TYPES.get(self.base.ggml_backend_dev_type(handle), "other"),
            description=self.base.ggml_backend_dev_description(handle).decode(errors="replace"),
            memory_free=free.value,
            memory_total=total.value,
            buffer_type=self.base.ggml_backend_buft_name(self.base.ggml_backend_dev_buffer_type(handle)).decode(),
        )

    def rpc(self) -> ctypes.CDLL:
        """The library with the RPC functions. Raises EngineError when this engine has none."""
        if declare(self.ggml, ggml.RPC):
            return self.ggml
        file = _file(self.folder, "ggml-rpc")
        if not file.exists():
            raise EngineError("this engine was built without RPC", "build it with scripts/build_engine")
        library = ctypes.CDLL(str(file))
        declare(library, ggml.RPC)
        return library

    def add_rpc(self, endpoint: str) -> None:
        """Registers the devices of an RPC server (`HOST:PORT`). Raises EngineError when it does not answer."""
        rpc = self.rpc()
        _check_answers(endpoint)
        registry = rpc.ggml_backend_rpc_add_server(endpoint.encode())
        if not registry:
            raise EngineError(f"the RPC server {endpoint} does not answer", "check that it runs and the port is right")
        self.ggml.ggml_backend_register(registry)


def _check_answers(endpoint: str) -> None:
    """The engine aborts the process when nobody listens, so look first. Raises UsageError, EngineError."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--rpc {endpoint} is not HOST:PORT", "for example --rpc 192.168.1.5:50052")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise EngineError(f"the RPC server {endpoint} does not answer: {why}", "check that it runs there") from None


def _file(folder: Path, name: str) -> Path:
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    prefix = "" if sys.platform == "win32" else "lib"
    return folder / f"{prefix}{name}{suffix}"


def find() -> Path:
    """The folder that holds libllama. Raises EngineError when there is none."""
    for variable in ("HGGUF_ENGINE", "LLAMA_CPP_LIB_PATH"):
        if chosen := os.environ.get(variable):
            if _file(Path(chosen), "llama").exists():
                return Path(chosen)
            raise EngineError(
                f"{variable}={chosen} holds no engine", "unset it, or give the folder with libllama in it"
            )
    linked = Path(sys.prefix) / "hgguf-engine"
    try:
        if _file(linked, "llama").exists():
            return linked.resolve()
    except PermissionError:
        what = f"the engine in {linked.readlink()} may not be read by this user"
        raise EngineError(what, "build one of your own with scripts/setup in a checkout of your own") from None
    spec = importlib.util.find_spec("llama_cpp")
    installed = Path(spec.origin).parent / "lib" if spec and spec.origin else None
    if installed and _file(installed, "llama").exists():
        return installed
    raise EngineError("the engine was not found", "run scripts/setup, or install llama-cpp-python with its library")


def check(folder: Path) -> bool:
    """True for our engine, False for a stock one of the same version. Raises EngineMismatch for any other."""
    for name in ("ggml-base", "ggml-cpu", "ggml", "llama"):
        _check_whole(_file(folder, name))
    try:
        base = ctypes.CDLL(str(_file(folder, "ggml-base")))
    except OSError as error:
        raise EngineError(f"the engine in {folder} cannot be loaded: {error}", _BUILD) from None
    declared = declare(base, ggml.VERSION)
    version = base.ggml_version().decode() if declared else "unknown"
    patched = declare(base, hg.IDENTITY)
    commit = base.hg_commit().decode() if patched else "unknown"
    if version != GGML_VERSION or (patched and commit != COMMIT):
        raise EngineMismatch(
            f"the engine in {folder} is ggml {version}, commit {commit}; this version needs {GGML_VERSION}, {COMMIT}",
            "run scripts/setup to build the right one",
        )
    return patched


def _check_whole(path: Path) -> None:
    """A library that was cut would end the process with SIGBUS while it loads. Raises EngineError.

    Source: the ELF header of 64 bits; its table of sections stands at the end of what linkers write.
    """
    if not path.exists():
        return  # backends that are loaded by name, or linked in
    with path.open("rb") as file:
        head = file.read(_ELF.size)
    if len(head) < _ELF.size or not head.startswith(b"\x7fELF\x02\x01"):
        if sys.platform == "linux":
            raise EngineError(f"the engine cannot be loaded: {path} is not a library", _BUILD)
        return
    _, offset, size, count = _ELF.unpack(head)
    if offset + size * count > path.stat().st_size:
        raise EngineError(f"the engine cannot be loaded: {path} is cut short", _BUILD)


def _binding() -> tuple[Any, str]:
    """The binding's module of declarations, and its version.

    Importing the package would load its own model class with numpy, jinja2 and a cache: 0.15 s at every start.
    """
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise ImportError("llama-cpp-python is not installed")
    found = re.search(r'^__version__ = "(.+)"', Path(spec.origin).read_text(encoding="utf-8"), re.MULTILINE)
    whole = "llama_cpp" in sys.modules
    if not whole:
        sys.modules["llama_cpp"] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module("llama_cpp.llama_cpp"), found[1] if found else "unknown"
    finally:
        if not whole:
            del sys.modules["llama_cpp"]  # whoever wants the package imports it as usual


@functools.cache
def load() -> Library:
    """Loads the engine once. Raises EngineError, EngineMismatch; warns when it has no patches of ours."""
    folder = find()
    patched = check(folder)
    os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # an abort would start a debugger on this process
    try:
        api, version = _binding()
    except (ImportError, OSError, RuntimeError) as error:
        why = str(error).rpartition(f"'{_file(folder, 'llama')}': ")[2]  # without the binding's own words
        raise EngineError(f"the engine in {folder} cannot be loaded: {why}", _BUILD) from None
    if version != BINDING:
        raise EngineMismatch(
            f"llama-cpp-python {version} is installed; this version needs {BINDING}", "run scripts/setup"
        )
    if not patched:
        warnings.warn(
            "this engine has no patches of hgguf: exact byte counts, fast CPU attention and KV tiers are missing "
            "(scripts/setup builds ours)",
            RuntimeWarning,
            stacklevel=2,
        )
    return Library(folder, api)
