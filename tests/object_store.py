"""A store for tests on the loopback, of which every tenth request fails, and one in memory."""

import itertools
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

EVERY = 10
"""One of so many requests fails."""


@contextmanager
def web_hdfs(root: Path, *, every: int = EVERY) -> Iterator[str]:
    """Serve a folder as a Hadoop file system; yield the URL of its root.

    fsspec speaks to it without a further package.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _WebHdfs)
    server.root, server.every, server.requests = root, every, itertools.count(1)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"webhdfs://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def store(kind: str, folder: Path) -> Iterator[str]:
    """Yield the URL of a store of a kind: "webhdfs", or one without folders, in "memory"."""
    if kind == "memory":
        yield f"memory://{folder.name}"
    else:
        with web_hdfs(folder / "store") as url:
            yield url


class _WebHdfs(BaseHTTPRequestHandler):
    """The operations of https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html
    that fsspec asks for."""

    server: Any

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if next(self.server.requests) % self.server.every == 0:
            self.send_error(503)
            return
        url = urlsplit(self.path)
        asked = {key: values[0] for key, values in parse_qs(url.query).items()}
        path = self.server.root / unquote(url.path).removeprefix("/webhdfs/v1").strip("/")
        try:
            getattr(self, asked["op"].lower())(path, asked, body)
        except FileNotFoundError as error:
            said = {"exception": "FileNotFoundException", "message": str(error)}
            self.answer({"RemoteException": said}, code=404)

    do_GET = do_PUT = do_POST = do_DELETE = handle_request  # noqa: N815

    def getfilestatus(self, path: Path, asked: dict[str, str], body: bytes) -> None:
        self.answer({"FileStatus": status(path)})

    def liststatus(self, path: Path, asked: dict[str, str], body: bytes) -> None:
        self.answer({"FileStatuses": {"FileStatus": [status(p) for p in path.iterdir()]}})

    def open(self, path: Path, asked: dict[str, str], body: bytes) -> None:
        offset = int(asked.get("offset", 0))
        self.answer(path.read_bytes()[offset : offset + int(asked["length"])])

    def create(self, path: Path, asked: dict[str, str], body: bytes) -> None:
        if self.is_redirected(asked):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
            self.answer({})

    def append(self, path: Path, asked: dict[str, str], body: bytes) -> None:
        if self.is_redirected(asked):
            with path.open("ab") as file:
                file.write(body)
            self.answer({})

    def mkdirs(self, path: Path, asked: dict[str, str], body: bytes) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.answer({"boolean": True})

    def rename(self, path: Path, asked: dict[str, str], body: bytes) -> None:
        path.rename(self.server.root / asked["destination"].strip("/"))
        self.answer({"boolean": True})

    def delete(self, path: Path, asked: dict[str, str], body: bytes) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.answer({"boolean": True})

    def is_redirected(self, asked: dict[str, str]) -> bool:
        """Send a client to the node that has the data, which is this one."""
        if "node" in asked:
            return True
        self.send_response(307)
        here = f"http://{self.headers['Host']}{self.path}"
        self.send_header("Location", f"{here}&node=1")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False

    def answer(self, content: Any, *, code: int = 200) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def status(path: Path) -> dict[str, object]:
    found = path.stat()
    kind = "DIRECTORY" if path.is_dir() else "FILE"
    return {"type": kind, "length": found.st_size, "pathSuffix": path.name}
