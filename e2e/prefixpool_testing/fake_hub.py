"""A Hub on loopback with one repository, made from a folder: lists, ranges, etags, tokens, refusals, a hand on the tap.

It runs in threads of its own, because whoever downloads blocks, or is another process.

    with FakeHub(folder, "org/model") as hub:
        hub.url                     # HF_ENDPOINT
        hub.hold(at_bytes=1000)     # answers stop there until `hub.release()`
        hub.refuse(401)             # everything, from now on; 0: no more
        hub.downloads               # names, as often as they were begun
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import unquote

COMMIT: Final = "c0ffee" + "0" * 34
_PIECE: Final = 1 << 16
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")


class FakeHub:
    """`token`: "" lets everybody in. `branch`: what its one commit is called."""

    def __init__(self, folder: Path, model: str, *, token: str = "", branch: str = "main") -> None:
        self.model = model
        self.branch = branch
        self.token = token
        self.downloads: list[str] = []
        self.asked: list[str] = []  # paths, with methods
        self.status = 0
        self.held_at = -1
        self._open = threading.Event()
        self._open.set()
        self.files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        self.digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in self.files.items()}
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nobody listens there any more."""
        self._open.set()
        self._server.shutdown()
        self._server.server_close()

    def hold(self, *, at_bytes: int) -> None:
        """Contents stop behind so many bytes, or at their end if that is nearer."""
        self.held_at = at_bytes
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def refuse(self, status: int) -> None:
        self.status = status

    def waits(self) -> None:
        """Where the tap is closed."""
        self._open.wait(60)

    def listing(self) -> dict[str, Any]:
        siblings = [
            {"rfilename": name, "size": path.stat().st_size, "blobId": "0" * 40, "lfs": {
                "sha256": self.digests[name], "size": path.stat().st_size, "pointerSize": 1}}
            for name, path in self.files.items()
        ]  # fmt: skip
        return {"id": self.model, "sha": COMMIT, "siblings": siblings}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: FakeHub) -> None:
        self.hub = hub
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> FakeHub:
        assert isinstance(self.server, _Server)
        return self.server.hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        """Tests ask `FakeHub.asked`."""

    def _answer(self) -> None:
        path, hub = unquote(self.path.partition("?")[0]), self.hub
        hub.asked.append(f"{self.command} {path}")
        revisions = [f"/api/models/{hub.model}/revision/{revision}" for revision in (hub.branch, COMMIT)]
        with suppress(BrokenPipeError, ConnectionResetError):
            if hub.status:
                self._end(hub.status)
            elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._end(401)
            elif path in revisions:
                self._end(200, json.dumps(hub.listing()).encode())
            elif (name := path.removeprefix(f"/{hub.model}/resolve/{COMMIT}/")) in hub.files:
                self._file(name)
            else:
                self._end(404)

    def _end(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _file(self, name: str) -> None:
        content = self.hub.files[name].read_bytes()
        wanted = _RANGE.fullmatch(self.headers.get("Range") or "")
        start = int(wanted[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{self.hub.digests[name]}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.hub.downloads.append(name)
            self._body(content, start)

    def _body(self, content: bytes, start: int) -> None:
        for at in range(start, len(content), _PIECE):
            if 0 <= self.hub.held_at <= at:
                self.hub.waits()
            self.wfile.write(content[at : at + _PIECE])
