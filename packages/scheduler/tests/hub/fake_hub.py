"""Hub with one model, for tests of downloads."""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0a" * 20


class FakeHub(ThreadingHTTPServer):
    """Server of the files of the model `name`."""

    daemon_threads = True

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.files = files
        self.lost: set[str] = set()
        """Names of listed files that it does not give."""
        self.sent: list[str] = []
        """Names of the files that it gave."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, *, body: bool) -> None:
        hub = self.server
        path = self.path.partition("?")[0]
        if re.fullmatch(rf"/api/models/{hub.name}(/revision/\w+)?", path):
            names = [{"rfilename": name} for name in hub.files]
            self._send(200, json.dumps({"id": hub.name, "sha": COMMIT, "siblings": names}).encode(), body=body)
        elif re.fullmatch(rf"/api/models/{hub.name}/tree/\w+", path):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in hub.files.items()
            ]
            self._send(200, json.dumps(tree).encode(), body=body)
        elif match := re.fullmatch(rf"/{hub.name}/resolve/\w+/(.+)", path):
            self._send_file(match[1], body=body)
        else:
            self._send(404, b"{}", body=body, headers={"X-Error-Code": "RepoNotFound"})

    def _send_file(self, name: str, *, body: bool) -> None:
        hub = self.server
        content = hub.files[name]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        if name in hub.lost:
            self._send(404, b"{}", body=body, headers={"X-Error-Code": "EntryNotFound"})
            return
        if body:
            hub.sent.append(name)
        self._send(200, content, body=body, headers={"ETag": etag, "X-Repo-Commit": COMMIT})

    def _send(self, status: int, content: bytes, *, body: bool, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextlib.contextmanager
def fake_hub(name: str, files: Mapping[str, bytes]) -> Iterator[FakeHub]:
    """Run a hub in a thread."""
    hub = FakeHub(name, files)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
