"""The arithmetic behind the reports: percentiles, intervals, medians, ratios, roofline."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from novainfer.bench.ideal import Geometry, Roof, decode_step_s, ideal_s, prefill_s
from novainfer.bench.idle import idle_between
from novainfer.bench.machine import roof_of
from novainfer.bench.make_checkpoint import SHAPES
from novainfer.bench.report import Target, number, rounded, table, targets_json
from novainfer.bench.statistic import (
    Timeline,
    first_tokens_s,
    intervals_s,
    line_fit,
    median_ratio,
    medians,
    percentile,
    summary,
)
from novainfer.bench.workload import MAX_LEN, PREFIX, WORKLOADS, Workload, scaled
from novainfer.kernels.models.family import parse_config
from novainfer.kernels.models.registry import FAMILIES


def geometry(like: str, **changes: Any) -> Geometry:
    values = {"hidden_act": "silu", **SHAPES[like], **changes}
    family = FAMILIES[values["architectures"][0]]
    return Geometry(parse_config(family, values, Path("config.json")))


QWEN = geometry("qwen2.5-0.5b")


def line(times_s: list[float], counts: list[int] | None = None, error: str | None = None) -> Timeline:
    return Timeline(num_prompt_tokens=10, times_s=times_s, counts=counts or [1] * len(times_s), error=error)


@pytest.mark.parametrize(("percent", "wanted"), [(0, 1.0), (50, 2.5), (95, 3.85), (100, 4.0)])
def test_a_percentile_lies_between_its_neighbours(percent: float, wanted: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(wanted)


def test_a_percentile_of_nothing_is_no_number() -> None:
    assert math.isnan(percentile([], 50))
    assert number(percentile([], 50)) == "-"


def test_tokens_that_come_together_share_the_gap_before_them() -> None:
    lines = [line([1.0, 1.5, 2.1], [1, 1, 3]), line([2.0])]
    assert first_tokens_s(lines) == [1.0, 2.0]
    assert intervals_s(lines) == pytest.approx([0.5, 0.2, 0.2, 0.2])


def test_a_device_is_idle_between_neighbours_that_hold_all_requests() -> None:
    noted = [(1, 0.0, 1.0), (2, 2.0, 3.0), (2, 3.25, 4.25), (2, 4.5, 6.5), (1, 8.0, 9.0), (2, 9.5, 10.0)]
    found = idle_between(noted, 2)
    assert found == {
        "steps": 2, "step_ms": 1000.0, "idle_us": 250e3, "idle_us_p99": 250e3, "idle_share": pytest.approx(0.5 / 2.5)
    }  # fmt: skip


def test_a_failed_request_counts_as_an_error_and_nothing_else() -> None:
    found = summary([line([1.0, 2.0]), line([0.1, 0.2], error="reset")], wall_s=4.0)
    assert found["requests"] == 1
    assert found["errors"] == 1
    assert found["output_tok_s"] == pytest.approx(2 / 4)
    assert found["total_tok_s"] == pytest.approx(12 / 4)
    assert found["ttft_ms"]["p50"] == pytest.approx(1000)


def test_medians_are_taken_number_by_number() -> None:
    runs = [
        {"a": 1.0, "deep": {"b": 10}, "name": "x", "none": None},
        {"a": 9.0, "deep": {"b": 30}, "name": "x", "none": None},
        {"a": 2.0, "deep": {"b": 20}, "name": "y", "none": None},
    ]
    assert medians(runs) == {"a": 2.0, "deep": {"b": 20}, "name": "y", "none": None}


def test_ratios_are_formed_within_a_repetition() -> None:
    # a disturbance that slows both systems of one repetition leaves its ratio alone
    assert median_ratio([20.0, 2.0, 30.0], [10.0, 1.0, 10.0]) == 2.0


def test_a_line_tells_the_fixed_part_from_the_part_per_token() -> None:
    fixed, slope = line_fit([16, 64, 256], [100 + 4 * n for n in (16, 64, 256)])
    assert (fixed, slope) == pytest.approx((100, 4))


def test_the_geometry_of_qwen_is_half_a_billion() -> None:
    assert QWEN.body_parameters == 24 * (896 * 1152 + 896 * 896 + 3 * 896 * 4864)
    assert QWEN.body_parameters + QWEN.head_parameters == pytest.approx(0.494e9, rel=0.001)
    assert QWEN.kv_bytes_per_token == 12_288
    assert QWEN.is_reference


def test_heads_apart_from_the_hidden_size_and_windows_are_counted() -> None:
    qwen3 = geometry("qwen3-0.6b")
    assert qwen3.body_parameters == 28 * (2 * 1024 * (16 + 8) * 128 + 3 * 1024 * 3072)
    assert qwen3.body_parameters + qwen3.head_parameters == pytest.approx(0.596e9, rel=0.001)
    assert qwen3.kv_bytes_per_token == 2 * 28 * 8 * 128 * 2
    assert qwen3.seen(0, 100) == 100 * 101 / 2
    windows = Geometry(replace(qwen3.config, sliding_windows=(None, 10) * 14))
    for first, last in ((0, 7), (4, 30), (12, 13), (9, 10)):
        sliding = sum(min(position + 1, 10) for position in range(first, last))
        assert windows.seen(first, last) == (sliding + sum(range(first + 1, last + 1))) / 2


def test_a_small_batch_is_bound_by_reading_and_a_large_one_by_multiplying() -> None:
    roof = Roof(bytes_per_s=50e9, flops_per_s=470e9)
    one, many = decode_step_s(QWEN, roof, 1, 1), decode_step_s(QWEN, roof, 32, 1)
    assert one == pytest.approx(0.988e9 / 50e9, rel=0.01)
    assert many == pytest.approx(32 * 2 * 0.494e9 / 470e9, rel=0.01)


def test_a_token_is_multiplied_with_its_experts_and_a_step_reads_those_of_its_tokens() -> None:
    moe = geometry("qwen3-30b-a3b")
    attention, router, expert = 2 * 2048 * (32 + 4) * 128, 2048 * 128, 3 * 2048 * 768
    assert moe.body_parameters == 48 * (attention + router + 8 * expert)
    assert moe.body_parameters + 2 * moe.head_parameters == pytest.approx(3.35e9, rel=0.01)  # A3B
    assert moe.read_parameters(1) == pytest.approx(moe.body_parameters)
    assert moe.read_parameters(2) == pytest.approx(48 * (attention + router + (16 - 8 * 8 / 128) * expert))
    every = 48 * (attention + router + 128 * expert)
    assert every + 2 * moe.head_parameters == pytest.approx(30.53e9, rel=0.001)
    assert moe.read_parameters(10_000) == pytest.approx(every)
    assert moe.read_parameters(32) < 0.9 * every
    assert QWEN.read_parameters(1) == QWEN.read_parameters(99) == QWEN.body_parameters


def test_the_ideal_of_a_workload_is_its_prompts_and_its_steps() -> None:
    roof = Roof(bytes_per_s=50e9, flops_per_s=470e9)
    work = Workload(name="x", title="", num_requests=2, prompt_len=100, max_tokens=3)
    prompts = prefill_s(QWEN, roof, 200, 2 * 100 * 101 / 2, 2)
    steps = decode_step_s(QWEN, roof, 2, 101) + decode_step_s(QWEN, roof, 2, 102)
    assert ideal_s(work, QWEN, roof) == pytest.approx(prompts + steps)


def test_a_shared_beginning_is_computed_once_in_the_ideal() -> None:
    roof = Roof(bytes_per_s=1e15, flops_per_s=470e9)
    own = Workload(name="x", title="", num_requests=16, prompt_len=800, max_tokens=1)
    shared = msgspec.structs.replace(own, shared_len=768)
    tokens = (768 + 16 * 32) / (16 * 800)
    assert ideal_s(shared, QWEN, roof) / ideal_s(own, QWEN, roof) == pytest.approx(tokens, rel=0.15)


def test_a_decode_reads_a_shared_beginning_once_in_the_ideal() -> None:
    roof = Roof(bytes_per_s=1e9, flops_per_s=1e18)
    of_one = QWEN.kv_bytes_per_token / 1e9
    apart, shared = (decode_step_s(QWEN, roof, 16, 800, tokens) for tokens in (0, 768))
    assert apart - shared == pytest.approx(15 * 768 * of_one)
    windows = Geometry(replace(QWEN.config, sliding_windows=(None, 100) * 12))
    apart, shared = (decode_step_s(windows, roof, 16, 800, tokens) for tokens in (0, 768))
    assert apart - shared == pytest.approx(15 * (768 + 68) / 2 * of_one)
    assert decode_step_s(windows, roof, 16, 1000, 768) == pytest.approx(
        shared + (16 * 200 - 15 * (0 - 68)) / 2 * of_one
    )


@pytest.mark.parametrize("work", [*WORKLOADS, PREFIX], ids=lambda work: work.name)
def test_prompts_share_exactly_their_beginning_and_nothing_with_another_seed(work: Workload) -> None:
    prompts, others = work.prompts(151_936, 0), work.prompts(151_936, 1)
    assert [len(p) for p in prompts] == [work.prompt_len] * work.num_requests
    assert prompts == work.prompts(151_936, 0)
    assert len({tuple(p[: work.shared_len]) for p in prompts}) == 1
    assert len({tuple(p[work.shared_len : work.shared_len + 16]) for p in prompts}) == work.num_requests
    assert prompts[0][:16] != others[0][:16]
    assert work.prompt_len + work.max_tokens <= MAX_LEN


def test_a_scaled_workload_keeps_its_shape() -> None:
    small = scaled(WORKLOADS[3], 8)
    assert (small.num_requests, small.prompt_len, small.shared_len, small.max_tokens) == (2, 100, 96, 2)


def test_a_target_is_met_from_the_right_side() -> None:
    targets = [
        Target(name="speed", wanted=2.0, measured=2.5),
        Target(name="cost", wanted=2.0, measured=2.5, at_most=True),
        Target(name="unknown", wanted=2.0, measured=None),
    ]
    assert [t.is_met for t in targets] == [True, False, None]
    assert targets_json(targets)["cost"] == {"wanted": 2.0, "at_most": True, "measured": 2.5, "met": False}


def test_tables_line_up_and_numbers_have_three_digits() -> None:
    assert [number(x) for x in (12345.6, 99.96, 1.234, 0.01234, 7, None)] == [
        "12346",
        "100.0",
        "1.23",
        "0.0123",
        "7",
        "-",
    ]
    text = table("Title", ("", "speed"), [("a", 1.0), ("long name", 123.0)])
    assert text.splitlines() == ["Title", "           speed", "a           1.00", "long name    123"]
    assert rounded({"a": [1.23456789, 2]}) == {"a": [1.23457, 2]}


@pytest.mark.parametrize(("bf16", "fp32"), [(1000.0, 500.0), (300.0, 500.0)], ids=["bf16 instructions", "none"])
def test_a_cpu_that_multiplies_fp32_faster_than_bf16_has_fp32s_peak(bf16: float, fp32: float) -> None:
    roof = roof_of({"read_gb_s": 50.0, "bfloat16_gflop_s": bf16, "float32_gflop_s": fp32})
    assert roof == Roof(bytes_per_s=50e9, flops_per_s=max(bf16, fp32) * 1e9)
