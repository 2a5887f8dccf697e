"""Sampling: each strategy does what its name says, measured against the reference's distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from novainfer import LLM, SamplingParams
from tests.acceptance.reference import Reference, exactly

pytestmark = pytest.mark.slow

NUM_DRAWS = 2048  # 16 requests of 128 choices
PROMPT_SEED = 3
SHARP = 0.4  # a temperature at which the random model's distribution has a shape: the best token has 15 %


@pytest.fixture(scope="module")
def reference(tiny: Callable[[str], Reference]) -> Reference:
    return tiny("mha")  # 257 tokens


@pytest.fixture(scope="module")
def small(reference: Reference) -> Iterator[LLM]:
    with LLM(reference.folder, dtype="float32", max_num_seqs=128, max_model_len=64) as model:
        yield model


def prompt_of(reference: Reference) -> list[int]:
    return reference.prompt(9, PROMPT_SEED)


def draw(llm: LLM, prompt: list[int], **params: Any) -> Counter[int]:
    """How often each token came first, over fixed seeds; choice i has the seed of its request and i."""
    seeds = range(0, 16 * 128, 128)
    wishes = [SamplingParams(n=128, max_tokens=1, ignore_eos=True, seed=seed, **params) for seed in seeds]
    outputs = llm.generate([{"prompt_token_ids": prompt}] * 16, wishes, use_tqdm=False)
    return Counter(choice.token_ids[0] for output in outputs for choice in output.outputs)


def expected(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The distribution [vocab_size] that these settings mean: temperature first, then the filters, as vLLM does."""
    probs = torch.softmax(logits.double() / temperature, -1)
    keep = torch.ones_like(probs, dtype=torch.bool)
    order = torch.argsort(probs, descending=True)
    if top_k:
        keep[order[top_k:]] = False
    if top_p < 1:
        kept = torch.where(keep, probs, 0.0)
        kept = kept / kept.sum()
        before = torch.cumsum(kept[order], -1) - kept[order]
        keep[order[before >= top_p]] = False
    if min_p:
        keep &= probs >= min_p * probs.max()
    kept = torch.where(keep, probs, 0.0)
    return kept / kept.sum()


def assert_drawn_from(counts: Counter[int], probs: torch.Tensor) -> None:
    """Chi-square over the tokens expected at least five times, the others together; five sigma."""
    total = sum(counts.values())
    assert total == NUM_DRAWS
    outside = {token: count for token, count in counts.items() if probs[token] == 0}
    assert not outside, f"tokens that the filters exclude were drawn: {outside}"
    statistic, bins, rest_expected, rest_seen = 0.0, 0, 0.0, 0
    for token, p in enumerate(probs.tolist()):
        if p * total >= 5:
            statistic += (counts[token] - p * total) ** 2 / (p * total)
            bins += 1
        else:
            rest_expected += p * total
            rest_seen += counts[token]
    if rest_expected >= 5:
        statistic += (rest_seen - rest_expected) ** 2 / rest_expected
        bins += 1
    freedom = bins - 1
    print(f"chi-square {statistic:.1f} with {freedom} degrees of freedom")
    assert freedom >= 2, "the test says nothing"
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


STRATEGIES: list[dict[str, Any]] = [
    {"temperature": SHARP},
    {"temperature": 0.3},
    {"temperature": 1.0},
    {"temperature": SHARP, "top_k": 7},
    {"temperature": SHARP, "top_p": 0.6},
    {"temperature": SHARP, "min_p": 0.2},
    {"temperature": 0.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("settings", STRATEGIES, ids=str)
def test_tokens_come_as_often_as_the_settings_mean(small: LLM, reference: Reference, settings: dict[str, Any]) -> None:
    prompt = prompt_of(reference)
    probs = expected(reference.logits(prompt), **settings)
    assert_drawn_from(draw(small, prompt, **settings), probs)


def test_the_check_itself_tells_settings_apart(small: LLM, reference: Reference) -> None:
    prompt = prompt_of(reference)
    counts = draw(small, prompt, temperature=SHARP)
    for other in ({"temperature": SHARP * 0.8}, {"temperature": SHARP * 1.25}, {"temperature": SHARP, "top_p": 0.95}):
        with pytest.raises(AssertionError):
            assert_drawn_from(counts, expected(reference.logits(prompt), **other))


def test_temperature_zero_is_greedy_and_top_k_one_too(small: LLM, reference: Reference) -> None:
    prompt = prompt_of(reference)
    best = reference.greedy(prompt, 1)[0]
    assert draw(small, prompt, temperature=0.0) == {best: NUM_DRAWS}
    assert draw(small, prompt, temperature=5.0, top_k=1) == {best: NUM_DRAWS}
    assert draw(small, prompt, top_p=1e-6) == {best: NUM_DRAWS}
    assert draw(small, prompt, min_p=1.0) == {best: NUM_DRAWS}


def test_a_bias_shifts_the_distribution_as_it_says(small: LLM, reference: Reference) -> None:
    prompt = prompt_of(reference)
    logits = reference.logits(prompt).clone()
    bias = {5: 2.0, 6: -3.0, int(logits.argmax()): -1.0}
    for token, shift in bias.items():
        logits[token] += shift
    assert_drawn_from(draw(small, prompt, temperature=SHARP, logit_bias=bias), expected(logits, temperature=SHARP))


def test_only_allowed_tokens_come_and_banned_ones_never(small: LLM, reference: Reference) -> None:
    prompt = prompt_of(reference)
    logits = reference.logits(prompt)
    allowed = [1, 5, 9, 33, 64]
    only = torch.full_like(logits, -torch.inf)
    only[allowed] = logits[allowed]
    assert_drawn_from(draw(small, prompt, temperature=1.0, allowed_token_ids=allowed), expected(only))
    best = [int(i) for i in logits.topk(3).indices]
    without = logits.clone()
    without[best] = -torch.inf
    found = draw(small, prompt, temperature=SHARP, banned_token_ids=best)
    assert_drawn_from(found, expected(without, temperature=SHARP))


def greedy_with_penalties(
    reference: Reference, prompt: list[int], num_tokens: int, *, repetition: float, presence: float, frequency: float
) -> list[int]:
    """vLLM's definitions: repetition counts prompt and answer, presence and frequency the answer only."""
    answer: list[int] = []
    for _ in range(num_tokens):
        logits = reference.logits([*prompt, *answer])
        for token in {*prompt, *answer}:
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token, count in Counter(answer).items():
            logits[token] -= presence + frequency * count
        answer.append(int(logits.argmax()))
    return answer


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"),
    [(1.3, 0.0, 0.0), (0.7, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, 0.7), (1.2, 0.5, 0.5), (1.0, -2.0, -1.0)],
)
def test_penalties_are_the_references(
    small: LLM, reference: Reference, repetition: float, presence: float, frequency: float
) -> None:
    prompt = prompt_of(reference)
    names = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    (output,) = small.generate(prompt, exactly(20, **names), use_tqdm=False)
    wanted = greedy_with_penalties(reference, prompt, 20, repetition=repetition, presence=presence, frequency=frequency)
    assert output.outputs[0].token_ids == wanted
    assert wanted != reference.greedy(prompt, 20) or presence < 0, "the penalty changed nothing: a weak test"


def test_log_probabilities_are_the_references(small: LLM, reference: Reference) -> None:
    prompt = prompt_of(reference)
    (output,) = small.generate(prompt, SamplingParams(max_tokens=6, seed=9, logprobs=5), use_tqdm=False)
    (choice,) = output.outputs
    assert choice.logprobs is not None
    context = list(prompt)
    for entry in choice.logprobs:
        wanted = torch.log_softmax(reference.logits(context), -1)
        assert entry.logprob == pytest.approx(float(wanted[entry.token_id]), abs=1e-3)
        best = wanted.topk(5)
        assert [token for token, _, _ in entry.top] == best.indices.tolist()
        assert [value for _, _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        context.append(entry.token_id)
    assert context[len(prompt) :] == choice.token_ids


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others(small: LLM, reference: Reference) -> None:
    prompt = prompt_of(reference)

    def run(seed: int | None, batch: int = 1) -> tuple[list[int], int | None]:
        noise = [{"prompt_token_ids": reference.prompt(5 + i, 50 + i)} for i in range(batch - 1)]
        wishes = [SamplingParams(seed=seed, max_tokens=20), *[SamplingParams(max_tokens=9)] * (batch - 1)]
        outputs = small.generate([{"prompt_token_ids": prompt}, *noise], wishes, use_tqdm=False)
        return outputs[0].outputs[0].token_ids, outputs[0].seed

    alone, seed = run(7)
    assert seed == 7
    assert run(7, batch=30)[0] == alone
    assert run(8)[0] != alone
    drawn, seed = run(None)
    assert run(seed)[0] == drawn


def test_choices_of_a_seed_differ_and_are_the_same_again(small: LLM, reference: Reference) -> None:
    prompt = prompt_of(reference)
    wish = SamplingParams(n=8, seed=1, max_tokens=10)
    first, again = (small.generate(prompt, wish, use_tqdm=False)[0].outputs for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) == 8
    assert [c.seed for c in first] == list(range(1, 9))
    for choice in first:
        (alone,) = small.generate(prompt, SamplingParams(seed=choice.seed, max_tokens=10), use_tqdm=False)
        assert alone.outputs[0].token_ids == choice.token_ids


def test_an_answer_stops_at_a_stop_token_but_not_before_its_minimum(small: LLM, reference: Reference) -> None:
    prompt = prompt_of(reference)
    whole = reference.greedy(prompt, 20)
    stop = whole[4]
    first = whole.index(stop)
    params = {"temperature": 0.0, "max_tokens": 20, "stop_token_ids": [stop]}
    (output,) = small.generate(prompt, SamplingParams(**params), use_tqdm=False)
    assert output.outputs[0].token_ids == whole[: first + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    (output,) = small.generate(prompt, SamplingParams(min_tokens=12, **params), use_tqdm=False)
    tokens = output.outputs[0].token_ids
    assert len(tokens) >= 12
    assert stop not in tokens[:11]
