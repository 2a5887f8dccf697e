"""The built page: its files, each as it is and compressed, read once and answered from memory.

`make webui` builds it from `webui/`. Whoever reaches the server may read it, as it says nothing of that server: a key
is for what the page then asks the API for. Its policy lets a browser take scripts, styles and fonts from this server
alone, and run nothing that stands in a document: an answer of a model that slipped through the page's own cleaning is
text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer.server.http.errors import PathNotFound

BUILT = Path(__file__).resolve().parent / "built"  # in the tree itself, which an editable install only links to
INDEX = "index.html"
ASSETS = "assets"  # the folder of all other files, whose names change with what they hold
# What a browser may do with what it is given here. Images are the page's own: one that an answer names would tell
# whoever serves it that, and when, it was read.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
AGAIN = "no-cache"  # kept, and asked for each time whether it is still so
FOR_EVER = "public, max-age=31536000, immutable"  # a year, the most that has a meaning
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
ENCODINGS = {"br": ".br", "gzip": ".gz"}  # best first: the ending of the file beside
IDENTITY = "identity"
NOT_BUILT = b"""<!doctype html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width"><title>NovaInfer</title>
<h1>NovaInfer</h1>
<p>The server runs, and its API answers as ever: <a href=docs>/docs</a> lists it.</p>
<p>The page that belongs here has not been built. In the source tree, with Node 20.19 or newer (or without any: one is
installed beside NovaInfer then), build it and start the server anew:</p>
<pre>make webui</pre>
</html>
"""


class File(msgspec.Struct, frozen=True):
    """A file's bytes by content coding, and what they are."""

    media_type: str
    digest: str
    bodies: dict[str, bytes]


class Page:
    """The files of one build, or none."""

    def __init__(self, folder: Path = BUILT) -> None:
        self._index = _read(folder / INDEX) if (folder / INDEX).is_file() else None
        paths = sorted((folder / ASSETS).iterdir()) if self._index is not None else []
        self._assets = {path.name: _read(path) for path in paths if path.suffix in TYPES}

    @property
    def is_built(self) -> bool:
        """Whether there is a page to serve."""
        return self._index is not None

    def index(self, request: Request) -> Response:
        """The document, which finds its scripts by relative addresses; without a build, how to make one (404)."""
        if self._index is None:
            return Response(NOT_BUILT, 404, HEADERS | {"content-type": TYPES[".html"], "cache-control": "no-store"})
        return _answer(self._index, request, AGAIN)

    def asset(self, request: Request) -> Response:
        """A file of it; raises `PathNotFound`, also for one of another build."""
        file = self._assets.get(request.path_params["name"])
        if file is None:
            raise PathNotFound("The page has no such file: if the server was started anew since, load the page again")
        return _answer(file, request, FOR_EVER)


def _read(path: Path) -> File:
    bodies = {IDENTITY: path.read_bytes()}
    for encoding, ending in ENCODINGS.items():
        beside = path.with_name(path.name + ending)
        if beside.is_file():
            bodies[encoding] = beside.read_bytes()
    return File(TYPES[path.suffix], hashlib.sha256(bodies[IDENTITY]).hexdigest()[:32], bodies)


def _answer(file: File, request: Request, cached: str) -> Response:
    taken = _taken(request.headers.getlist("accept-encoding"))
    encoding = next((one for one in ENCODINGS if one in file.bodies and one in taken), IDENTITY)
    tag = f'"{file.digest}-{encoding}"'  # of the very bytes: what a cache compares strongly
    headers = {**HEADERS, "cache-control": cached, "etag": tag, "vary": "accept-encoding"}
    known = {one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")}
    if tag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    headers["content-type"] = file.media_type
    if encoding != IDENTITY:
        headers["content-encoding"] = encoding
    return Response(file.bodies[encoding], headers=headers)


def _taken(values: Iterable[str]) -> set[str]:
    """The content codings of `ENCODINGS` that these values of Accept-Encoding take: RFC 9110 12.5.3."""
    weights: dict[str, bool] = {}
    for one in ",".join(values).lower().split(","):
        name, _, parameter = one.partition(";")
        weight = parameter.replace(" ", "").removeprefix("q=")
        weights[name.strip()] = weight.strip("0.") != "" if weight else True
    return {name for name in ENCODINGS if weights.get(name, weights.get("*", False))}
