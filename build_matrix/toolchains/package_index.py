"""The package index of pip's own configuration: which files a project has (PEP 691 JSON, or PEP 503
pages)."""

from __future__ import annotations

import html.parser
import http.client
import json
import os
import re
import ssl
import subprocess
import sys
import urllib.parse
import urllib.request
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from build_matrix.errors import PackageIndexError

DEFAULT = "https://pypi.org/simple"
JSON = "application/vnd.pypi.simple.v1+json"
TIMEOUT = 60
LARGEST = 64 << 20  # bytes of a page; that of torch has two million
# No answer, an answer that is cut, or a page that is none.
UNREADABLE = (OSError, http.client.HTTPException, ValueError, LookupError)


@dataclass(frozen=True)
class IndexFile:
    """A file as an index lists it; `sha256` is empty where the page states none."""

    filename: str
    url: str
    sha256: str


@cache
def _pip(key: str) -> str:
    """A value of pip's configuration (environment, then files), or an empty string."""
    variable = f"PIP_{key.upper().replace('-', '_')}"
    if os.environ.get(variable):
        return os.environ[variable]
    command = [sys.executable, "-m", "pip", "config", "get", f"global.{key}"]
    return subprocess.run(command, text=True, capture_output=True).stdout.strip()


def urls() -> list[str]:
    """The index roots, in pip's order."""
    found = [_pip("index-url") or DEFAULT, *_pip("extra-index-url").split()]
    return [url.rstrip("/") for url in found]


def _find_links() -> list[Path]:
    """The local folders of wheels that pip looks into (find-links)."""
    places = [place for place in _pip("find-links").split() if not place.startswith("http")]
    folders = [Path(urllib.request.url2pathname(urllib.parse.urlsplit(place).path)) for place in places]
    return [folder for folder in folders if folder.is_dir()]


@cache
def tls() -> ssl.SSLContext:
    """Trusts what pip trusts."""
    return ssl.create_default_context(cafile=_pip("cert") or None)


def files(project: str) -> list[IndexFile]:
    """Every file of a project on the index roots that are web servers. Raises PackageIndexError when none
    answers."""
    found: list[IndexFile] = []
    reasons = []
    for root in urls():
        if root.startswith("http"):
            try:
                found += _page(f"{root}/{project}/")
            except UNREADABLE as error:
                reasons.append(f"{root}/{project}/: {error}")
    if not found:
        why = f": {'; '.join(reasons)}" if reasons else ""
        raise PackageIndexError(
            f"no index holds {project}{why}. PIP_INDEX_URL, or pip's configuration, names another index"
        )
    return found


def files_at(address: str) -> list[IndexFile]:
    """Every file of one project page; empty when it cannot be read."""
    try:
        return _page(address)
    except UNREADABLE:
        return []


def configured_files(project: str) -> list[IndexFile]:
    """Every file of a project that pip would see: index roots, local ones too, and folders of wheels."""
    found = [file for root in urls() for file in files_at(f"{root}/{project}/")]
    for folder in _find_links():
        found += [IndexFile(p.name, p.as_uri(), "") for p in sorted(folder.glob(f"{project}-*.whl"))]
    return found


def size(url: str) -> int:
    """The bytes of a file, without fetching it; 0 where a server does not say. Raises PackageIndexError."""
    if url.startswith("file:"):
        return Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path)).stat().st_size
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT, context=tls()) as answer:
            return int(answer.headers.get("Content-Length", 0))
    except UNREADABLE as error:
        raise PackageIndexError(f"{url}: {error}") from error


def _page(address: str) -> list[IndexFile]:
    if address.startswith("file:"):
        page = Path(urllib.request.url2pathname(urllib.parse.urlsplit(address).path)) / "index.html"
        return _of_page(page.read_bytes(), address)
    request = urllib.request.Request(address, headers={"Accept": f"{JSON}, text/html;q=0.1"})
    with urllib.request.urlopen(request, timeout=TIMEOUT, context=tls()) as answer:
        body, kind, base = answer.read(LARGEST + 1), answer.headers.get_content_type(), answer.url
    if len(body) > LARGEST:
        raise ValueError(f"the page has more than {LARGEST} bytes")
    found = _of_json(body, base) if kind == JSON else _of_page(body, base)
    # A server has no say over the files of this machine.
    return [file for file in found if file.url.startswith(("http://", "https://"))]


def _of_json(body: bytes, base: str) -> list[IndexFile]:
    try:
        listed = [
            (f["filename"], urllib.parse.urljoin(base, f["url"]), f.get("hashes", {}).get("sha256", ""))
            for f in json.loads(body)["files"]
        ]
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the page is none of an index: {error}") from None
    return [IndexFile(name, url, _sha256(stated)) for name, url, stated in listed]


def _sha256(stated: str) -> str:
    """A digest as it is, and nothing where it is none."""
    return stated if re.fullmatch(r"[0-9a-f]{64}", str(stated)) else ""


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attributes if tag == "a" and name == "href" and value]


def _of_page(body: bytes, base: str) -> list[IndexFile]:
    links = _Links()
    links.feed(body.decode(errors="replace"))
    found = []
    for link in links.found:
        address, fragment = urllib.parse.urldefrag(urllib.parse.urljoin(base, link))
        name = urllib.parse.unquote(address.rpartition("/")[2])
        found.append(IndexFile(name, address, _sha256(fragment.removeprefix("sha256="))))
    return found
