"""The wheel, as a user installs it: made by `make wheel`, it serves where there is no compiler and no source tree."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from sysconfig import get_paths

import httpx
import pytest

from novainfer.kernels.cpu.levels import LEVELS
from novainfer.server.page.files import BUILT

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900.0  # six libraries are compiled, on a busy machine a minute each
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`make wheel` in a copy of this tree, with this environment's tools."""
    tree = tmp_path_factory.mktemp("wheel") / "tree"
    run("git", "clone", "--quiet", "--shared", str(ROOT), str(tree))
    listed = run("git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
        else:
            (tree / name).unlink(missing_ok=True)  # it was taken away, and not committed yet
    if BUILT.is_dir():  # as `make setup` has made it here
        shutil.copytree(BUILT, tree / "server" / "page" / "built")
    run("make", "-C", str(tree), "--old-file=setup", "wheel", f"BIN={Path(sys.executable).parent}")
    (found,) = (tree / "dist").glob("novainfer-*.whl")
    return found


@pytest.fixture(scope="module")
def novainfer(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a new environment that holds the wheel; what it needs beside comes from this one."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(home))
    python = home / "bin" / "python"
    site = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    run(*PIP, "--python", str(python), "install", "--no-deps", str(wheel))
    (Path(site) / "needed.pth").write_text(get_paths()["purelib"] + "\n")  # whose own .pth files are not read
    return home / "bin" / "novainfer"


@pytest.fixture
def elsewhere(novainfer: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment without a compiler, without a cache, and without this tree."""
    yield {
        "PATH": str(novainfer.parent),
        "HOME": str(tmp_path),
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
    }
    assert not list(tmp_path.glob(".cache/novainfer/native/*")), "nothing was compiled"


def run(*command: str, **how: object) -> str:
    """What it says on stdout; it must end well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **how)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return str(done.stdout)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_wheel_holds_the_rooms_and_the_models_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    native = {name for name in names if name.startswith("novainfer/kernels/cpu/prebuilt/")}
    rooms = ("actors", "api", "bench", "fsm", "kernels", "server")
    tracked = run("git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", *rooms).split()
    here = {name.removeprefix("api/") for name in tracked if (ROOT / name).is_file()}
    assert {Path(name).name.rpartition("-")[0] for name in native} == {level.name for level in LEVELS}
    page = {
        path.relative_to(ROOT).as_posix() for path in BUILT.glob("**/*") if path.is_file() and path.suffix != ".json"
    }
    assert names - native == {f"novainfer/{name}" for name in here | page}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_wheel_serves_with_native_kernels_and_without_a_compiler(
    novainfer: Path, elsewhere: dict[str, str], tmp_path: Path
) -> None:
    python = str(novainfer.parent / "python")
    where = run(python, "-c", "import novainfer; print(novainfer.__file__)", env=elsewhere, cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(novainfer.parent.parent), "it is the wheel that runs"
    command = [str(novainfer), "serve", "--port", "0", "--native", "require"]
    command += ["--speculative-config", '{"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 4}']
    with subprocess.Popen(command, env=elsewhere, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            first = server.stdout.readline()
            found = re.search(r"at (http://127\.0\.0\.1:\d+) \(ready in", first)
            assert found is not None, first
            body = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
            response = httpx.post(f"{found[1]}/v1/completions", json=body, timeout=TIMEOUT_S)
            assert response.status_code == 200
            assert response.json()["choices"][0]["text"]
            page = httpx.get(f"{found[1]}/")
            assert page.status_code == (200 if BUILT.is_dir() else 404)
            for name in re.findall(r"""(?:src|href)="./(assets/[^"]+)""", page.text):
                assert httpx.get(f"{found[1]}/{name}").content == (BUILT / name).read_bytes()
        finally:
            server.send_signal(signal.SIGTERM)
        server.stdout.read()
        assert server.wait(TIMEOUT_S) == 0
    assert os.listdir(tmp_path) == [".local"], "its recordings"
