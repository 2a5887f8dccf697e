"""The sampler in C++ against the definition in double precision, at the sizes and ties where its shortcuts end.

Its weights are rounded otherwise than the definition's, so a draw may differ where the random number falls within
rounding of the border of two tokens, and nowhere else: `TOLERANCE` of the whole mass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from forced import use_level
from torch import Tensor

from novainfer.fsm.messages.step import NO_TOKEN, SeqParams
from novainfer.kernels.cpu import sampling
from novainfer.kernels.cpu.levels import levels
from novainfer.kernels.cpu.sampling import NativeSampler
from novainfer.kernels.masks import Masks, packed_mask
from novainfer.kernels.sampling.sampler import TorchSampler
from novainfer.kernels.sampling.uniform import uniforms
from novainfer.kernels.sampling.verify import Positions, Sampled

CPU = torch.device("cpu")
TOLERANCE = 2e-6
POSITION = 6
DTYPES = [torch.float32, torch.bfloat16]


def logits_of(seed: int, rows: int, vocab: int, dtype: torch.dtype = torch.float32, std: float = 3.0) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * std).to(dtype)


def zipf(seed: int, rows: int, vocab: int, slope: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """The k-th most likely token has a probability of k to the minus `slope`: 1 is a model that is not sure."""
    ranks = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(seed)).argsort(1) + 1
    return (-slope * ranks.log()).to(dtype)


def over(rows: Sequence[SeqParams], vocab: int, tokens: Sequence[list[int]] | None = None, kernel: Any = None) -> Any:
    sampler = (kernel or NativeSampler).over(vocab, len(rows), 64, CPU)
    for slot, row in enumerate(rows):
        sampler.admit(msgspec.structs.replace(row, slot=slot, token_ids=tokens[slot] if tokens else None))
    return sampler


def drawn(logits: Tensor, rows: Sequence[SeqParams], tokens: Sequence[list[int]] | None = None) -> Sampled:
    found: Sampled = over(rows, logits.shape[1], tokens).draw(logits, at(len(rows))).read()
    return found


def at(num_rows: int) -> Positions:
    return Positions(range(num_rows), [POSITION] * num_rows)


def kept_weights(x: npt.NDArray[np.float32], row: SeqParams, top_p: float, min_p: float) -> npt.NDArray[np.float64]:
    """The definition, with a sort: 0 for tokens that are filtered."""
    temperature = np.float32(row.temperature)
    weights: npt.NDArray[np.float64] = np.exp((x / temperature - x.max() / temperature).astype(np.float64))
    if 0 < row.top_k < len(x):
        weights[x < np.sort(x)[-row.top_k]] = 0.0
    weights[weights < min_p] = 0.0
    if top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        sums = weights[order].cumsum()
        weights[order[sums - weights[order] >= top_p * sums[-1]]] = 0.0
    return weights


def assert_drawn(logits: Tensor, rows: Sequence[SeqParams], token_ids: Sequence[int]) -> None:
    """Each is the token of the definition, or one that rounding may give in its place."""
    u = uniforms([row.seed for row in rows], [POSITION] * len(rows))
    num_equal = 0
    for x, row, number, token in zip(logits.float().numpy(), rows, u, token_ids, strict=True):
        sums = kept_weights(x, row, row.top_p, row.min_p).cumsum()
        if token == np.searchsorted(sums, number * sums[-1], side="right"):
            num_equal += 1
            continue
        is_near = False
        for by in (1.0, 1.0 - TOLERANCE, 1.0 + TOLERANCE):
            for min_by in (1.0, 1.0 - TOLERANCE, 1.0 + TOLERANCE) if row.min_p else (1.0,):
                weights = kept_weights(x, row, row.top_p * by if row.top_p < 1 else 1.0, row.min_p * min_by)
                sums = weights.cumsum()
                ends = [
                    np.searchsorted(sums, (number + shift) * sums[-1], side="right")
                    for shift in (-TOLERANCE, TOLERANCE)
                ]
                is_near |= bool(weights[token] > 0 and ends[0] <= token <= ends[1])
        assert is_near, (row, token, int(np.searchsorted(sums, number * sums[-1], side="right")))
    assert num_equal >= 0.99 * len(rows)


WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 4.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 20, "temperature": 0.7, "top_p": 0.8},
    {"top_k": 700},
    {"top_k": 700, "top_p": 0.95, "min_p": 0.001, "temperature": 2.0},
    {"top_k": 10**18},
    {"top_p": 1e-300},
    {"top_p": 0.3},
    {"top_p": 0.95, "temperature": 3.0},
    {"top_p": 0.999999},
    {"min_p": 0.02},
    {"min_p": 1e-4, "temperature": 3.0},
    {"min_p": 1.0},
    {"min_p": 1e-40},
]


def rows_of(num_seeds: int, ways: Sequence[dict[str, Any]] = WAYS) -> list[SeqParams]:
    return [SeqParams(slot=0, seed=seed, **({"temperature": 1.0} | way)) for way in ways for seed in range(num_seeds)]


# ---- each way to draw ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 15, 17, 300, 4096, 4097, 9001])
def test_every_way_to_draw_is_the_definition(vocab: int, dtype: torch.dtype) -> None:
    """Of rows that end within a vector and within a chunk; bf16 has many ties."""
    rows = rows_of(8)
    logits = logits_of(vocab, len(rows), vocab, dtype)
    assert_drawn(logits, rows, drawn(logits, rows).token_ids)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slope", [0.3, 1.0, 2.0])
def test_a_vocabulary_of_qwens_size_is_drawn_from_by_the_definition(slope: float, dtype: torch.dtype) -> None:
    ways = [
        {},
        WAYS[5],
        {"top_p": 0.95},
        {"top_p": 0.5},
        {"top_p": 0.9, "min_p": 1e-5},
        {"top_k": 40_000, "top_p": 0.9},
    ]
    rows = rows_of(2, ways)
    logits = zipf(1, len(rows), 151_936, slope, dtype)
    assert_drawn(logits, rows, drawn(logits, rows).token_ids)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("values", [1, 2, 3, 40])
def test_the_first_of_tied_tokens_stay(values: int) -> None:
    """So few values that each is tied with thousands, and a nucleus ends within them."""
    ways: list[dict[str, Any]] = [{"top_p": p} for p in (1e-9, 0.2, 0.5, 0.77, 0.999)]
    ways += [{"top_k": k} for k in (3, 500, 5000)]
    rows = rows_of(4, ways)
    chance = torch.Generator().manual_seed(values)
    logits = torch.randint(values, (len(rows), 13_000), generator=chance) / 4.0
    assert_drawn(logits, rows, drawn(logits, rows).token_ids)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("top_p", "count"), [(0.5, 2), (0.5 + 2**-45, 3), (0.25 + 2**-46, 2), (1 - 2**-46, 4)])
def test_a_nucleus_ends_with_the_token_that_reaches_it_to_the_bit(top_p: float, count: int) -> None:
    """Four tokens share all of the mass: half of it is two of them, and anything more than half a third one."""
    logits = torch.full((96, 40), -90.0)
    logits[:, [3, 9, 20, 33]] = 1.0
    tokens = drawn(logits, rows_of(96, [{"top_p": top_p}])).token_ids
    assert set(tokens) == {3, 9, 20, 33} - {*[3, 9, 20, 33][count:]}


@pytest.mark.usefixtures("level")
def test_a_nucleus_is_found_however_its_weights_lie() -> None:
    """Where the sample misleads: a few large ones, weights that fall by powers, two heaps, a token alone."""
    vocab = 20_000
    number = torch.arange(vocab, dtype=torch.float32)
    shapes = [
        torch.where(number < 3, 9.0, 0.0),
        -number / 700,
        -number.flip(0) / 50,
        torch.where(number % 2 == 0, 0.0, -8.0) + number / vocab / 100,
        torch.where(number == 12_345, 0.0, -60.0),
        torch.where(number == 12_345, 12.0, number / vocab / 1000),
        torch.where(number % 79 == 0, 5.0, 0.0),  # 79 is how far the sample's places lie apart, about
    ]
    rows = rows_of(6, [{"top_p": 0.1}, {"top_p": 0.6}, {"top_p": 0.97}, {"top_k": 9000}])
    for shape in shapes:
        logits = shape.repeat(len(rows), 1)
        assert_drawn(logits, rows, drawn(logits, rows).token_ids)


@pytest.mark.usefixtures("level")
def test_random_numbers_have_the_bits_of_uniform() -> None:
    """Where all tokens weigh the same, the token is the leading bits of the number, since sums are exact."""
    vocab = 1 << 15
    seeds = [0, 1, 42, 2**31, 2**32 + 5, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63), 2**70 + 3]
    positions = [0, 1, 7, 64, 5, 9, 31, 3, 0, 1, 2]
    sampler = over([SeqParams(slot=0, temperature=1.0, seed=seed) for seed in seeds], vocab)
    found = sampler.draw(torch.zeros(len(seeds), vocab), Positions(range(len(seeds)), positions)).read().token_ids
    assert found == (uniforms(seeds, positions) * vocab).astype(int).tolist()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_finds_the_first_of_the_largest_wherever_it_lies(dtype: torch.dtype) -> None:
    for vocab in (1, 16, 33, 4096, 8195):
        places = sorted({0, vocab // 3, vocab // 2, vocab - 1})
        logits = logits_of(5, len(places), vocab, dtype) - 100.0
        for row, place in zip(logits, places, strict=True):
            row[[place, vocab - 1]] = -50.0
        assert drawn(logits, [SeqParams(slot=0)] * len(places)).token_ids == places
    zeros = torch.tensor([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0], [-1.0, -0.0, 0.0]], dtype=dtype)
    assert drawn(zeros, [SeqParams(slot=0)] * 3).token_ids == [0, 0, 1]


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probabilities_are_those_of_double_precision(dtype: torch.dtype) -> None:
    vocab = 9001
    logits = logits_of(7, 4, vocab, dtype)
    logits[3] = 1.5  # all tied: the first ids are the most likely
    counts = [5, 0, vocab, 3]
    rows = [SeqParams(slot=0, logprobs=count, temperature=1.0, seed=3) for count in counts]
    found = drawn(logits, rows)
    exact = logits.double().log_softmax(1)
    for row, count, token, entry in zip(exact, counts, found.token_ids, found.logprobs, strict=True):
        assert entry is not None
        order = torch.argsort(row, descending=True, stable=True)[:count]
        assert entry[1] == order.tolist()
        assert [entry[0], *entry[2]] == pytest.approx([float(row[token]), *row[order].tolist()], abs=1e-6)


# ---- what changes logits ---------------------------------------------------------------------------------------------


def random_rows(seed: int, count: int, vocab: int) -> tuple[list[SeqParams], list[list[int]]]:
    rng = np.random.default_rng(seed)

    def either(a: Any, b: Any) -> Any:
        return a if rng.random() < 0.6 else b

    rows = [
        SeqParams(
            slot=0,
            temperature=either(1.3, 0.0),
            top_k=either(0, int(rng.choice([20, 100]))),
            top_p=either(1.0, 0.7),
            min_p=either(0.0, 0.01),
            repetition_penalty=either(1.0, float(rng.choice([0.7, 1.4]))),
            presence_penalty=either(0.0, 0.7),
            frequency_penalty=either(0.0, -0.3),
            seed=int(rng.integers(2**63)),
            num_prompt_tokens=2,
            min_position=either(0, 7),
            stop_token_ids=either([], rng.integers(vocab, size=2).tolist()),
            logit_bias=either({}, {int(t): 4.0 for t in rng.integers(vocab, size=5)}),
            allowed_token_ids=either(None, rng.permutation(vocab)[: vocab // 3].tolist()),
            banned_token_ids=either([], rng.integers(vocab, size=300).tolist()),
            logprobs=either(None, int(rng.integers(21))),
        )
        for _ in range(count)
    ]
    return rows, [rng.choice(rng.integers(vocab, size=4), size=6).tolist() for _ in range(count)]  # some of them twice


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_everything_at_once_is_torchs(seed: int, dtype: torch.dtype) -> None:
    """Steps one after the other, so that what was drawn counts; then some again, and the slots' next sequences."""
    vocab, count = 5003, 24
    logits = logits_of(seed, count, vocab, dtype)
    ours, reference = None, None
    for owner in (0, 1):
        rows, tokens = random_rows(100 * seed + owner, count, vocab)
        if ours is None:
            ours, reference = over(rows, vocab, tokens), over(rows, vocab, tokens, TorchSampler)
        for sampler in (ours, reference):
            for slot in range(count):
                sampler.admit(msgspec.structs.replace(rows[slot], slot=slot, token_ids=tokens[slot]))
        for position in (6, 7, 8, 7, 8):  # rolled back to 7: nothing is counted twice
            where = Positions(list(range(count))[::-1], [position] * count)
            got, expected = (sampler.draw(logits.clone(), where).read() for sampler in (ours, reference))
            assert got.token_ids == expected.token_ids
            for own, right in zip(got.logprobs, expected.logprobs, strict=True):
                assert (own is None) == (right is None)
                if own is not None:
                    assert own[1] == right[1]
                    assert [own[0], *own[2]] == pytest.approx([right[0], *right[2]], abs=1e-5)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_holds_for_its_row_and_one_draw(dtype: torch.dtype) -> None:
    """On each instruction set, with rows whose ends lie within a vector and within a word."""
    vocab, count = 1103, 12
    rng = np.random.default_rng(3)
    allowed = [sorted(rng.permutation(vocab)[: int(rng.integers(300, 1000))].tolist()) for _ in range(count)]
    masked = [i for i in range(count) if i % 3]
    masks = Masks(masked, np.stack([packed_mask(allowed[i], vocab) for i in masked]))
    rows, tokens = random_rows(5, count, vocab)
    rows = [msgspec.structs.replace(row, stop_token_ids=[]) for row in rows]
    logits = logits_of(6, count, vocab, dtype)
    restricted = logits.clone()
    for i in masked:
        restricted[i] = -torch.inf
        restricted[i, allowed[i]] = logits[i, allowed[i]]
    plain = over(rows, vocab, tokens)
    got = plain.draw(logits.clone(), at(count)._replace(masks=masks)).read()
    assert got == drawn(restricted, rows, tokens)
    assert NO_TOKEN not in got.token_ids
    free = over(rows, vocab, tokens)
    free.draw(logits, at(count))
    assert plain.draw(logits, at(count)).read() == free.draw(logits, at(count)).read()


@pytest.mark.usefixtures("level")
def test_logits_stay_as_they_were_and_their_rows_may_lie_apart() -> None:
    rows, tokens = random_rows(8, 9, 700)
    wide = logits_of(9, 9, 900)
    before = wide.clone()
    assert drawn(wide[:, :700], rows, tokens) == drawn(wide[:, :700].clone(), rows, tokens)
    assert torch.equal(wide, before)


# ---- in any company, on any machine ----------------------------------------------------------------------------------


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads() -> None:
    vocab, count = 9001, 30
    rows, tokens = random_rows(11, count, vocab)
    logits = zipf(12, count, vocab, 1.0)
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(drawn(logits, rows, tokens))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]
    sampler = over(rows, vocab, tokens)
    for slot in range(count):
        alone = sampler.draw(logits[slot : slot + 1], Positions([slot], [POSITION])).read()
        assert alone.token_ids == found[0].token_ids[slot : slot + 1]
        assert (alone.logprobs or [None]) == found[0].logprobs[slot : slot + 1]


@pytest.mark.slow
def test_every_instruction_set_draws_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(3, [way | {"logprobs": 3} for way in WAYS])
    logits = zipf(13, len(rows), 9001, 1.0, torch.bfloat16)
    found = []
    for level in levels():
        use_level(level.name, monkeypatch)
        found.append(drawn(logits, rows))
    assert all(other == found[0] for other in found)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_lies_outside_of_its_bounds_is_refused() -> None:
    sampler, logits = over([SeqParams(slot=0)], 50), torch.zeros(1, 50)
    for where in (
        Positions([1], [3]), Positions([-1], [3]), Positions([0], [65]), Positions([0], [-1]),
        Positions([0], [3], [50]), Positions([0], [3], [-2]),
    ):  # fmt: skip
        with pytest.raises(IndexError):
            sampler.draw(logits, where)
    for wrong in (torch.zeros(2, 50), torch.zeros(1, 51), torch.zeros(50, 2).t()):
        with pytest.raises(ValueError, match=r"logits must be \[1, 50\]"):
            sampler.draw(wrong, at(1))
    for words in (np.zeros((1, 3), np.int32), np.zeros((1, 2), np.int64), np.zeros((2, 2), np.int32)):
        with pytest.raises(ValueError, match=r"masks must be int32 \[1, 2\]"):
            sampler.draw(logits, at(1)._replace(masks=Masks([0], words)))
    for row in (
        SeqParams(slot=1), SeqParams(slot=0, banned_token_ids=[50]), SeqParams(slot=0, stop_token_ids=[-1]),
        SeqParams(slot=0, logit_bias={50: 1.0}), SeqParams(slot=0, allowed_token_ids=[50]),
        SeqParams(slot=0, repetition_penalty=1.1, token_ids=[50]), SeqParams(slot=0, repetition_penalty=1.1),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must be|need the tokens"):
            sampler.admit(row)
    assert sampling.NativeSampler.refuses(1 << 22, CPU) == "a vocabulary of 4194304 is more than 2097152"
