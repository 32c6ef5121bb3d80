"""Serves the index on loopback. Answers PEP 691 requests with JSON, everything else with the pages."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from build_matrix.errors import BuildError
from build_matrix.serve import install_line
from build_matrix.serve.index import JSON_PAGE
from build_matrix.spec import matrix

JSON = "application/vnd.pypi.simple.v1+json"
HOST = "127.0.0.1"


class Handler(SimpleHTTPRequestHandler):
    """One address serves both kinds of page, by what the request accepts."""

    protocol_version = "HTTP/1.1"

    def send_head(self):
        """What the base class sends: the page, JSON where it was asked for; 404 for what can be no file's name."""
        try:
            folder = Path(self.translate_path(self.path))
            there = stat.S_IFMT(
                os.stat(folder).st_mode
            )  # ValueError for a zero byte, OSError for a long name
            asked = JSON in self.headers.get("Accept", "") and self.path.endswith("/")
            body = (folder / JSON_PAGE).open("rb") if asked and (folder / JSON_PAGE).is_file() else None
        except (OSError, ValueError):
            there, body = 0, None
        if there not in (stat.S_IFREG, stat.S_IFDIR):  # a FIFO would be waited for
            self.send_error(HTTPStatus.NOT_FOUND, "File not found")
            return None
        if body is None:
            return super().send_head()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", JSON)
        self.send_header("Content-Length", str(os.fstat(body.fileno()).st_size))
        self.end_headers()
        return body  # the base class closes it

    def log_message(self, *arguments) -> None:
        """Requests are not worth a line each."""


def lines(folder: Path, address: str) -> list[str]:
    """pip's line for each project that an index in `folder` lists."""
    found = []
    for accelerator in matrix.load().accelerators:
        if any((folder / "whl" / root / accelerator.distribution).is_dir() for root in accelerator.roots):
            found.append(install_line.line(accelerator.name, address))
    return found


def make(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of `folder` on loopback, bound but not serving yet; port 0 takes a free one. Raises BuildError for a
    port that cannot be had."""
    try:
        return ThreadingHTTPServer((HOST, port), partial(Handler, directory=str(folder)))
    except OSError as error:
        raise BuildError(f"port {port} cannot be had: {error.strerror}; --port 0 takes a free one") from None


@contextlib.contextmanager
def background(folder: Path) -> Iterator[str]:
    """Serves while the block runs. Gives the address, without a slash at its end."""
    server = make(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
