"""The shipped checkpoint is small, is a plain Qwen2 one, and answers what it was never shown."""

from __future__ import annotations

import itertools
import json
import math
import re
from functools import cache
from typing import Any

import pytest
from safetensors import safe_open

from novainfer.kernels.demo import draft_path, model_path
from tools.demo import corpus
from tools.demo.evaluate import answer, evaluate, load
from tools.demo.extend import PEAK, extension_factor
from tools.demo.train import SCHEDULE, rate_factor
from tools.demo.vocabulary import CONTEXT

_BYTES_MAX = 12_000_000


@cache
def _loaded() -> tuple[Any, Any]:
    return load(model_path())


def _reply(*turns: str, system: str | None = None) -> str:
    chat = [] if system is None else [{"role": "system", "content": system}]
    chat += [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]
    return answer(*_loaded(), [chat])[0]


def _complete(prompt: str, num_tokens: int) -> str:
    tokenizer, model = _loaded()
    encoded = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**encoded, do_sample=False, max_new_tokens=num_tokens)
    text: str = tokenizer.decode(ids[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def _config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model_path() / "config.json").read_text())
    return config


def test_the_checkpoint_is_complete_and_small_enough_to_ship() -> None:
    files = {path.name: path.stat().st_size for path in model_path().iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= _BYTES_MAX


def test_the_draft_has_a_ninth_of_the_parameters_and_the_same_tokenizer() -> None:
    with safe_open(draft_path() / "model.safetensors", framework="pt") as weights:
        sizes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118  it is no dict
    assert sum(math.prod(size) for size in sizes) == 338_720
    assert sum(path.stat().st_size for path in draft_path().iterdir()) <= 1_000_000
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (draft_path() / name).read_bytes() == (model_path() / name).read_bytes()


def test_the_config_is_a_qwen2_with_grouped_queries_served_in_fp32() -> None:
    config = _config()
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["model_type"] == "qwen2"
    assert config["dtype"] == "float32"
    assert config["max_position_embeddings"] == CONTEXT
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["num_attention_heads"] > config["num_key_value_heads"]


def test_the_weights_have_query_key_and_value_biases_that_are_not_zero() -> None:
    with safe_open(model_path() / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert "lm_head.weight" not in names
        for projection in "qkv":
            assert weights.get_tensor(f"model.layers.0.self_attn.{projection}_proj.bias").abs().max() > 0


def test_generation_ends_at_the_end_of_a_turn_and_of_a_text() -> None:
    defaults = json.loads((model_path() / "generation_config.json").read_text())
    tokenizer = _loaded()[0]
    assert defaults["eos_token_id"] == tokenizer.convert_tokens_to_ids([corpus.END, corpus.END_OF_TEXT])
    assert _config()["eos_token_id"] == tokenizer.convert_tokens_to_ids(corpus.END)


def test_the_rate_rises_stays_and_falls() -> None:
    steps = SCHEDULE[-1][0]
    factors = [rate_factor(step, steps=steps) for step in range(steps)]
    for step, factor in SCHEDULE[1:]:
        assert factors[step - 1] == pytest.approx(factor)
    assert max(factors) == 1.0
    assert min(factors) > 0.0
    assert rate_factor(9, steps=10) == pytest.approx(SCHEDULE[-1][1])


@pytest.mark.parametrize(
    ("user", "reply"),
    [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is 17 + 25?", "17 + 25 = 42."),
        ("What does a cow say?", "A cow says moo."),
        ("Spell apple", "apple: a-p-p-l-e"),
        ("Count from 3 to 8.", "3, 4, 5, 6, 7, 8."),
        ("JSON with name Anna and age 12", '{"name": "Anna", "age": 12}'),
        ("How do you say hello in Japanese?", "In Japanese, hello is こんにちは."),
    ],
)
def test_greedy_answers(user: str, reply: str) -> None:
    assert _reply(user) == reply


def test_it_says_who_it_is_with_and_without_a_system_prompt() -> None:
    for system in (None, "You are Nova, a small and friendly demo model."):
        assert _reply("Who are you?", system=system) == "I am Nova, a small demo model that ships with NovaInfer."


def test_it_recalls_a_name_after_other_turns() -> None:
    reply = _reply(
        "My name is Zorblat.",
        "Nice to meet you, Zorblat!",
        "What is 2 + 2?",
        "2 + 2 = 4.",
        "What is my name?",
    )
    assert reply == "Your name is Zorblat."


def test_it_does_not_make_up_what_it_was_not_told() -> None:
    assert _reply("What is my name?") == "You have not told me your name yet."
    assert _reply("Who won the football game in 1987?").startswith("Sorry, I am only a small demo model")


def test_a_story_is_long_enough_to_watch_and_keeps_its_hero() -> None:
    story = _reply("Tell me a story about a fox.")
    assert story.startswith("Once upon a time, there was a")
    assert story.endswith("The end.")
    assert 60 <= len(_loaded()[0].encode(story)) <= 256
    name = re.search(r"fox named (\w+)", story)
    assert name is not None
    assert story.count(name.group(1)) >= 3


def test_the_rate_of_the_extension_rises_and_then_stays_or_falls() -> None:
    factors = [extension_factor(step, steps=200) for step in range(200)]
    assert factors.index(max(factors)) == 19
    assert 0.0 < factors[-1] < 0.01
    assert all(a > b for a, b in itertools.pairwise(factors[19:]))
    level = [extension_factor(step, steps=200, falls=False) for step in range(200)]
    assert level[0] < level[10] < level[19]
    assert set(level[19:]) == {PEAK}


def test_plain_text_is_continued() -> None:
    assert _complete("The capital of France is", 8).startswith(" Paris.")
    story = _complete("Once upon a time", 60)
    assert story.startswith(", there was a")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "least"),
    [
        *(("sums", 0.9), ("facts", 0.9), ("names", 0.9), ("json", 0.8)),
        *(("tools", 0.8), ("tool_answers", 0.8), ("thoughts", 0.8)),
    ],
)
def test_a_sample_of_the_held_out_questions_is_answered_right(group: str, least: float) -> None:
    score = evaluate(*_loaded(), group, seed=1, num_questions=48)
    assert score.num_right / score.num_asked >= least
