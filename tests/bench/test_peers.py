"""`bench peers` with systems that need no model: turns, ratios, roofs, who is left out, traffic, forms of the model."""

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import msgspec
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from novainfer import SamplingParams
from novainfer.actors.tokenizer.gguf_tokenizer import gguf_tokenizer
from novainfer.bench.cli import bench
from novainfer.bench.ideal import Roof
from novainfer.bench.make_checkpoint import SHAPES, make_checkpoint
from novainfer.bench.peers import compare, files, known
from novainfer.bench.peers.known import OURS, SystemSpec
from novainfer.bench.peers.picture import picture
from novainfer.bench.peers.probe import Look, Probe, _int8_products, measurement
from novainfer.bench.peers.records import Records
from novainfer.bench.peers.report import MergeError, merged, targets
from novainfer.bench.peers.run_novainfer import NovaInfer
from novainfer.bench.report import number
from novainfer.bench.serve import W5
from novainfer.bench.statistic import Timeline
from novainfer.bench.worker import Child, ChildError, Memory, Result, Task
from novainfer.bench.workload import LONG, TRAFFIC, WORKLOADS, scaled
from novainfer.kernels.ops.grouped import GroupedWeight, rounded_to_int4
from novainfer.kernels.ops.quantised import quantised
from novainfer.kernels.weights.checkpoint import Checkpoint
from novainfer.kernels.weights.gguf import read_gguf
from tests.bench.test_offline import CONFIG, command

LOOK = Look(bytes_per_s=1e9, bf16_per_s=1e9, int8_per_s=2e9)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture(autouse=True)
def probe(monkeypatch: pytest.MonkeyPatch) -> list[Look]:
    """Looks that are told: each one a tenth faster than the one before."""
    looks: list[Look] = []

    def look(_: Any) -> Look:
        looks.append(msgspec.structs.replace(LOOK, bytes_per_s=1e9 * (1 + 0.1 * len(looks))))
        return looks[-1]

    for name in ("__init__", "__exit__"):
        monkeypatch.setattr(Probe, name, lambda *_: None)
    monkeypatch.setattr(Probe, "look", look)
    return looks


def tiny(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random checkpoint of `CONFIG`'s shape."""
    sizes = {name: value for name, value in CONFIG.items() if name != "architectures"}
    monkeypatch.setitem(SHAPES, "tiny", SHAPES["qwen2.5-0.5b"] | sizes)
    return make_checkpoint("tiny", folder / "tiny")


def run(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, systems: dict[str, list[str]], **options: Any
) -> tuple[dict[str, Any], str]:
    def specs(name: str, where: str, precision: str, *_: Any) -> SystemSpec | None:
        if name == "broken":
            raise files.FileError("no such form here")
        return None if precision == "int4" else SystemSpec(name, precision, tuple(systems[where]))

    monkeypatch.setattr(compare, "peer_systems", specs)
    monkeypatch.setattr(compare, "_ours", lambda _, precision: SystemSpec(OURS, precision, tuple(systems[OURS])))
    settings: dict[str, Any] = {"precisions": ["bf16", "int8"], "workloads": [scaled(w, 8) for w in WORKLOADS]}
    peers = {name: name for name in systems if name != OURS}
    return compare.run(model_dir, peers, http_work=None, **settings | options)


def answered(first_s: float = 1.0, cpu_s: float = 1.0, peak_mb: int = 1) -> Result:
    """A second's work: one request, of two tokens."""
    lines = [Timeline(num_prompt_tokens=1, times_s=[first_s, first_s + 1], counts=[1, 1])]
    memory = Memory(resident_bytes=0, peak_bytes=peak_mb * 1_000_000)
    return Result(wall_s=1.0, cpu_s=cpu_s, timelines=lines, memory=memory)


def test_each_precision_has_a_table_of_its_systems(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systems = {OURS: command(0.5), "vllm": command(1.0)}
    report, text = run(model_dir, monkeypatch, systems, repeat=2, precisions=["bf16", "int4"])
    work = report["precisions"]["bf16"]["workloads"]["W1"]["systems"]
    assert work["vllm"]["itl_ms"]["p50"] == pytest.approx(1000), "the fake's clock is its own"
    rates = [[run["output_tok_s"] for run in work[name]["runs"]] for name in (OURS, "vllm")]
    pairs = sorted(a / b for a, b in zip(*rates, strict=True))
    assert work["vllm"]["ratio"] == pytest.approx(sum(pairs) / 2)
    assert work["vllm"]["ratio_spread"] == pytest.approx(pairs)
    assert list(report["precisions"]["int4"]["workloads"]["W1"]["systems"]) == [OURS], "the peer has no int4"
    assert text.count("interleaved, medians") == 2


def test_the_roof_of_a_run_is_the_better_of_the_looks_around_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, probe: list[Look]
) -> None:
    report, _ = run(model_dir, monkeypatch, {OURS: command(0.5), "vllm": command(1.0)}, repeat=1)
    looks = iter(probe)
    for group in report["precisions"].values():
        for work in group["workloads"].values():
            for system in (OURS, "vllm"):
                before, after = next(looks), next(looks)
                assert before.bytes_per_s < after.bytes_per_s
                assert work["systems"][system]["runs"][0]["look"]["bytes_per_s"] == after.bytes_per_s
    shares = [
        report["precisions"][precision]["workloads"]["W3"]["systems"][OURS]["share_of_roofline"]
        * report["precisions"][precision]["workloads"]["W3"]["systems"][OURS]["wall_s"]
        for precision in ("bf16", "int8")
    ]
    assert shares[1] < shares[0], "in int8 the same work has a higher roof"


def test_each_number_of_a_look_is_the_better_one_whichever_look_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(
        [
            Look(bytes_per_s=3.0, bf16_per_s=1.0, int8_per_s=6.0),
            Look(bytes_per_s=2.0, bf16_per_s=4.0, int8_per_s=5.0),
        ]
    )
    monkeypatch.setattr(Probe, "look", lambda _: next(looks))
    records = Records("bf16", Probe(), lambda _: None)
    records.take("W1", OURS, 0, answered)
    (run,) = records.compared({})["W1"][OURS]["runs"]
    assert run["look"] == {"bytes_per_s": 3.0, "bf16_per_s": 4.0, "int8_per_s": 6.0}


@pytest.mark.parametrize(
    ("precision", "flops_per_s"), [("bf16", LOOK.bf16_per_s), ("int8", LOOK.int8_per_s), ("int4", LOOK.int8_per_s)]
)
def test_codes_of_any_bits_are_multiplied_in_int8(precision: str, flops_per_s: float, probe: list[Look]) -> None:
    records, roofs = Records(precision, Probe(), lambda _: None), list[Roof]()

    def ideal(roof: Roof) -> float:
        roofs.append(roof)
        return 0.25

    records.take("W1", OURS, 0, answered)
    assert records.compared({"W1": ideal})["W1"][OURS]["share_of_roofline"] == 0.25
    assert roofs == [Roof(bytes_per_s=probe[1].bytes_per_s, flops_per_s=flops_per_s)]


def test_each_precision_reads_half_the_bytes_of_the_one_before(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Probe, "look", lambda _: Look(bytes_per_s=1e9, bf16_per_s=1e18, int8_per_s=1e18))
    precisions = ["bf16", "int8", "int4"]
    work = [scaled(WORKLOADS[0], 8)]
    report, _ = run(model_dir, monkeypatch, {OURS: command(0.5)}, precisions=precisions, workloads=work, repeat=1)
    found = [report["precisions"][precision]["workloads"]["W1"]["systems"][OURS] for precision in precisions]
    two, one, half = (system["share_of_roofline"] * system["wall_s"] for system in found)
    assert one - half == pytest.approx((two - one) / 2), "keys and values are the same in all"


def test_who_begins_changes_with_the_repetition(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    options = {"precisions": ["bf16"], "workloads": [scaled(WORKLOADS[0], 8)], "repeat": 3, "progress": said.append}
    run(model_dir, monkeypatch, {OURS: command(0.5), "vllm": command(1.0)}, **options)
    turns = [line.split()[2].rstrip(":") for line in said if line.endswith("output tok/s")]
    assert turns == [OURS, "vllm", "vllm", OURS, OURS, "vllm"]


def test_peers_that_do_not_start_or_have_no_form_are_left_out(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systems = {OURS: command(0.5), "no-start": command(1.0, "fail"), "broken": []}
    report, text = run(model_dir, monkeypatch, systems, precisions=["bf16"], repeat=1)
    for work in report["precisions"]["bf16"]["workloads"].values():
        assert list(work["systems"]) == [OURS]
        assert "not installed" in work["left_out"]["no-start"]
        assert work["left_out"]["broken bf16"] == "no such form here"
    assert "broken bf16 was left out of W1, W2, W3, W4: no such form here" in text


def test_a_peer_that_fails_in_one_work_keeps_the_others(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = len(compare.WARM_UPS) + 2  # it dies in W2, whenever it is started
    systems = {OURS: command(0.5), "late": command(1.0, f"die={asked}")}
    report, text = run(model_dir, monkeypatch, systems, precisions=["bf16"], repeat=3)
    works = report["precisions"]["bf16"]["workloads"]
    assert "died on the way" in works["W2"]["left_out"]["late"]
    assert "late" not in works["W2"]["systems"]
    # Started anew it does W3, dies in W4, and then, in the second repetition, in W3: what it did before stays.
    assert [name for name, work in works.items() if work["left_out"]] == ["W2", "W3", "W4"]
    assert text.count("late (1 x)") == 1, "W3 has fewer runs than it says of the others"
    assert "late (1 x)" in picture(report)
    assert "late was left out of W2, W3, W4" in text
    assert len(works["W1"]["systems"]["late"]["runs"]) == 3
    assert len(works["W3"]["systems"]["late"]["runs"]) == 1
    assert all(len(work["systems"][OURS]["runs"]) == 3 for work in works.values())


def test_targets_are_for_works_of_their_whole_size_alone(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare.Geometry, "is_reference", True)
    mixed, _ = run(
        model_dir,
        monkeypatch,
        {OURS: command(0.01, "mixed")},
        precisions=["bf16"],
        repeat=1,
        workloads=[],
        traffic=TRAFFIC.scaled(16),
    )
    assert mixed["targets"] == {}
    small, _ = run(model_dir, monkeypatch, {OURS: command(0.5)}, precisions=["int8"], repeat=1)
    assert small["targets"] == {}
    systems = {OURS: command(0.5), "llama.cpp Q8_0": command(1.0), "vllm W8A8": command(0.01)}
    whole, text = run(model_dir, monkeypatch, systems, precisions=["int8"], workloads=WORKLOADS[:1], repeat=1)
    own, other = (whole["precisions"]["int8"]["workloads"]["W1"]["systems"][name] for name in [*systems][:2])
    assert whole["targets"]["W1 int8: share of the roof"]["measured"] == own["share_of_roofline"]
    found = whole["targets"]["W1 int8: output tok/s over llama.cpp Q8_0"]
    assert found["measured"] == other["ratio"] == pytest.approx(own["output_tok_s"] / other["output_tok_s"])
    assert found["met"] == (other["ratio"] >= 1.5)
    assert whole["targets"]["W2 int8: output tok/s over vllm W8A8"]["met"] is None
    assert "W1 int8: output tok/s over llama.cpp Q8_0" in text


def test_the_best_peer_is_the_one_that_ours_is_least_ahead_of() -> None:
    ratios = {OURS: 1.0, "vllm bf16": 1.4, "transformers bf16": 3.0, "llama.cpp BF16": 1.6}
    systems = {name: {"ratio": ratio} for name, ratio in ratios.items()}
    report = {"is_reference": True, "precisions": {"bf16": {"workloads": {"W1": {"systems": systems}}}}}
    measured = {target.name: target.measured for target in targets(report)}
    assert measured["W1 bf16: output tok/s over the best peer"] == 1.4


def test_novainfer_must_not_fail(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ChildError, match="died on the way"):
        run(model_dir, monkeypatch, {OURS: command(0.5, "die=4")}, precisions=["bf16"])


def test_traffic_comes_at_seventy_percent_of_what_each_can_do(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = TRAFFIC.scaled(8)
    systems = {OURS: command(0.01, "mixed"), "slow": command(0.02, "mixed"), "none": command(0.01)}
    report, _ = run(model_dir, monkeypatch, systems, precisions=["bf16"], workloads=[], traffic=traffic, repeat=1)
    found = report["precisions"]["bf16"]["workloads"]["W7"]["systems"]
    assert set(found) == {OURS, "slow"}, "one that takes no arrivals is not asked"
    for name, per_request_s in ((OURS, 0.01), ("slow", 0.02)):
        # the fake needs so long a request or longer, one after the other
        assert 0 < found[name]["requests_per_s"] <= 0.7 / per_request_s
        assert found[name]["requests"] == traffic.num_requests
        _, lengths = traffic.requests(CONFIG["vocab_size"], 1)  # type: ignore[arg-type]
        assert found[name]["output_tokens"] == sum(lengths)
    assert "share_of_roofline" not in found[OURS]


def test_servers_have_room_for_what_they_are_asked_over_http(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[known.Place] = []

    def ours(place: known.Place, precision: str) -> SystemSpec:
        places.append(place)
        return SystemSpec(OURS, precision, tuple(command(0.5)))

    monkeypatch.setattr(compare, "_ours", ours)
    monkeypatch.setattr(compare, "take_http", lambda *_: None)
    compare.run(model_dir, {}, precisions=["bf16"], workloads=[], http_work=W5)
    work = W5
    assert places[0].max_model_len >= work.prompt_len + work.max_tokens
    assert places[0].max_num_tokens >= work.num_requests * (work.prompt_len + work.max_tokens)


def test_systems_have_room_for_what_they_are_warmed_up_with(tmp_path: Path) -> None:
    place = compare._place(tmp_path, compare._Part((scaled(WORKLOADS[0], 16),)))
    for task in compare.WARM_UPS:
        length = max(map(len, task.prompts)) + task.max_tokens
        assert place.max_model_len >= length
        assert place.max_num_tokens >= length * len(task.prompts)
        assert place.max_requests >= len(task.prompts)


def test_prompts_of_8k_and_servers_have_starts_of_their_own(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[known.Place] = []

    def ours(place: known.Place, precision: str) -> SystemSpec:
        places.append(place)
        return SystemSpec(OURS, precision, tuple(command(0.5, "mixed")))

    monkeypatch.setattr(compare, "_ours", ours)
    monkeypatch.setattr(compare, "take_http", lambda *_: None)
    works = [WORKLOADS[1], LONG]
    traffic = TRAFFIC.scaled(8)
    report, _ = compare.run(
        model_dir, {}, precisions=["bf16"], workloads=works, traffic=traffic, http_work=W5, repeat=1
    )
    short, long, served = places
    assert short.max_model_len < 512 < 8192 < long.max_model_len
    assert served.max_model_len < 512
    found = report["precisions"]["bf16"]["workloads"]
    assert {name: work["settings"]["max_model_len"] for name, work in found.items()} == {
        "W2": short.max_model_len,
        "W6": long.max_model_len,
        "W7": short.max_model_len,
    }


def test_memory_and_first_tokens_are_compared_within_a_work_and_a_repetition() -> None:
    records = Records("bf16", Probe(), lambda _: None)
    # the first token of ours and of the peer in each repetition; the machine is slow in the second one
    for repetition, (own_s, peer_s) in enumerate([(1.0, 2.0), (9.0, 10.0), (1.0, 8.0)]):
        records.take("W5", OURS, repetition, partial(answered, own_s, 2.0, 100))
        records.take("W5", "peer", repetition, partial(answered, peer_s, 6.0, 300 + repetition))
    records.take("W1", "peer", 0, partial(answered, peak_mb=7))
    records.take("W1", OURS, 0, answered)
    found = records.compared({})
    assert found["W5"]["peer"]["ttft_ratio"] == 0.5, "2, not 8 over 1: a ratio is of one repetition"
    assert found["W5"]["peer"]["cpu_ratio"] == 3.0, "the peer's over ours"
    assert found["W5"][OURS]["peak_mb"] == 100
    assert found["W5"]["peer"]["peak_mb"] == 301
    assert found["W1"]["peer"]["peak_mb"] == 7, "another work, and maybe a process of another kind"
    for words in ("the first reason", "another"):
        records.leave_out("peer", ["W1", "W5"], ChildError(words))
    assert records.left_out("W1", 3) == {"peer": "the first reason"}
    assert records.left_out("W5", 3) == {}, "it has all its runs"
    with pytest.raises(ChildError, match="must not fail"):
        records.leave_out(OURS, ["W1"], ChildError("must not fail"))


def test_the_clock_is_the_same_at_any_rate_and_its_mean_is_the_rate() -> None:
    slow, fast = TRAFFIC.arrivals_s(1.0, 5), TRAFFIC.arrivals_s(4.0, 5)
    assert slow[0] == 0.0
    assert slow == sorted(slow)
    assert fast == pytest.approx([at / 4 for at in slow])
    ends = [TRAFFIC.arrivals_s(2.0, seed)[-1] for seed in range(200)]
    assert sum(ends) / len(ends) == pytest.approx((TRAFFIC.num_requests - 1) / 2.0, rel=0.03)
    prompts, lengths = TRAFFIC.requests(1000, 3)
    assert {32 <= len(prompt) <= 1024 for prompt in prompts} == {16 <= length <= 128 for length in lengths} == {True}
    assert prompts != TRAFFIC.requests(1000, 4)[0]


def test_the_picture_is_an_image_with_a_bar_for_each_system(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = run(model_dir, monkeypatch, {OURS: command(0.5), "a<b": command(1.0)}, repeat=1)
    root = ElementTree.fromstring(picture(report))
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    bars = [box for box in boxes if "bar" in box.attrib["class"].split()]
    assert len(bars) == 2 * len(WORKLOADS) * 2, "precisions, works, systems"
    assert sum("own" in bar.attrib["class"] for bar in bars) == len(bars) / 2
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a<b" in texts
    found = report["precisions"]["int8"]["workloads"]["W2"]["systems"]
    assert f"{number(found['a<b']['ratio'])}x the best peer" in texts
    own = found[OURS]
    assert f"{number(own['output_tok_s'])} ({100 * own['share_of_roofline']:.0f} %)" in texts
    right = max(float(box.attrib["x"]) + float(box.attrib["width"]) for box in boxes if "x" in box.attrib)
    assert right < float(root.attrib["width"])


def test_reports_of_several_runs_make_one_table(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    systems = {OURS: command(0.5), "vllm": command(1.0)}
    work = {w.name: [scaled(w, 8)] for w in WORKLOADS}
    first, _ = run(model_dir, monkeypatch, systems, precisions=["bf16"], workloads=work["W1"] + work["W2"], repeat=1)
    second, _ = run(model_dir, monkeypatch, {OURS: command(0.5)}, workloads=work["W2"] + work["W3"], repeat=2)
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    for file, report in zip(files, (first, second), strict=True):
        file.write_text("a table\n" + json.dumps(report) + "\n")
    picture = tmp_path / "all.svg"
    done = CliRunner().invoke(bench, ["peers-table", *map(str, files), "--json", "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    whole = json.loads(done.stdout.splitlines()[-1])["precisions"]
    assert {precision: list(group["workloads"]) for precision, group in whole.items()} == {
        "bf16": ["W1", "W2", "W3"],
        "int8": ["W2", "W3"],
    }
    assert list(whole["bf16"]["workloads"]["W1"]["systems"]) == [OURS, "vllm"]
    assert list(whole["bf16"]["workloads"]["W2"]["systems"]) == [OURS], "the later run's, and no mixture"
    assert whole["bf16"]["workloads"]["W2"]["repeat"] == 2
    assert ElementTree.fromstring(picture.read_text()) is not None
    with pytest.raises(MergeError, match="model must be"):
        merged([first, {**second, "model": "another"}])
    with pytest.raises(MergeError, match="format must be 2 in all reports, not None"):
        merged([{name: value for name, value in first.items() if name != "format"}, second])
    with pytest.raises(MergeError, match="smaller --scale"):
        merged([{**first, "is_reference": True}, second])
    with pytest.raises(MergeError, match="two machines"):
        merged([first, {**second, "machine": {**second["machine"], "cpu": "another"}}])
    files[0].write_text("")
    assert "must be the JSON of a report" in CliRunner().invoke(bench, ["peers-table", str(files[0])]).output


def test_peers_are_found_where_they_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known.importlib.util, "find_spec", lambda name: name == "transformers" or None)
    monkeypatch.setattr(known.shutil, "which", lambda name: "/usr/bin/" + name)
    assert known.find_peers({}) == {"llama.cpp": "/usr/bin/llama-server", "transformers": sys.executable}
    assert known.find_peers({"vllm": sys.executable})["vllm"] == sys.executable
    for given, words in (({"vlm": sys.executable}, "no peer 'vlm'"), ({"vllm": str(tmp_path)}, "no program")):
        with pytest.raises(ValueError, match=words):
            known.find_peers(given)


def test_peers_that_are_left_out_must_be_known_and_not_given_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known.importlib.util, "find_spec", lambda name: name == "transformers" or None)
    monkeypatch.setattr(known.shutil, "which", lambda name: "/usr/bin/" + name)
    assert known.find_peers({}, ["llama.cpp", "vllm"]) == {"transformers": sys.executable}
    with pytest.raises(ValueError, match="vllm is given by --peer and left out by --no-peer"):
        known.find_peers({"vllm": sys.executable}, ["vllm"])
    refused = CliRunner().invoke(bench, ["peers", "--no-peer", "foo"])
    assert refused.exit_code == 2
    assert "there is no peer 'foo', only vllm, openvino, llama.cpp, transformers" in " ".join(refused.output.split())
    told = CliRunner().invoke(bench, ["peers", "--help"]).output
    assert not [name for name in known.PEERS if name not in told]


def test_a_peer_waits_as_it_does_best_and_not_as_novainfer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    place = known.Place(tmp_path, tmp_path, 1024, 4096, 4)
    spec = known.peer_systems("vllm", sys.executable, "bf16", place, "/a/folder")
    assert spec is not None
    assert spec.environment["OMP_WAIT_POLICY"] is None
    other = known.peer_systems("transformers", sys.executable, "bf16", place, "/a/folder")
    assert other is not None
    assert other.environment["OMP_WAIT_POLICY"] == "passive"
    code = "import os, sys; sys.exit(3 if 'OMP_WAIT_POLICY' in os.environ else 4)"
    with pytest.raises(ChildError, match="exit code 4"):
        Child([sys.executable, "-c", code], spec.environment)


def test_vllm_has_a_thread_on_each_core_and_the_libraries_that_its_manual_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "cores", lambda: [2, 3])
    monkeypatch.setattr(known.ctypes.util, "find_library", lambda name: f"lib{name}.so.4")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    python, openmp = tmp_path / "bin" / "python", tmp_path / "lib" / "libiomp5.so"
    for file in (python, openmp):
        file.parent.mkdir()
        file.touch()
    spec = known.peer_systems("vllm", str(python), "bf16", known.Place(tmp_path, tmp_path, 1024, 4096, 4), "/a/folder")
    assert spec is not None
    assert spec.environment["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert spec.environment["LD_PRELOAD"] == f"libtcmalloc_minimal.so.4:{openmp}"
    assert spec.server is not None, "it is served in the same environment"


def test_llama_cpps_slots_have_caches_of_their_own_where_these_fit() -> None:
    def flags(longest: int, requests: int) -> tuple[str, ...]:
        place = known.Place(Path("model"), Path("forms"), longest, 4096, requests)
        server = known.PEERS["llama.cpp"].server
        assert server is not None
        return server("llama-server", "model.gguf", place)

    short, long = flags(1024, 32), flags(8192, 32)
    assert short[short.index("--ctx-size") + 1] == str(1024 * 32)
    assert "--kv-unified" not in short
    assert long[long.index("--ctx-size") + 1] == "4096"
    assert "--kv-unified" in long


def test_a_peers_program_needs_nothing_of_novainfer() -> None:
    """Each one is loaded by a Python that sees the standard library and their folder alone."""
    modules = sorted(kind.program for kind in known.PEERS.values())
    code = (
        f"import sys; [__import__('{known.PACKAGE}.' + name) for name in {modules}]; print('novainfer' in sys.modules)"
    )
    with known.programs() as folder:
        done = subprocess.run(
            [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {folder!r}); {code}"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


def test_a_checkpoint_of_compressed_tensors_holds_the_same_weights_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny(tmp_path, monkeypatch)
    made = files.make_w8a8(source, tmp_path / "w8a8")
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    with safe_open(source / "model.safetensors", "pt") as old, safe_open(made / "model.safetensors", "pt") as new:
        name = "model.layers.0.mlp.down_proj.weight"
        codes, scale = quantised(old.get_tensor(name))
        assert torch.equal(new.get_tensor(name), codes)
        assert torch.equal(new.get_tensor(f"{name}_scale")[:, 0], scale)
        assert torch.equal(new.get_tensor("model.embed_tokens.weight"), old.get_tensor("model.embed_tokens.weight"))
        assert set(old.keys()) < set(new.keys())


def test_a_checkpoint_of_4_bits_is_read_as_what_it_was_rounded_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny(tmp_path, monkeypatch)
    made = files.make_w4a16(source, tmp_path / "w4a16")
    checkpoint = Checkpoint(made)
    with safe_open(source / "model.safetensors", "pt") as old:
        for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"):
            weight = old.get_tensor(name)
            rounded = rounded_to_int4(weight.view(-1, 32))  # which divides 160 features, too
            scale = rounded.scale.bfloat16().float()  # as it is kept
            expected = GroupedWeight(4, 32, rounded.codes, scale, -8 * scale).widened().view(weight.shape)
            found = torch.empty(expected.shape)
            checkpoint.read_into(name, found)
            assert torch.equal(found, expected)
        embedding = torch.empty(old.get_tensor("model.embed_tokens.weight").shape, dtype=torch.bfloat16)
        checkpoint.read_into("model.embed_tokens.weight", embedding)
        assert torch.equal(embedding, old.get_tensor("model.embed_tokens.weight"))
    checkpoint.close()


def test_a_gguf_file_holds_the_same_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    source = tiny(tmp_path, monkeypatch)
    path = files.make_gguf(source, tmp_path / "forms" / "BF16.gguf", "BF16")
    assert files.make_gguf(source, path, "BF16") == path, "made once"
    tokenizer = gguf_tokenizer(read_gguf(path))
    text = "What is 17 + 5?"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with safe_open(source / "model.safetensors", "pt") as old:
        assert len(read) == len(old.keys())
        weight = old.get_tensor("model.layers.1.mlp.gate_proj.weight")
        bits = torch.from_numpy(read["blk.1.ffn_gate.weight"].data.copy()).view(torch.bfloat16)
        assert torch.equal(bits.view(weight.shape), weight)
    small = files.make_gguf(source, tmp_path / "forms" / "Q4_0.gguf", "Q4_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(small).tensors}
    assert kinds["blk.1.ffn_gate.weight"] == "Q4_0"
    with pytest.raises(files.FileError, match="llama-quantize"):
        files.make_gguf(source, tmp_path / "forms" / "Q4_K_M.gguf", "Q4_K_M")


def test_novainfers_library_has_as_many_requests_open_as_clients_of_a_server_would() -> None:
    open_now, most, sent = set[int](), list[int](), list[int]()

    class Delta(NamedTuple):
        token_ids: list[int]
        num_prompt_tokens: int = 1

    class SlowFirst:
        async def generate(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[Delta]:
            open_now.add(prompt[0])
            sent.append(prompt[0])
            most.append(len(open_now))
            assert params.max_tokens == 7
            for _ in range(20 if prompt[0] == 0 else 2):
                await asyncio.sleep(0)
            yield Delta([1, 2])
            open_now.remove(prompt[0])

    system = NovaInfer.__new__(NovaInfer)
    with asyncio.Runner() as runner:
        vars(system).update(_runner=runner, _engine=SlowFirst())
        lines = system.answer_by_clients([[number] for number in range(6)], 7, 2)
        assert max(most) == 2
        assert sent == [0, 1, 2, 3, 4, 5]
        assert most == [1, 2, 2, 2, 2, 2], "the next one is sent when another has ended, not when all have"
        assert [line.counts for line in lines] == [[2]] * 6
        assert all(line.times_s[0] < 1 for line in lines)


def test_a_child_tells_whether_it_takes_requests_that_come_one_by_one() -> None:
    with Child(command(0.01, "mixed")) as child:
        assert child.ready.facts["takes_arrivals"]
        result = child.run(Task(prompts=[[1], [2]], max_tokens=4, lengths=[2, 4], arrivals_s=[0.0, 0.05]))
        assert [line.num_output_tokens for line in result.timelines] == [2, 4]
        assert result.wall_s >= 0.05
    with Child(command(0.01)) as child:
        assert not child.ready.facts["takes_arrivals"]


@pytest.mark.parametrize(
    ("bf16_s", "fp32_s", "int8_s", "fastest_s"),
    [
        (2.0, 4.0, 1.0, (2.0, 1.0)),
        (4.0, 2.0, 1.0, (2.0, 1.0)),
        (4.0, 1.0, 2.0, (1.0, 1.0)),
        (1.0, 2.0, None, (1.0, 1.0)),
    ],
    ids=["bf16 instructions", "none", "nor VNNI", "whole numbers by loops alone"],
)
def test_what_is_in_few_bits_is_looked_at_in_more_too(
    bf16_s: float,
    fp32_s: float,
    int8_s: float | None,
    fastest_s: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken_s = {torch.bfloat16: bf16_s, torch.float32: fp32_s}

    def best_s(*variants: Any) -> float:
        found_s = [variant() for variant in variants]
        return min([s if isinstance(s, float) else 8.0 for s in found_s], default=math.inf)

    monkeypatch.setattr("novainfer.bench.peers.probe.SHAPE", (32, 64, 128))
    monkeypatch.setattr("novainfer.bench.peers.probe.READ_BYTES", 4096)
    monkeypatch.setattr("novainfer.bench.peers.probe._best_s", best_s)
    monkeypatch.setattr("novainfer.bench.peers.probe._products", lambda dtype: [lambda: taken_s[dtype]])
    int8_products = [lambda: int8_s] if int8_s else []
    monkeypatch.setattr("novainfer.bench.peers.probe._int8_products", lambda: int8_products)
    operations = 2 * 32 * 64 * 128
    of_bf16_s, of_int8_s = fastest_s
    assert measurement()() == Look(
        bytes_per_s=512, bf16_per_s=operations / of_bf16_s, int8_per_s=operations / of_int8_s
    )


@pytest.mark.parametrize("has_vnni", [False, True])
def test_torchs_product_of_whole_numbers_is_asked_where_it_is_no_loop(
    has_vnni: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    def int_mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        asked.append((*x.shape, weight.shape[1]))
        return x

    monkeypatch.setattr("novainfer.bench.peers.probe.SHAPE", (32, 64, 128))
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has_vnni)
    monkeypatch.setattr(torch, "_int_mm", int_mm)
    for product in _int8_products():
        product()
    assert asked == [(32, 64, 128)] * has_vnni
