"""Each way of choosing a token: exact distributions, bans and penalties, and independence of the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from novainfer.fsm.messages.step import NO_TOKEN, SeqParams
from novainfer.kernels.cpu.levels import LEVELS, levels
from novainfer.kernels.cpu.sampling import NativeSampler
from novainfer.kernels.sampling.draw import draw
from novainfer.kernels.sampling.draw_row import draw_row
from novainfer.kernels.sampling.logits import apply_penalties
from novainfer.kernels.sampling.sampler import RowSampler, TorchSampler
from novainfer.kernels.sampling.uniform import uniforms
from novainfer.kernels.sampling.verify import Positions, Sampled
from tests.kernels.driver import seated
from tests.kernels.forced import use_level

CPU = torch.device("cpu")
VOCAB = 1300  # more than two segments, and a rest


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB, std: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * std


BEST = [level.name for level in levels()[:1]]
OTHERS = [level.name for level in LEVELS if level.name not in BEST]


@pytest.fixture(
    params=[*BEST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS), RowSampler.name, TorchSampler.name]
)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each sampler of the CPU, our own with each instruction set."""
    others = {sampler.name: sampler for sampler in (RowSampler, TorchSampler)}
    if request.param in others:
        return others[request.param]
    use_level(request.param, monkeypatch)
    return NativeSampler


def sample(kernel: Any, logits: torch.Tensor, *rows: SeqParams, position: int = 5, tokens: Any = None) -> Sampled:
    """One step of a fresh sampler, row i in slot i."""
    sampler = kernel.over(logits.shape[1], len(rows), 4096, CPU)
    for slot, row in enumerate(rows):
        sampler.admit(seated(slot, row, tokens))
    drawn: Sampled = sampler.draw(logits.clone(), Positions(range(len(rows)), [position] * len(rows))).read()
    return drawn


def expected_distribution(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The definition, in float64 and with a sort."""
    x = logits.double().numpy() / temperature
    p = np.exp(x - x.max())
    p[p < min_p] = 0
    if top_k:
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    order = np.lexsort((np.arange(len(p)), -p))
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


def chi_square_fits(counts: np.ndarray, p: np.ndarray) -> bool:
    """Whether the counts could come from p: a bound that a true sampler passes but once in about a million."""
    n = counts.sum()
    common = p * n >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(p[common] * n, p[~common].sum() * n)
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = max(1, len(observed) - 1)
    # Wilson and Hilferty: the cube root of chi-square over its freedom is close to normal.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return z < 4.9


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_k": 700},
    {"top_p": 0.8},
    {"top_p": 0.3},
    {"min_p": 0.02},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 2.5, "top_p": 0.95},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_exact_distribution(kernel: Any, filters: dict[str, Any]) -> None:
    logits = logits_of(1, vocab=1300)[0]
    p = expected_distribution(logits, **filters)
    sampler = kernel.over(VOCAB, 1, 40_000, CPU)
    row = SeqParams(slot=0, seed=7, **({"temperature": 1.0} | filters))
    sampler.admit(seated(0, row))
    counts = np.zeros(VOCAB)
    for first in range(0, 4000, 200):
        at = Positions([0] * 200, range(first, first + 200))
        np.add.at(counts, sampler.draw(logits.repeat(200, 1), at).read().token_ids, 1)
    assert counts[p == 0].sum() == 0, "a filtered token was drawn"
    assert chi_square_fits(counts, p)


def test_the_chi_square_bound_finds_a_wrong_distribution() -> None:
    p = expected_distribution(logits_of(1)[0])
    q = expected_distribution(logits_of(1)[0], temperature=1.1)
    counts = np.random.default_rng(0).multinomial(4000, q)
    assert not chi_square_fits(counts, p)
    assert chi_square_fits(np.random.default_rng(0).multinomial(4000, p), p)


@pytest.mark.parametrize("vocab", [1, 7, 64, 511, 512, 1025, 20_000])
def test_the_row_draw_is_the_batch_draw(vocab: int) -> None:
    logits = logits_of(2, rows=40, vocab=vocab).bfloat16().float()  # bf16: many ties
    rng = np.random.default_rng(3)
    u = torch.from_numpy(rng.random(40))
    u[0], u[1] = 0.0, 1.0 - 2.0**-53
    for top_k, top_p, min_p in [(0, 1.0, 0.0), (1, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.7, 0.0), (0, 0.999, 0.0),
                                (300, 0.6, 0.001), (0, 1e-9, 0.0), (0, 0.5, 0.3)]:  # fmt: skip
        params = SeqParams(slot=0, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
        batch = draw(logits.clone(), [params] * 40, u)
        rows = [draw_row(logits[i].numpy().copy(), params, float(u[i])) for i in range(40)]
        assert rows == batch.tolist(), (top_k, top_p, min_p)


def test_equal_tokens_are_kept_by_top_k_and_cut_by_id_in_top_p(kernel: Any) -> None:
    logits = torch.zeros(1, 10)
    k3 = {sample(kernel, logits, SeqParams(slot=0, temperature=1.0, top_k=3, seed=s)).token_ids[0] for s in range(300)}
    assert k3 == set(range(10))
    half = {
        sample(kernel, logits, SeqParams(slot=0, temperature=1.0, top_p=0.5, seed=s)).token_ids[0] for s in range(300)
    }
    assert half == set(range(5))
    # The token that crosses p stays: 0.5 is reached by the first, so 0.51 needs the second too.
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    crossed = {
        sample(kernel, logits, SeqParams(slot=0, temperature=1.0, top_p=0.51, seed=s)).token_ids[0] for s in range(300)
    }
    assert crossed == {0, 1}


def test_a_seeded_row_draws_the_same_token_in_any_batch(kernel: Any) -> None:
    logits = logits_of(4, rows=24, vocab=5000)
    rng = np.random.default_rng(5)
    rows = [
        SeqParams(
            slot=0,
            temperature=float(rng.choice([0.0, 0.5, 1.0, 3.0])),
            top_k=int(rng.choice([0, 3, 90, 400])),
            top_p=float(rng.choice([1.0, 0.9, 0.2])),
            min_p=float(rng.choice([0.0, 0.05])),
            seed=int(rng.integers(2**63)),
        )
        for i in range(24)
    ]
    together = sample(kernel, logits, *rows).token_ids
    assert [sample(kernel, logits[i : i + 1], rows[i]).token_ids[0] for i in range(24)] == together
    backwards = sample(kernel, logits.flip(0), *reversed(rows)).token_ids
    assert backwards == together[::-1]


def test_all_samplers_draw_alike(kernel: Any) -> None:
    rng = np.random.default_rng(9)

    def either(a: Any, b: Any) -> Any:
        return a if rng.random() < 0.6 else b

    for dtype in (torch.float32, torch.bfloat16):
        logits = logits_of(10, rows=30, vocab=900).to(dtype)
        rows = [
            SeqParams(
                slot=0,
                temperature=either(0.0, 1.3),
                top_k=either(0, 30),
                top_p=either(1.0, 0.7),
                min_p=either(0.0, 0.01),
                repetition_penalty=either(1.0, 1.4),
                presence_penalty=either(0.0, 0.7),
                frequency_penalty=either(0.0, -0.3),
                seed=i,
                num_prompt_tokens=2,
                min_position=either(0, 7),
                stop_token_ids=either([], [int(logits[i].argmax())]),
                logit_bias=either({}, {int(t): 4.0 for t in rng.integers(900, size=5)}),
                allowed_token_ids=either(None, rng.permutation(900)[:300].tolist()),
                banned_token_ids=either([], rng.integers(900, size=20).tolist()),
                logprobs=either(None, 3),
            )
            for i in range(30)
        ]
        history = [rng.integers(900, size=6).tolist() for _ in rows]
        results = []
        for sampling in (kernel, TorchSampler):
            sampler = sampling.over(900, 30, 64, CPU)
            for slot, row in enumerate(rows):
                sampler.admit(seated(slot, row, history[slot]))
            steps = [sampler.draw(logits.clone(), Positions(range(30), [at] * 30)).read() for at in (6, 7, 8)]
            results.append(([step.token_ids for step in steps], [step.logprobs for step in steps]))
        assert results[0][0] == results[1][0]
        assert_alike(results[0][1], results[1][1])
        assert len({tuple(tokens) for tokens in results[0][0]}) > 1


def assert_alike(got: list[list[Any]], expected: list[list[Any]]) -> None:
    """Log probabilities of the same tokens, in sums of another order."""
    for step, right_step in zip(got, expected, strict=True):
        for entry, right in zip(step, right_step, strict=True):
            assert (entry is None) == (right is None)
            if entry is not None:
                assert entry[1] == right[1]
                assert [entry[0], *entry[2]] == pytest.approx([right[0], *right[2]], abs=1e-5)


def test_uniforms_differ_by_seed_and_position_and_are_uniform() -> None:
    assert uniforms([1], [5]).tolist() == uniforms([9, 1], [5, 5]).tolist()[1:]
    n = 50_000
    for arguments in (
        (range(n), [0] * n),
        (range(2**40, 2**40 + n), [7] * n),
        ([3] * n, range(n)),
    ):
        u = uniforms(*arguments)
        assert len(set(u.tolist())) == n
        assert u.min() >= 0
        assert u.max() < 1
        assert chi_square_fits(np.histogram(u, 256, (0, 1))[0], np.full(256, 1 / 256))
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
    # A seed counts by its lowest 64 bits; the value is a promise to users.
    assert uniforms([-1], [0]) == uniforms([2**64 - 1], [0])
    assert uniforms([42], [7])[0] == 0.6424233675512125


def test_greedy_takes_the_first_of_equals_also_where_all_are_negative(kernel: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([[-3.0, -1.0, -1.0], [0.0, 2.0, 2.0], [-0.0, 0.0, -5.0]], dtype=dtype)
        assert sample(kernel, logits, *[SeqParams(slot=0)] * 3).token_ids == [1, 1, 0]
        assert [sample(kernel, row[None], SeqParams(slot=0)).token_ids for row in logits] == [[1], [1], [0]]
    almost_greedy = SeqParams(slot=0, temperature=1e-6)  # divided by it, the second logit would be infinite
    assert sample(kernel, torch.tensor([[0.0, 1e35]]), almost_greedy).token_ids == [1]


def test_banned_allowed_and_biased_tokens(kernel: Any) -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    assert sample(kernel, logits, SeqParams(slot=0, banned_token_ids=[0, 1])).token_ids == [2]
    assert sample(kernel, logits, SeqParams(slot=0, allowed_token_ids=[4, 3])).token_ids == [3]
    assert sample(kernel, logits, SeqParams(slot=0, allowed_token_ids=[0, 3], banned_token_ids=[0])).token_ids == [3]
    assert sample(kernel, logits, SeqParams(slot=0, logit_bias={4: 10.0, 0: -1.0})).token_ids == [4]
    assert sample(kernel, logits, SeqParams(slot=0, logit_bias={4: 10.0}, allowed_token_ids=[2])).token_ids == [2]
    banned = [SeqParams(slot=0, temperature=9.0, banned_token_ids=[2], seed=s) for s in range(200)]
    drawn = {sample(kernel, logits, row).token_ids[0] for row in banned}
    assert drawn == {0, 1, 3, 4}


def test_stop_tokens_are_banned_until_their_position(kernel: Any) -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    row = SeqParams(slot=0, stop_token_ids=[0], min_position=6)
    assert sample(kernel, logits, row, position=5).token_ids == [1]
    assert sample(kernel, logits, row, position=6).token_ids == [0]
    for others in ({"allowed_token_ids": [1]}, {"banned_token_ids": [0, 2]}):  # something must be drawn
        only = SeqParams(slot=0, stop_token_ids=[1], min_position=6, **others)
        assert sample(kernel, logits, only, position=5).token_ids == [1]


def test_penalties_are_those_of_transformers_and_openai() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = logits_of(6, vocab=50)
    tokens = [3, 3, 7, 11, 3, 9]
    row = SeqParams(slot=0, repetition_penalty=1.7, num_prompt_tokens=2, logprobs=None, temperature=1.0)
    processor = RepetitionPenaltyLogitsProcessor(penalty=1.7)
    expected = processor(torch.tensor([tokens]), logits.clone())
    got = penalised(logits, row, tokens)
    assert torch.allclose(got, expected)
    row = SeqParams(slot=0, presence_penalty=0.5, frequency_penalty=0.25, num_prompt_tokens=2)
    expected = logits.clone()
    for token_id, count in {7: 1, 11: 1, 3: 1, 9: 1}.items():  # the prompt's two 3s do not count
        expected[0, token_id] -= 0.5 + 0.25 * count
    assert torch.allclose(penalised(logits, row, tokens), expected)


def penalised(logits: torch.Tensor, row: SeqParams, tokens: list[int]) -> torch.Tensor:
    """The logits as the oracle draws from them."""
    found = logits.clone()
    apply_penalties(found[0], row, torch.tensor(tokens))
    return found


def test_sampled_tokens_join_the_history_and_a_repeated_step_overwrites_them(kernel: Any) -> None:
    sampler = kernel.over(6, 2, 64, CPU)
    row = SeqParams(slot=0, frequency_penalty=2.0, num_prompt_tokens=1)
    sampler.admit(seated(1, row, [0]))
    logits = torch.tensor([[0.0, 3.0, 2.5, 0.0, 0.0, 0.0]])
    drawn = [sampler.draw(logits.clone(), Positions([1], [position])).read().token_ids[0] for position in (1, 2, 3)]
    assert drawn == [1, 2, 1]
    # A rolled-back step is computed again at its own position: what it had written does not count twice.
    assert sampler.draw(logits.clone(), Positions([1], [2])).read().token_ids == [2]
    assert sampler.draw(logits.clone(), Positions([1], [3])).read().token_ids == [1]
    sampler.admit(seated(1, row, [0, 1, 1, 1]))  # the slot's next owner knows nothing of the last one
    assert sampler.draw(logits.clone(), Positions([1], [4])).read().token_ids == [2]


def test_logprobs_are_those_of_the_raw_logits(kernel: Any) -> None:
    logits = logits_of(8, rows=3)
    rows = [
        SeqParams(slot=0, logprobs=4, temperature=2.0, top_k=2, seed=1, banned_token_ids=[int(logits[0].argmax())]),
        SeqParams(slot=0),
        SeqParams(slot=0, logprobs=0),
    ]
    sampled = sample(kernel, logits, *rows)
    exact = logits.double().log_softmax(1)
    assert sampled.logprobs[1] is None
    for i, count in ((0, 4), (2, 0)):
        entry = sampled.logprobs[i]
        assert entry is not None
        logprob, ids, values = entry
        assert logprob == pytest.approx(float(exact[i, sampled.token_ids[i]]), abs=1e-5)
        top = exact[i].topk(count) if count else None
        assert ids == (top.indices.tolist() if top is not None else [])
        assert values == pytest.approx(top.values.tolist() if top is not None else [], abs=1e-5)
    (greedy,) = sample(kernel, logits[:1], SeqParams(slot=0, logprobs=1)).logprobs
    assert greedy is not None
    assert greedy[0] == greedy[2][0]  # one number, whichever way it is told
    assert sample(kernel, logits, *[SeqParams(slot=0)] * 3).logprobs == []


NAN, INF = float("nan"), float("inf")
FAULTS = {
    "all NaN": lambda row: row.fill_(NAN),
    "one NaN": lambda row: row.index_fill_(0, torch.tensor([VOCAB - 2]), NAN),
    "one NaN with the sign bit": lambda row: row.index_fill_(0, torch.tensor([3]), -NAN),
    "infinity": lambda row: row.index_fill_(0, torch.tensor([700]), INF),
    "only minus infinity": lambda row: row.fill_(-INF),
}
WAYS: list[SeqParams] = [
    SeqParams(slot=0),
    SeqParams(slot=0, banned_token_ids=[5]),
    SeqParams(slot=0, logprobs=2),
    SeqParams(slot=0, temperature=1.0),
    SeqParams(slot=0, temperature=1.0, top_k=20),
    SeqParams(slot=0, temperature=0.7, top_p=0.9, min_p=0.01, logprobs=0),
    SeqParams(slot=0, temperature=1.0, top_k=50, top_p=0.9),
    SeqParams(slot=0, temperature=1.2, repetition_penalty=1.3),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_that_is_not_a_number_gets_no_token_and_the_others_get_theirs(
    kernel: Any, fault: str, dtype: torch.dtype
) -> None:
    whole = logits_of(30, rows=3).to(dtype)
    broken = whole.clone()
    FAULTS[fault](broken[1])
    for row in WAYS:
        results = []
        for logits in (whole, broken):
            sampler = kernel.over(VOCAB, 3, 64, CPU)
            for slot in range(3):
                sampler.admit(seated(slot, row, [1, 2]))
            results.append(sampler.draw(logits.clone(), Positions(range(3), [5] * 3)).read())
        expected, found = results
        assert found.token_ids == [expected.token_ids[0], NO_TOKEN, expected.token_ids[2]], row
        if row.logprobs is not None:
            assert found.logprobs == [expected.logprobs[0], None, expected.logprobs[2]]


def test_logits_too_large_for_their_temperature_give_no_token(kernel: Any) -> None:
    logits = logits_of(31)
    logits[0, 9] = 3e38
    assert sample(kernel, logits, SeqParams(slot=0, temperature=0.5)).token_ids == [NO_TOKEN]
