"""Servers that `bench` starts: when they are ready, what is said of one that is not, and that none is left behind."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from novainfer.bench.peers import http
from novainfer.bench.peers.child import forget_peaks, tree_memory
from novainfer.bench.peers.known import OURS, WARM_UPS, SystemSpec
from novainfer.bench.peers.launch import Server, ServerError
from novainfer.bench.serve import CLIENTS, W5
from novainfer.bench.worker import Child, Result, Task
from novainfer.bench.workload import scaled
from tests.bench.test_offline import command

FAKE = (sys.executable, str(Path(__file__).with_name("fake_server.py")), "{port}")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    """Whether it is gone within the time that a busy machine may need."""
    for _ in range(500):
        if not is_running(pid):
            return True
        time.sleep(0.01)
    return False


def test_a_server_takes_its_workers_with_it() -> None:
    with Server((*FAKE, "worker")) as server:
        server.wait_until_ready(30)
        with urllib.request.urlopen(f"{server.url}/health") as answer:
            worker = json.load(answer)
        assert is_running(server.pid)
        assert is_running(worker)
    assert ends(server.pid)
    assert ends(worker)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells a process of its parent's end")
def test_a_server_ends_with_the_process_that_started_it_even_if_that_is_killed() -> None:
    code = (
        "import sys, time; from novainfer.bench.peers.launch import Server; "
        f"server = Server({FAKE!r}); server.wait_until_ready(30); print(server.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    assert is_running(server)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert ends(server)


def test_the_last_words_of_a_server_that_does_not_start_are_told() -> None:
    with Server((*FAKE, "fail")) as server, pytest.raises(ServerError, match="exit code 1: this server has no model"):
        server.wait_until_ready(30)
    silent = (sys.executable, "-c", "import time; time.sleep(60)")
    with Server(silent) as server, pytest.raises(ServerError, match="not ready within 0 s"):
        server.wait_until_ready(0.1)


def test_a_server_has_the_environment_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    code = "import os, sys; sys.exit(repr((os.environ.get('OMP_WAIT_POLICY'), os.environ['GIVEN'])))"
    with (
        Server((sys.executable, "-c", code), {"OMP_WAIT_POLICY": None, "GIVEN": "yes"}) as server,
        pytest.raises(ServerError, match=r"\(None, 'yes'\)"),
    ):
        server.wait_until_ready(30)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells what a process holds at most")
def test_the_peak_of_a_task_is_without_what_processes_below_held_before_it() -> None:
    code = "big = b'x' * 100_000_000; del big; print('freed', flush=True); input()"
    shell = ["sh", "-c", f'"{sys.executable}" -c "{code}"; :']
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"freed\n"
        assert tree_memory(process.pid).peak_bytes > 100_000_000
        forget_peaks(process.pid)
        assert tree_memory(process.pid).peak_bytes < 100_000_000
        process.communicate(b"\n")


class Kept:
    """Records of what was taken, and of what was left out."""

    def __init__(self, servers: list[Server]) -> None:
        self.taken: list[tuple[str, str, int]] = []
        self.results: dict[str, Result] = {}
        self.left_out: dict[str, str] = {}
        self._servers = servers

    def progress(self, line: str) -> None:
        pass

    def take(self, work: str, system: str, repetition: int, run: Any) -> None:
        self.results[system] = run()
        self.taken.append((work, system, repetition))

    def leave_out(self, system: str, works: list[str], error: Exception) -> None:
        assert works == ["W5"]
        self.left_out[system] = str(error)
        assert not Path(f"/proc/{self._servers[-1].pid}").exists(), "it computes beside no other one"


def test_servers_and_the_library_answer_the_same_prompts_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers: list[Server] = []
    tasks: list[Task] = []

    class Noted(Server):
        def __init__(self, command: Any, environment: Any) -> None:
            super().__init__(command, environment)
            servers.append(self)

    class Library(Child):
        def run(self, task: Task) -> Result:
            tasks.append(task)
            return super().run(task)

    monkeypatch.setattr(http, "Server", Noted)
    monkeypatch.setattr(http, "Child", Library)
    num_warm = sum(len(task.prompts) for task in WARM_UPS)
    work, kept = scaled(W5, 4), Kept(servers)
    specs = [
        SystemSpec(OURS, "bf16", tuple(command(0.01)), {}, FAKE),
        SystemSpec("peer", "bf16", (), {}, FAKE),
        SystemSpec("no-start", "bf16", (), {}, (*FAKE, "fail")),
        SystemSpec("broken", "bf16", (), {}, (*FAKE, "broken")),
        SystemSpec("not there", "bf16", (), {}, ("/no/such/server",)),
        SystemSpec("serves nothing", "bf16", ()),
        SystemSpec("cold", "bf16", (), {}, (*FAKE, f"dies={num_warm}")),
        SystemSpec("dies", "bf16", (), {}, (*FAKE, f"dies={num_warm + work.num_requests + 1}")),
    ]
    http.take_http(specs, work, 2, kept)  # type: ignore[arg-type]
    names = [OURS, http.LIBRARY, "peer"]
    first = [("W5", name, 0) for name in [*names, "dies"]]
    assert kept.taken == first + [("W5", name, 1) for name in [*names[1:], OURS]]
    assert "no model" in kept.left_out.pop("no-start")
    assert "No such file" in kept.left_out.pop("not there")
    assert kept.left_out.pop("cold"), "it is warmed up with all that the library is"
    assert kept.left_out.pop("dies")
    assert kept.left_out == {"broken": "the stream ended without [DONE]"}
    assert tasks[: len(WARM_UPS)] == [*WARM_UPS]
    assert [(len(task.prompts), task.clients) for task in tasks[len(WARM_UPS) :]] == [(work.num_requests, CLIENTS)] * 2
    for result in kept.results.values():
        assert [line.num_output_tokens for line in result.timelines] == [work.max_tokens] * work.num_requests
    assert kept.results["peer"].memory.peak_bytes > 1e6
