"""The real Hub library against a Hub of our own on this machine: fetched, resumed, refused, gated, gone."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

DATA = b"GGUF" + os.urandom(3 << 20)
SHA = hashlib.sha256(DATA).hexdigest()
COMMIT = "c" * 40
SCRIPT = """
import json, sys
from hybridgen_gguf.errors import HgError
from hybridgen_gguf.models.download import pull
from hybridgen_gguf.models.registry import resolve
seen = []
try:
    pulled = pull(resolve(sys.argv[1]), lambda done, total: seen.append((done, total)))
    print(json.dumps({"path": str(pulled.path), "sha256": pulled.sha256, "seen": seen}))
except HgError as error:
    print(json.dumps({"error": type(error).__name__, "what": error.what, "hint": error.hint}))
"""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cut = 0  # bytes after which an answer breaks off; 0: never
    answers = 99  # how many times the file is sent at all
    whole = False  # ranges are not honoured
    digest = SHA
    ranges: list[str] = []  # noqa: RUF012 - shared on purpose: what was asked for

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/me/model"):
            file = {"rfilename": "m-Q4_0.gguf", "size": len(DATA), "blobId": "b", "lfs": self._lfs()}
            self._answer(200, json.dumps({"id": "me/model", "sha": COMMIT, "siblings": [file]}).encode())
        elif self.path.startswith("/me/model/resolve/main/m-Q4_0.gguf"):
            self._file()
        elif "gated" in self.path:
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _lfs(self) -> dict[str, object]:
        return {"sha256": self.digest, "size": len(DATA), "pointerSize": 134}

    def _file(self) -> None:
        Handler.answers -= 1
        if Handler.answers < 0:
            self.close_connection = True
            return
        asked = self.headers.get("Range", "bytes=0-")
        Handler.ranges.append(asked)
        start = 0 if Handler.whole else int(asked.removeprefix("bytes=").split("-")[0])
        headers = {"ETag": f'"{SHA}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if not Handler.whole:
            headers["Content-Range"] = f"bytes {start}-{len(DATA) - 1}/{len(DATA)}"
        self._answer(200 if Handler.whole else 206, DATA[start:], headers)

    def _answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if Handler.cut and len(body) > Handler.cut:
            self.wfile.write(body[: Handler.cut])
            self.close_connection = True
            return
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Silent."""


@pytest.fixture
def server() -> Iterator[str]:
    Handler.cut, Handler.answers, Handler.whole, Handler.digest, Handler.ranges = 0, 99, False, SHA, []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def ask(server: str, folder: Path, text: str) -> dict[str, object]:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": server, "HGGUF_MODELS": str(folder / "models"), "HF_HOME": str(folder / "hf")}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
    environment.pop("HF_HUB_OFFLINE", None)
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, text],
        env=environment | {"PYTHONPATH": root},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == "" and done.returncode == 0
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_fetched_with_progress(server: str, tmp_path: Path) -> None:
    answer = ask(server, tmp_path, "me/model:Q4_0")
    path = Path(str(answer["path"]))
    assert path == tmp_path / "models" / "me@model@Q4_0" / "m-Q4_0.gguf"
    assert path.read_bytes() == DATA and answer["sha256"] == SHA
    assert isinstance(answer["seen"], list) and answer["seen"][-1] == [len(DATA), len(DATA)]
    assert sorted(p.name for p in path.parent.iterdir()) == ["m-Q4_0.gguf", "record.json"]


def test_broken_off_and_gone_on(server: str, tmp_path: Path) -> None:
    Handler.cut = 1 << 20
    assert ask(server, tmp_path, "me/model")["sha256"] == SHA
    assert Handler.ranges == [f"bytes={n << 20}-" for n in range(4)]


def test_stopped_then_resumed_by_another_process(server: str, tmp_path: Path) -> None:
    Handler.cut, Handler.answers = 1 << 20, 2
    stopped = ask(server, tmp_path, "me/model")
    assert stopped["error"] == "DownloadError" and not list(tmp_path.rglob("*.gguf"))
    Handler.cut, Handler.answers, Handler.ranges = 0, 99, []
    assert ask(server, tmp_path, "me/model")["sha256"] == SHA
    assert Handler.ranges == [f"bytes={2 << 20}-"]


def test_server_without_ranges(server: str, tmp_path: Path) -> None:
    Handler.cut, Handler.answers = 1 << 20, 1
    assert "error" in ask(server, tmp_path, "me/model")
    Handler.cut, Handler.answers, Handler.whole = 0, 99, True
    assert ask(server, tmp_path, "me/model")["sha256"] == SHA


def test_bytes_that_are_not_what_the_hub_says(server: str, tmp_path: Path) -> None:
    Handler.digest = "1" * 64
    answer = ask(server, tmp_path, "me/model")
    assert answer["error"] == "DownloadError" and "wrong checksum" in str(answer["what"])
    assert not list(tmp_path.rglob("*.gguf"))


def test_gated_and_unknown(server: str, tmp_path: Path) -> None:
    gated = ask(server, tmp_path, "me/gated")
    assert gated["error"] == "DownloadError" and "hf auth login" in str(gated["hint"])
    unknown = ask(server, tmp_path, "me/none")
    assert unknown["error"] == "NotFound" and "me/none" in str(unknown["what"])
    other = ask(server, tmp_path, "me/model:Q8_0")
    assert other["error"] == "NotFound" and other["hint"] == "it has Q4_0"
