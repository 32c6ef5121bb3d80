"""The package index of pip's own configuration: which files a project has (PEP 691 JSON, or PEP 503
pages)."""

from __future__ import annotations

import html.parser
import http.client
import json
import logging
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
# No answer, an answer that is cut, or a page that is none: one nested without end, too.
UNREADABLE = (OSError, http.client.HTTPException, ValueError, LookupError, RecursionError)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexFile:
    """A file as an index lists it; `sha256` is empty where the page states none. `yanked`: taken back (PEP 592), for
    those alone who name its very version."""

    filename: str
    url: str
    sha256: str
    yanked: bool = False


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
    """Every file of a project on the index roots that are web servers; a root that does not answer is told. Raises
    PackageIndexError when none answers."""
    found, silent = _listed(project)
    for reason in silent:
        _tell(reason)
    return found


def newest_of(project: str) -> list[IndexFile]:
    """The files of a project that are not yanked, to choose the newest from. Raises PackageIndexError where one of the
    index roots does not answer: the newest might lie there."""
    found, silent = _listed(project)
    if silent:
        raise PackageIndexError(
            f"which {project} is the newest is not known, as an index does not answer: {'; '.join(silent)}. Try again, "
            "or leave it out of PIP_INDEX_URL, PIP_EXTRA_INDEX_URL or pip's configuration"
        )
    return [file for file in found if not file.yanked]


def _listed(project: str) -> tuple[list[IndexFile], list[str]]:
    """(files of all index roots that are web servers, why each root that did not answer did not). Raises
    PackageIndexError where there is no file."""
    found: list[IndexFile] = []
    absent, silent = [], []
    for root in urls():
        if root.startswith("http"):
            try:
                found += _page(f"{root}/{project}/")
            except UNREADABLE as error:
                (absent if _is_absent(error) else silent).append(f"{root}/{project}/: {error}")
    if not found:
        reasons = [*silent, *absent]
        why = f": {'; '.join(reasons)}" if reasons else ""
        raise PackageIndexError(
            f"no index holds {project}{why}. PIP_INDEX_URL, or pip's configuration, names another index"
        )
    return found, silent


def _is_absent(error: BaseException) -> bool:
    """Whether an index answered, and has no such project: not every index has all."""
    return isinstance(error, FileNotFoundError) or getattr(error, "code", None) == http.HTTPStatus.NOT_FOUND


def _tell(reason: str) -> None:
    log.warning("an index does not answer, and is passed over: %s", reason)


def files_at(address: str) -> list[IndexFile]:
    """Every file of one project page; empty when it cannot be read, which is told."""
    try:
        return _page(address)
    except UNREADABLE as error:
        if not _is_absent(error):
            _tell(f"{address}: {error}")
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
            (f["filename"], f["url"], f.get("hashes", {}).get("sha256", ""), f.get("yanked", False))
            for f in json.loads(body)["files"]
        ]
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the page is none of an index: {error}") from None
    if odd := [value for name, url, *_ in listed for value in (name, url) if not isinstance(value, str)]:
        raise ValueError(f"the page is none of an index: {odd[0]!r} is neither a name nor an address")
    return [
        # PEP 691: yanked is false, or true, or the reason, which may be an empty string.
        IndexFile(name, urllib.parse.urljoin(base, url), _sha256(stated), yanked not in (False, None))
        for name, url, stated, yanked in listed
    ]


def _sha256(stated: str) -> str:
    """A digest as it is, and nothing where it is none."""
    return stated if isinstance(stated, str) and re.fullmatch(r"[0-9a-f]{64}", stated) else ""


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []  # and whether it is yanked

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "a" and (link := given.get("href")):
            self.found.append((link, "data-yanked" in given))


def _of_page(body: bytes, base: str) -> list[IndexFile]:
    links = _Links()
    try:
        links.feed(body.decode(errors="replace"))
    except AssertionError as error:  # html.parser, of a section that is none
        raise ValueError(f"the page is none of an index: {error}") from None
    found = []
    for link, yanked in links.found:
        address, fragment = urllib.parse.urldefrag(urllib.parse.urljoin(base, link))
        name = urllib.parse.unquote(address.rpartition("/")[2])
        found.append(IndexFile(name, address, _sha256(fragment.removeprefix("sha256=")), yanked))
    return found
