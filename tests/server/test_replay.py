"""`novainfer replay`: what it prints, its exit codes, and the pytest file it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from novainfer.fsm.recording.dumpfile import About, encode_dump
from novainfer.fsm.recording.log import Image
from novainfer.fsm.recording.replay import replay
from novainfer.fsm.simulation.bugs.mutants import Mutant, planted
from novainfer.fsm.simulation.bugs.planted import MUTANTS
from novainfer.fsm.simulation.swarm.recorded import RecordedWorld
from novainfer.fsm.simulation.swarm.swarm import Seed
from novainfer.server.cli import replay as command
from novainfer.server.cli.main import main
from novainfer.server.cli.replay import replay_command
from novainfer.server.service import package_version

ABOUT = About(version=package_version(), created=1_795_180_778.2, reason="oom", message="no memory for 3 blocks")
(LATE,) = [m for m in MUTANTS if m.name == "the engine takes a late StepDone for the current one"]


def recorded(seed: int) -> Image:
    drawn = Seed(seed, world_type=RecordedWorld)
    with suppress(AssertionError):
        drawn.run()
    assert isinstance(drawn.world, RecordedWorld)
    return drawn.world.image()


@pytest.fixture(scope="session")
def image() -> Image:
    return next(image for image in map(recorded, range(50)) if replay(image).tokens > 30)


@pytest.fixture(scope="session")
def crash() -> tuple[Image, Mutant]:
    """What a machine with a bug left behind when it raised."""
    with planted(LATE):
        return next(image for image in map(recorded, range(60)) if replay(image).reproduced), LATE


def written(folder: Path, image: Image, **about: Any) -> Path:
    path = folder / "incident.novarec"
    fields = {"version": ABOUT.version, "created": ABOUT.created, "reason": ABOUT.reason, "message": ABOUT.message}
    path.write_bytes(encode_dump(image, About(**{**fields, **about})))
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(replay_command, [str(a) for a in args])


def test_what_was_replayed_is_told_and_exit_code_0_says_that_it_was_the_same(tmp_path: Path, image: Image) -> None:
    result = run(written(tmp_path, image), "--check")
    assert result.exit_code == 0
    assert "recorded 2026-11-20 13:19:38 UTC" in result.output
    assert "because of oom: no memory for 3 blocks" in result.output
    assert "segments" in result.output
    assert "last transitions:" in result.output
    assert result.output.splitlines()[-1] == "the same transitions were taken"


def test_with_json_the_last_line_is_one_object(tmp_path: Path, image: Image) -> None:
    said = json.loads(run(written(tmp_path, image), "--json").output.splitlines()[-1])
    assert said["same"] is True
    assert (said["reason"], said["version"]) == ("oom", ABOUT.version)
    assert said["difference"] is None
    assert said["violation"] is None
    assert min(said["events"], said["steps"], said["tokens"], said["requests"], said["span_s"]) > 0
    assert sum(said["transitions"].values()) <= said["events"]


def test_the_first_difference_is_shown_and_exit_code_1_says_so(tmp_path: Path) -> None:
    (mutant,) = [m for m in MUTANTS if m.name == "a slot is not given back"]
    images = [recorded(seed) for seed in range(30)]
    with planted(mutant):
        image = next(image for image in images if replay(image).difference)
        result = run(written(tmp_path, image), "--json")
    assert result.exit_code == 1
    said = json.loads(result.output.splitlines()[-1])
    assert said["difference"]["entry"] > 0
    assert said["difference"]["what"] in result.output
    assert "DIFFERENT: segment 1, entry " in result.output


def test_another_version_is_named(tmp_path: Path, image: Image) -> None:
    assert "another version may rightly do otherwise" in run(written(tmp_path, image, version="9.9")).output


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text"])
def test_a_damaged_file_is_one_sentence_and_exit_code_2(
    tmp_path: Path, image: Image, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, image)
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(
        {
            "empty": b"",
            "cut": data[:middle],
            "flipped": data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :],
            "text": b"hello",
        }[damage]
    )
    assert main(["replay", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"Error: {path}: ")
    assert len(said.splitlines()) == 1
    assert main(["replay", str(tmp_path / "none")]) == 2


def test_what_a_file_says_of_itself_is_text_in_its_test(tmp_path: Path, image: Image) -> None:
    path = tmp_path / "test_incident.py"
    recording = tmp_path / "x.novarec"
    about = About(version='0\\"""', created=1.8e9, reason="o\x00m", message='a\nb"""\x1b{x}\\')
    recording.write_bytes(encode_dump(image, about))
    assert run(recording, "--to-test", str(path)).exit_code == 0
    compile(path.read_text(encoding="utf-8"), path.name, "exec")


# ---- as a test -----------------------------------------------------------------------------------------------------


def run_test(path: Path) -> subprocess.CompletedProcess[str]:
    """The file alone, by pytest in a process of its own."""
    args = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "--rootdir",
        str(path.parent),
    ]
    return subprocess.run([*args, str(path)], capture_output=True, text=True, cwd=path.parent, check=False)


@pytest.mark.slow
def test_the_incident_becomes_a_test_that_stands_alone(tmp_path: Path, image: Image) -> None:
    path = tmp_path / "test_incident.py"
    result = run(written(tmp_path, image), "--to-test", path)
    assert result.exit_code == 0
    assert f"wrote {path}" in result.output
    (tmp_path / "incident.novarec").unlink()
    assert '"""An incident of 2026-11-20 13:19:38 UTC' in path.read_text()
    assert "def test_oom_2026_11_20_13_19_38()" in path.read_text()
    ran = run_test(path)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
def test_the_test_fails_while_the_bug_is_there_and_passes_without_it(
    tmp_path: Path, crash: tuple[Image, Mutant]
) -> None:
    image, mutant = crash
    path = tmp_path / "test_incident.py"
    with planted(mutant):
        result = run(written(tmp_path, image, reason="died"), "--to-test", path)
        assert result.exit_code == 0
        assert "the exception came again: scheduler in " in result.output
        with pytest.raises(AssertionError, match="the incident is still there: scheduler in "):
            call_tests(path)
    # The fix changes what the engine does before anything raises, so the test says that it goes another way.
    with pytest.raises(AssertionError, match="the machines take another way: segment "):
        call_tests(path)


def call_tests(path: Path) -> None:
    names: dict[str, Any] = {"__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), names)
    for name, call in names.items():
        if name.startswith("test_"):
            call()


def test_a_large_recording_stands_beside_its_test(
    tmp_path: Path, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "EMBED_BYTES_MAX", 100)
    path = tmp_path / "test_large.py"
    run(written(tmp_path, image), "--to-test", path)
    assert (tmp_path / "test_large.novarec").stat().st_size > 100
    assert path.stat().st_size < 2000
    call_tests(path)
    (tmp_path / "test_large.novarec").unlink()
    with pytest.raises(FileNotFoundError):
        call_tests(path)


def test_what_a_file_says_of_itself_is_not_run_by_its_test(tmp_path: Path, image: Image) -> None:
    path = tmp_path / "test_evil.py"
    evil = '"""\nraise SystemExit(3)\n"""\\'
    run(written(tmp_path, image, reason=f"x(): pass\n{evil}", message=evil, version=evil), "--to-test", path)
    call_tests(path)
