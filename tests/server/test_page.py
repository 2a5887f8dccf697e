"""The page as the server gives it: whole, compressed, kept by browsers, strict, without a key; and what it weighs."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from novainfer.server import app
from novainfer.server.page import files
from novainfer.server.page.files import BUILT, Page
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine

ROOT = Path(__file__).resolve().parents[2]
CHAT_BYTES_MAX = 180_000  # of compressed script, before a chat can be seen
SCRIPT = b"export const answer = 42;\n" * 40
HTML = b"<!doctype html><title>NovaInfer</title><script type=module src=./assets/main-abc.js></script>\n"

needs_build = pytest.mark.skipif(not Page().is_built, reason="the page is not built: make webui")


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small build, which servers of this test find."""
    folder = tmp_path / "built"
    (folder / "assets").mkdir(parents=True)
    for name, data in {"index.html": HTML, "assets/main-abc.js": SCRIPT}.items():
        (folder / name).write_bytes(data)
        (folder / f"{name}.gz").write_bytes(gzip.compress(data))
        (folder / f"{name}.br").write_bytes(b"br:" + data[:9])  # nobody here reads it
    (folder / "assets" / "font-abc.woff2").write_bytes(b"wOF2")
    (folder / "secret.txt").write_text("not of the page")
    monkeypatch.setattr(app, "Page", lambda: Page(folder))
    return folder


@pytest.fixture(params=[0, 2], ids=["one process", "API processes"])
def api_processes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("http2", [False, True], ids=["http/1.1", "h2c"])
async def test_the_page_is_given_without_a_key_and_its_files_may_be_kept_for_a_year(
    built: Path, serve: Serve, engine: FakeEngine, http2: bool
) -> None:
    server = await serve(engine, api_keys=("k",))
    takes = {"accept-encoding": "gzip"}
    async with httpx.AsyncClient(base_url=server.url, http1=not http2, http2=http2, headers=takes) as client:
        for path in ("/", "/inspector"):
            page = await client.get(path)
            assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert page.headers["cache-control"] == "no-cache"
            assert page.content == HTML
            again = await client.get(path, headers={"if-none-match": page.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == page.headers["etag"]
        script = await client.get("/assets/main-abc.js")
        assert (script.status_code, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
        assert script.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert script.content == SCRIPT
        font = await client.get("/assets/font-abc.woff2")
        assert (font.headers["content-type"], font.content) == ("font/woff2", b"wOF2")
        for answer in (page, script, font):
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        head = await client.head("/assets/main-abc.js", headers={"accept-encoding": "identity"})
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(SCRIPT))
        assert (await client.post("/", json={})).status_code == 405
        assert (await client.get("/v1/models")).status_code == 401  # the API is as it was


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip, deflate, br, zstd", "br"),
        ("gzip", "gzip"),
        ("GZIP;q=0.5", "gzip"),
        ("br;q=0, gzip;q=0.001", "gzip"),
        ("br; q=0.0,*", "gzip"),
        ("*", "br"),
        ("*;q=0", None),
        ("identity", None),
        ("", None),
        (";;,q=,br;q", "br"),
    ],
)
async def test_what_the_browser_takes_is_what_it_gets(
    built: Path, serve: Serve, engine: FakeEngine, accepted: str, encoding: str | None
) -> None:
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url) as client:
        request = client.build_request("GET", "/assets/main-abc.js", headers={"accept-encoding": accepted})
        answer = await client.send(request, stream=True)
        raw = b"".join([part async for part in answer.aiter_raw()])
        assert answer.headers.get("content-encoding") == encoding
        ending = {"br": ".br", "gzip": ".gz", None: ""}[encoding]
        assert raw == (built / "assets" / f"main-abc.js{ending}").read_bytes()
        assert answer.headers["vary"] == "accept-encoding"
        other = await client.get(
            "/assets/main-abc.js", headers={"accept-encoding": "identity", "if-none-match": '"x", "y"'}
        )
        assert other.status_code == 200
        assert (other.headers["etag"] == answer.headers["etag"]) == (encoding is None)  # other bytes, another tag


@pytest.mark.parametrize(
    "path",
    [
        "/assets/",
        "/assets/none.js",
        "/assets/main-abc.js.br",
        "/assets/../index.html",
        "/assets/..%2fsecret.txt",
        "/assets/%2e%2e/secret.txt",
        "/assets//etc/passwd",
        "/assets/main-abc.js/",
        "/assets/main-abc.js%00",
        "/secret.txt",
        "/index.html",
    ],
)
async def test_nothing_but_the_pages_own_files_is_given(
    built: Path, serve: Serve, engine: FakeEngine, path: str
) -> None:
    server = await serve(engine, api_keys=("k",))
    async with httpx.AsyncClient(base_url=server.url, headers={"authorization": "Bearer k"}) as client:
        request = client.build_request("GET", "/")
        request.url = request.url.copy_with(raw_path=path.encode())  # as it is: httpx would tidy it
        answer = await client.send(request)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"]
        metrics = (await client.get("/metrics")).text
    named = set(re.findall(r'http_requests_total\{[^}]*route="([^"]*)"', metrics))
    assert named <= {"other", "/assets/{name}"}, "labels do not grow with what is asked for"


async def test_it_works_below_a_prefix(built: Path, serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine, root_path="/llm", api_keys=("k",))
    async with httpx.AsyncClient(base_url=server.url) as client:
        for path in ("/llm/", "/llm/inspector", "/llm/assets/main-abc.js", "/", "/assets/main-abc.js"):
            assert (await client.get(path)).status_code == 200, path


async def test_without_a_build_the_server_says_how_to_make_one(
    serve: Serve, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "Page", lambda: Page(tmp_path / "none"))
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url) as client:
        for path in ("/", "/inspector"):
            answer = await client.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
            assert "<pre>make webui</pre>" in answer.text
        assert (await client.get("/assets/main.js")).status_code == 404
        assert (await client.get("/v1/models")).status_code == 200


async def test_the_page_can_be_left_out_and_is_no_part_of_the_api(
    built: Path, serve: Serve, engine: FakeEngine
) -> None:
    server = await serve(engine, webui=False)
    async with httpx.AsyncClient(base_url=server.url) as client:
        for path in ("/", "/inspector", "/assets/main-abc.js"):
            answer = await client.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (404, "application/json"), path
        assert not {"/", "/inspector", "/assets/{name}"} & set((await client.get("/openapi.json")).json()["paths"])


def test_the_index_and_all_that_it_names_are_of_types_that_are_known(built: Path) -> None:
    assert Page(built).is_built
    assert {".html", ".js", ".css", ".svg", ".woff2"} <= set(files.TYPES)


# ---- what was built --------------------------------------------------------------------------------------------------


@needs_build
def test_every_file_of_the_build_is_served_and_runs_under_its_policy() -> None:
    unknown = {
        path.name
        for path in BUILT.rglob("*")
        if path.is_file() and path.suffix not in {*files.TYPES, ".br", ".gz"} and ".vite" not in path.parts
    }
    assert not unknown, "these would be missing from the page"
    html = (BUILT / "index.html").read_text()
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son[a-z]+=|javascript:", html), "nothing inline"
    assert not re.search(r"""(?:src|href)=["']?(?:/|\w+:)""", html), "relative, so that it works below any prefix"
    for path in (BUILT / "assets").glob("*.[jc]s*"):
        if path.suffix in {".js", ".css"}:
            assert re.search(r"-[\w-]{8}\.(js|css)$", path.name), "a name that changes with what it holds"
            assert path.with_name(path.name + ".br").is_file()
            assert gzip.decompress(path.with_name(path.name + ".gz").read_bytes()) == path.read_bytes()


@needs_build
def test_a_chat_loads_little_script_and_nothing_of_the_inspector() -> None:
    manifest = json.loads((BUILT / ".vite" / "manifest.json").read_text())
    chat = needed(manifest, "index.html") | needed(manifest, "src/chat/Chat.svelte")
    inspector = needed(manifest, "src/inspector/Inspector.svelte")
    assert manifest["src/inspector/Inspector.svelte"]["file"] not in chat
    assert manifest["src/chat/Chat.svelte"]["file"] not in inspector
    weights = {name: (BUILT / f"{name}.br").stat().st_size for name in chat}
    assert sum(weights.values()) <= CHAT_BYTES_MAX, sorted(weights.items(), key=lambda one: -one[1])


def needed(manifest: dict[str, dict[str, object]], key: str) -> set[str]:
    """The script of `key`, and those that it cannot run without."""
    found: set[str] = set()
    waiting = [key]
    while waiting:
        chunk = manifest[waiting.pop()]
        if chunk["file"] not in found:
            found.add(str(chunk["file"]))
            waiting += chunk.get("imports", [])  # type: ignore[arg-type]
    return found


# ---- how it is built -------------------------------------------------------------------------------------------------


def test_the_lockfile_names_no_host() -> None:
    packages = json.loads((ROOT / "webui" / "package-lock.json").read_text())["packages"]
    assert all(one["integrity"].startswith("sha512-") for name, one in packages.items() if name)
    for one in packages.values():
        one.pop("funding", None)  # whom to give money is no place to fetch from
    assert "://" not in json.dumps(packages), "npm install --omit-lockfile-registry-resolved"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
def test_no_build_and_no_registry_fail_no_setup(tmp_path: Path) -> None:
    """`make setup` where packages cannot be had: one line, and no second attempt until something changes."""
    tree = tmp_path / "tree"
    (tree / ".venv").mkdir(parents=True)
    (tree / "webui").mkdir()
    (tree / ".ci").mkdir()
    shutil.copy(ROOT / "Makefile", tree)
    (tree / "webui" / "package-lock.json").write_text("{}")
    (tree / "webui" / "with-node").write_text("#!/bin/sh\necho 'npm error: no network' >&2\nexit 1\n")
    (tree / "webui" / "with-node").chmod(0o755)
    for name in ("pyproject.toml", ".ci/constraints.txt", ".venv/.installed", ".venv/.linked"):
        (tree / name).touch()
    command = ["make", "-s", ".venv/.webui"]
    outputs = []
    for _ in range(2):
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert "make webui" in outputs[0]
    assert len(outputs[0].splitlines()) == 1
    assert "was not built" not in outputs[1]
    assert "no network" in (tree / ".venv" / "webui.log").read_text()
    assert subprocess.run(["make", "-s", "webui"], cwd=tree, capture_output=True, check=False).returncode != 0
