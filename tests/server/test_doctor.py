"""`novainfer doctor`: what is wrong is a finding that says what to do, and the exit code says how bad it is."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from novainfer import EngineConfig, ModelLoadError, machine
from novainfer.machine import Cpu, Gpu, Memory, Needs, Trial
from novainfer.server.cli.main import main
from novainfer.server.http.tls import write_self_signed
from novainfer.server.operate import doctor
from novainfer.server.operate.doctor import Asked, Finding, examine
from novainfer.server.settings import ServerSettings

GIB = 1 << 30
CPU = Cpu(model="A CPU", machine="x86_64", num_cpus=8, num_usable=4, granted=None, levels=("avx2",), best_level="avx2")
MEMORY = Memory(total_bytes=64 * GIB, free_bytes=32 * GIB, limit_bytes=None)
NEEDS = Needs(
    name="m",
    architecture="Qwen3",
    dtype="bfloat16",
    weight_bytes=8 * GIB,
    kv_bytes_per_token=1 << 17,
    max_model_len=4096,
)
TRIAL = Trial(
    dtype="bfloat16",
    kernels={"linear": "native", "attention": "native", "ops": "torch"},
    failed_kernels={},
    num_threads=4,
    start_s=1.5,
    tokens_per_s=123.4,
)


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A machine without a fault; the test may change what is found of it."""
    found: dict[str, Any] = {
        "cpu": CPU,
        "memory": MEMORY,
        "needs_of": NEEDS,
        "native_folders": ([], tmp_path),
        "compiler": ("g++", "g++ 14.2"),
        "node": "v24.0.0",
        "torch_version": "2.13.0+cpu",
        "gpus": [],
        "try_kernels": TRIAL,
    }

    async def try_kernels(config: EngineConfig, dtype: str) -> Trial:
        if isinstance(found["try_kernels"], Exception):
            raise found["try_kernels"]
        return found["try_kernels"]  # type: ignore[no-any-return]

    def look(name: str) -> Any:
        def function(*args: Any) -> Any:
            if isinstance(found[name], Exception):
                raise found[name]
            return found[name]

        return function

    for name in found:
        monkeypatch.setattr(machine, name, try_kernels if name == "try_kernels" else look(name))
    monkeypatch.setattr(doctor, "SOMAXCONN", tmp_path / "none")
    monkeypatch.setattr(doctor, "HUGE_PAGES", tmp_path / "none")
    return found


def asked(config: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **settings: Any) -> Asked:
    settings.setdefault("port", 0)
    config = {"recorder_dir": Path(__file__).parent} | (config or {})
    return Asked(config=EngineConfig(**config), settings=ServerSettings(**settings), environ=environ or {})


def findings(wanted: Asked, level: str) -> list[Finding]:
    found = examine(wanted).findings
    assert all(one.advice for one in found if one.level != "ok"), "a finding that is not well says what to do"
    return [one for one in found if one.level == level]


def test_a_machine_without_a_fault_is_fit_and_told_in_order(healthy: dict[str, Any]) -> None:
    heard: list[Finding] = []
    report = examine(asked(), on_finding=heard.append)
    assert report.is_fit
    assert heard == report.findings
    assert {finding.level for finding in heard} == {"ok"}
    texts = [f"{finding.topic}: {finding.text}" for finding in heard]
    assert "cpu: A CPU (x86_64), 4 of 8 CPUs" in texts
    assert "kernels: bfloat16, 4 threads: native: linear, attention; torch: ops" in texts
    cached = int(24 * GIB * 0.6) // (1 << 17)
    room = f"room for a cache of {cached} tokens: {cached // 4096} full contexts of 4096"
    assert f"memory: m (Qwen3, bfloat16): about 8.0 GiB of weights, and {room}" in texts


WARNINGS: list[tuple[str, Any, str, str]] = [
    ("cpu", msgspec.structs.replace(CPU, levels=(), best_level=None), "no instruction set", "AVX2"),
    ("cpu", msgspec.structs.replace(CPU, best_level="avx512-bf16"), "though this CPU has avx512-bf16", "NOVAINFER_ISA"),
    ("compiler", ("g++", None), "g++ is not there", "apt install g++"),
    ("gpus", [Gpu(name="A GPU", memory_mib=9, free_mib=8, driver="1")], "cannot use the GPU", "CUDA build"),
    (
        "try_kernels",
        msgspec.structs.replace(TRIAL, failed_kernels={"attention native": "is off by 2e-1"}),
        "attention native failed its self-test: is off by 2e-1",
        "report it",
    ),
]


@pytest.mark.parametrize(("name", "value", "said", "advice"), WARNINGS, ids=[one[2] for one in WARNINGS])
def test_what_makes_a_server_slower_is_a_warning(
    healthy: dict[str, Any], name: str, value: Any, said: str, advice: str
) -> None:
    healthy[name] = value
    (found,) = findings(asked(), "warning")
    assert said in found.text
    assert advice in found.advice
    assert examine(asked()).is_fit


FAILURES: list[tuple[str, Any, dict[str, Any], str]] = [
    ("torch_version", None, {}, "torch is not installed"),
    ("try_kernels", ModelLoadError("the worker's process died: SIGILL"), {}, "does not run in bfloat16: the worker's"),
    ("gpus", [], {"device": "cuda", "kv_cache_memory_utilization": 0.6}, "nvidia-smi finds no GPU"),
    ("memory", msgspec.structs.replace(MEMORY, free_bytes=8 * GIB + (1 << 24)), {}, "though one context is 4096"),
    (
        "needs_of",
        ModelLoadError("model /nope is no folder"),
        {"dtype": "float32"},
        "could not be looked at: model /nope",
    ),
    ("cpu", OSError("no /proc here"), {}, "could not be looked at: OSError: no /proc here"),
]


@pytest.mark.parametrize(("name", "value", "config", "said"), FAILURES, ids=[one[3] for one in FAILURES])
def test_what_keeps_a_server_from_starting_is_a_failure_and_the_rest_is_still_looked_at(
    healthy: dict[str, Any], name: str, value: Any, config: dict[str, Any], said: str
) -> None:
    healthy[name] = value
    report = examine(asked(config))
    assert not report.is_fit
    assert any(finding.level == "failure" and said in finding.text for finding in report.findings)
    assert report.findings[-1].topic == "node"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"OMP_WAIT_POLICY": "active"}, "OMP_WAIT_POLICY=active"),
        ({"GOMP_CPU_AFFINITY": "0-3"}, "GOMP_CPU_AFFINITY=0-3"),
        ({"KMP_BLOCKTIME": "200"}, "KMP_BLOCKTIME=200"),
        ({"OMP_NUM_THREADS": "64"}, "64 threads are asked for, and 4 CPUs may be used"),
    ],
)
def test_settings_of_openmp_that_slow_an_engine_down(
    healthy: dict[str, Any], environ: dict[str, str], said: str
) -> None:
    (found,) = findings(asked(environ=environ), "warning")
    assert said in found.text
    assert findings(asked(environ={"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2"}), "warning") == []


def test_a_quota_counts_and_more_threads_than_it_grants_are_told(healthy: dict[str, Any]) -> None:
    healthy["cpu"] = msgspec.structs.replace(CPU, granted=2)
    (found,) = findings(asked({"num_threads": 3}), "warning")
    assert "3 threads are asked for, and 2 CPUs may be used" in found.text


def test_the_network_a_port_in_use_a_host_without_keys_and_a_short_queue(
    healthy: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (found,) = findings(asked(port=port), "failure")
        assert found.text.startswith(f"port {port} of 127.0.0.1 is in use")
    (found,) = findings(asked(host="0.0.0.0"), "warning")
    assert "no key is asked for" in found.text
    assert findings(asked(host="0.0.0.0", api_keys=("k",)), "warning") == []
    (tmp_path / "somaxconn").write_text("128\n")
    monkeypatch.setattr(doctor, "SOMAXCONN", tmp_path / "somaxconn")
    (found,) = findings(asked(), "warning")
    assert found.text == "the kernel lets 128 connections wait, and --backlog asks for 1024"


def test_api_processes_need_cpus_beside_that_of_the_engine(healthy: dict[str, Any]) -> None:
    assert not any("API process" in one.text for one in findings(asked(), "ok"))
    healthy["cpu"] = msgspec.structs.replace(CPU, granted=4)
    (found,) = [one for one in findings(asked(api_processes=3), "ok") if "API process" in one.text]
    assert found.text == "3 API processes beside the engine's, with 4 CPUs for all"
    (found,) = findings(asked(api_processes=4), "warning")
    assert found.advice.startswith("fewer than 4")


def test_a_certificate_is_looked_at(healthy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certfile, keyfile = write_self_signed(tmp_path, "127.0.0.1")
    wanted = asked(ssl_certfile=certfile, ssl_keyfile=keyfile)
    assert "holds for 30 days" in " ".join(one.text for one in findings(wanted, "ok"))
    monkeypatch.setattr(doctor, "CERTIFICATE_WARNING_DAYS", 31)
    (found,) = findings(wanted, "warning")
    assert "SIGHUP" in found.advice
    keyfile.write_text("nonsense")
    (found,) = findings(wanted, "failure")
    assert found.topic == "tls"


def test_few_files_and_a_folder_that_cannot_be_written(
    healthy: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    (found,) = findings(asked(), "warning")
    assert found.text == "1024 files may be open: each connection is one"
    monkeypatch.undo()


def test_a_journal_that_cannot_be_written(healthy: dict[str, Any], tmp_path: Path) -> None:
    journal = tmp_path / "answers.db"
    assert any(f"the journal is {journal}" in one.text for one in findings(asked(journal=journal), "ok"))
    for path in (tmp_path / "none" / "answers.db", tmp_path):
        (found,) = findings(asked(journal=path), "failure")
        assert (found.topic, found.text) == ("files", f"the journal {path} cannot be written")


def test_what_settings_need_and_is_not_installed(healthy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    events = {"kv_events_config": '{"enable_kv_cache_events": true}'}
    wanted = asked(events, self_signed=True, otlp_traces_endpoint="http://c:4318")
    assert findings(wanted, "failure") == []
    monkeypatch.setattr(doctor, "find_spec", lambda module: None)
    assert {one.advice.partition(",")[0] for one in findings(wanted, "failure")} == {
        f"pip install 'novainfer[{extra}]'" for extra in ("otel", "events", "tls")
    }
    assert findings(asked(), "failure") == [], "what nobody asked for is not missed"


def test_each_of_several_models_is_looked_at_with_its_share(
    healthy: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    looked: list[str] = []

    def needs_of(config: EngineConfig) -> Needs:
        looked.append(str(config.model))
        return NEEDS

    monkeypatch.setattr(machine, "needs_of", needs_of)
    flags = ["doctor", "--port", "0", "--model", "a=/one", "--model", "b=/two", "--model", "c=/three"]
    assert main([*flags, "--max-loaded-models", "2"]) == 0
    out = capsys.readouterr().out
    assert looked == ["/one", "/two", "/three", "/one"]  # the last one for its kernels
    assert "3 models, and 50% of the memory for each that is loaded" in out
    tokens = int((16 * GIB - NEEDS.weight_bytes) * 0.6) // NEEDS.kv_bytes_per_token
    assert out.count(f"room for a cache of {tokens} tokens") == 3
    healthy["memory"] = msgspec.structs.replace(MEMORY, free_bytes=18 * GIB)
    assert main(flags) == 1
    assert capsys.readouterr().out.count("though one context is 4096") == 3


def test_huge_pages_that_are_off(healthy: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(doctor, "HUGE_PAGES", tmp_path / "enabled")
    (found,) = findings(asked(), "warning")
    assert found.text == "transparent huge pages are off"


def test_the_command_prints_findings_and_their_advice_and_exits_by_them(
    healthy: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("NOVAINFER_MAX_NUM_SEQ", "3")
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--port", "0"]) == 0
    out = capsys.readouterr().out
    assert (
        "!  program    NOVAINFER_MAX_NUM_SEQ in the environment is no setting\n              -> correct its name" in out
    )
    healthy["torch_version"] = None
    assert main(["doctor", "--port", "0", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["is_fit"] is False
    assert {finding["level"] for finding in report["findings"]} == {"ok", "warning", "failure"}
    assert main(["doctor", "--port", "x"]) == 2


def test_what_a_model_needs_is_worked_out_from_its_files() -> None:
    needs = machine.needs_of(EngineConfig())
    config = json.loads((_demo() / "config.json").read_text())
    cells = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * _head_dim(config)
    element_bytes = {"float32": 4, "bfloat16": 2}[needs.dtype]
    assert needs.kv_bytes_per_token == cells * element_bytes
    assert needs.max_model_len == config["max_position_embeddings"]
    stored = (_demo() / "model.safetensors").stat().st_size  # in bfloat16
    assert machine.needs_of(EngineConfig(dtype="bfloat16")).weight_bytes == pytest.approx(stored, rel=0.05)
    assert machine.needs_of(EngineConfig(dtype="float32")).weight_bytes == pytest.approx(2 * stored, rel=0.05)
    half = machine.needs_of(EngineConfig(quantization="int8", kv_cache_dtype="int8"))
    assert half.weight_bytes < needs.weight_bytes
    assert half.kv_bytes_per_token < needs.kv_bytes_per_token
    with pytest.raises(ModelLoadError, match="neither a folder here nor a hub id"):
        machine.needs_of(EngineConfig(model="/nope"))


def _demo() -> Path:
    from novainfer.kernels.demo import model_path

    return model_path()


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def test_a_model_of_the_hub_is_not_fetched_for_a_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match="is not in the local cache of the hub: it is fetched at its first start"):
        machine.needs_of(EngineConfig(model="nobody/such-a-model"))


@pytest.mark.slow
def test_on_this_machine_it_runs_the_demo_model(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "novainfer", "doctor", "--port", "0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=240)
    report = json.loads(done.stdout)
    assert (done.returncode, report["is_fit"]) == (0, True), done.stdout
    topics = [finding["topic"] for finding in report["findings"]]
    assert topics.index("kernels") > topics.index("memory")
    assert any("tokens/s of the demo model" in finding["text"] for finding in report["findings"])
