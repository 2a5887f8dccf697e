"""Every setting that cannot be used is refused when it is written down, with its name and what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from novainfer import EngineConfig, InvalidParameter, SamplingParams
from novainfer.config import AT_MOST

BAD_CONFIG: list[tuple[str, Any]] = [
    *[
        (name, value)
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "prefill_chunk_tokens",
            "block_size",
            "num_threads",
            "max_model_len",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
        )
        for value in (0, -1, "8", 1.5)
    ],
    *[(name, 10**30) for name in AT_MOST],  # a worker would die of them as it starts
    *[(name, most + 1) for name, most in AT_MOST.items()],
    ("kv_cache_memory_utilization", 0.0),
    ("kv_cache_memory_utilization", 1.1),
    ("kv_cache_memory_utilization", float("nan")),
    ("kv_cache_memory_utilization", "half"),
    ("kv_cache_capacity_mode", "guess"),
    ("num_kv_blocks", 10),  # means nothing in mode "auto"
    ("device", "tpu"),
    ("dtype", "float64"),
    ("native", "maybe"),
    ("seed", "x"),
    ("model", 5),
    ("model", ""),
    ("model", None),
    ("tokenizer", 5),
    ("enable_prefix_caching", "yes"),
    ("batch_invariant", 1),
    ("worker", "cluster"),
    ("warm_spare", True),  # means nothing while the worker is a thread
    ("recorder", 1),
    *[
        (name, value)
        for name in ("max_restarts", "max_num_overflow_reqs", "swap_space_gib", "stall_keep_s")
        for value in (-1, "8")
    ],
    *[
        (name, value)
        for name in ("step_timeout_s", "heartbeat_timeout_s", "restart_window_s", "ladder_quiet_s", "stall_timeout_s")
        for value in (0, -1, 1e-9, 0.04, float("nan"), float("inf"), 1e300, "8")
    ],
    ("stall_keep_s", 1e300),  # loops lose count of timers that are set for centuries
    ("model", "a\0b"),  # no system has such a file
    ("tokenizer", "a\0b"),
    ("recorder_dir", "a\0b"),
    ("recorder_dir", 4),
    ("recorder_dir", ""),  # would be the current folder
    ("weight_cache_dir", ""),
    ("weight_cache_dir", "a\0b"),
    ("weight_cache_dir", 4),
]


@pytest.mark.parametrize(("name", "value"), BAD_CONFIG, ids=lambda value: str(value))
def test_a_bad_engine_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        EngineConfig(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message


@pytest.mark.parametrize(("name", "most"), AT_MOST.items())
def test_the_largest_setting_is_taken(name: str, most: int) -> None:
    more: dict[str, Any] = {"max_num_batched_tokens": AT_MOST["max_num_batched_tokens"]}
    if name == "num_kv_blocks":
        more["kv_cache_capacity_mode"] = "fixed"
    assert getattr(EngineConfig(**(more | {name: most})), name) == most


def test_an_enumeration_names_its_choices() -> None:
    with pytest.raises(
        InvalidParameter, match=r"dtype must be one of auto, float32, bfloat16, float16, half, .*not 'int3'"
    ):
        EngineConfig(dtype="int3")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="native must be one of 0, 1, require, not 'maybe'"):
        EngineConfig(native="maybe")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "choices"),
    [("kv_cache_dtype", "auto, int8, fp8"), ("device", "cpu, cuda"), ("pooling", "auto, last, mean")],
)
def test_each_choice_is_named_once(name: str, choices: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        EngineConfig(**{name: "int4"})
    assert caught.value.message == f"{name} must be one of {choices}, not 'int4'"


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="needs num_kv_blocks"):
        EngineConfig(kv_cache_capacity_mode="fixed")
    with pytest.raises(InvalidParameter, match=r"max_num_batched_tokens \(8\) must be at least max_num_seqs \(16\)"):
        EngineConfig(max_num_seqs=16, max_num_batched_tokens=8)


def test_without_settings_it_is_the_demo_model_on_the_cpu() -> None:
    config = EngineConfig()
    assert (config.model, config.device, config.dtype) == ("demo", "cpu", "auto")


def test_an_engine_setting_that_is_not_one_is_refused() -> None:
    with pytest.raises(TypeError, match="Unexpected keyword argument 'max_num_seq'"):
        EngineConfig(max_num_seq=8)  # type: ignore[call-arg]


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        EngineConfig().block_size = 8  # type: ignore[misc]
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.0  # type: ignore[misc]


NAN = float("nan")
BAD_PARAMS: list[tuple[str, Any]] = [
    *[("n", value) for value in (0, -1, 129, 1.5, "2", True, None)],
    *[("temperature", value) for value in (-0.1, NAN, float("inf"), 101, "hot", None)],
    *[("top_p", value) for value in (0, -1, 1.01, NAN, "1")],
    *[("top_k", value) for value in (-2, 1.5, "5")],
    *[("min_p", value) for value in (-0.1, 1.1, NAN)],
    *[("repetition_penalty", value) for value in (0, -1, NAN, 101)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, NAN)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN)],
    *[("seed", value) for value in (2**64, -(2**63) - 1, 1.5, "x")],
    *[("max_tokens", value) for value in (0, -1, 1.5, "16")],
    *[("min_tokens", value) for value in (-1, 17, 1.5)],
    *[("stop", value) for value in ("", [""], ["ok", ""], ["x"] * 17, 5, [5], [None])],
    *[("stop_token_ids", value) for value in (["a"], [1.5], 7, None)],
    *[("logprobs", value) for value in (-1, 21, True, "all")],
    *[("logit_bias", value) for value in ({5: 101.0}, {5: NAN}, {"5": 1.0}, {5: "x"}, [5])],
    *[("allowed_token_ids", value) for value in ([], ["a"], 5)],
    *[("banned_token_ids", value) for value in (["a"], 5, None)],
    *[("timeout_s", value) for value in (0, -1, NAN, float("inf"), "5")],
    *[("ignore_eos", value) for value in (1, "yes")],
    *[("skip_special_tokens", value) for value in (0,)],
    *[("include_stop_str_in_output", value) for value in ("no",)],
]


@pytest.mark.parametrize(("name", "value"), BAD_PARAMS, ids=lambda value: str(value))
def test_a_bad_sampling_parameter_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message
    assert caught.value.status == 400


def test_a_parameter_that_is_not_one_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "good",
    [
        {"temperature": 0},
        {"temperature": 1},
        {"top_k": -1},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"max_tokens": None, "min_tokens": 500},
        {"stop": ("a", "b")},
        {"stop_token_ids": (1, 2)},
        {"logprobs": 0},
        {"logit_bias": {3: -100}},
        {"n": 128},
    ],
    ids=str,
)
def test_what_can_be_used_is_taken(good: dict[str, Any]) -> None:
    params = SamplingParams(**good)
    assert {name: getattr(params, name) for name in good} == good


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [257]),
        ("logit_bias", {257: 1.0}),
        ("allowed_token_ids", [0, 257]),
        ("banned_token_ids", [300]),
    ],
)
def test_a_token_id_beyond_the_vocabulary_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match="token ids run from 0 to 256") as caught:
        SamplingParams(**{name: value}).check_vocabulary(257)
    assert caught.value.param == name


def test_banning_all_that_is_allowed_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="bans every allowed token"):
        SamplingParams(allowed_token_ids=[1, 2], banned_token_ids=[1, 2, 3]).check_vocabulary(10)
