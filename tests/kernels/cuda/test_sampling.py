"""Triton's sampler draws what the CPU's draws: each parameter, ties, numbers that are none, drafts, repeated steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from novainfer.fsm.messages.step import NO_TOKEN, NONE_ALLOWED, SeqParams
from novainfer.kernels.cuda.jit import draws
from novainfer.kernels.cuda.jit.records import FLAGS, POSITION
from novainfer.kernels.cuda.sampler import CANDIDATES, GUESS, TritonSampler
from novainfer.kernels.masks import Masks, packed_mask
from novainfer.kernels.sampling.sampler import RowSampler, TorchSampler
from novainfer.kernels.sampling.uniform import uniforms
from novainfer.kernels.sampling.verify import Positions, Sampled
from tests.kernels.checkpoints import Shape, save_checkpoint
from tests.kernels.driver import Driver, backend_registry, make_runner

CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def logits_of(seed: int, rows: int, vocab: int, dtype: torch.dtype = torch.float32, std: float = 3.0) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * std).to(dtype)


def samplers(
    rows: Sequence[SeqParams], vocab: int, device: torch.device, tokens: Sequence[list[int]] | None = None
) -> tuple[TritonSampler, RowSampler]:
    """Both with row i in slot i, or where it says itself."""
    found = TritonSampler.over(vocab, len(rows) + 2, 64, device), RowSampler.over(vocab, len(rows) + 2, 64, CPU)
    for slot, row in enumerate(rows):
        for sampler in found:
            sampler.admit(msgspec.structs.replace(row, slot=slot, token_ids=tokens[slot] if tokens else None))
    return found


def assert_alike(got: Sampled, expected: Sampled, rows: Sequence[SeqParams] | None = None) -> None:
    differ = [i for i, pair in enumerate(zip(got.token_ids, expected.token_ids, strict=True)) if pair[0] != pair[1]]
    assert not differ, [(i, got[0][i], expected[0][i], rows and rows[i]) for i in differ]
    assert bool(got.logprobs) == bool(expected.logprobs)
    for own, right in zip(got.logprobs, expected.logprobs, strict=True):
        assert (own is None) == (right is None)
        if own is not None and right is not None:
            assert own[1] == right[1]
            assert [own[0], *own[2]] == pytest.approx([right[0], *right[2]], abs=1e-5)


def check(
    logits: Tensor, rows: Sequence[SeqParams], device: torch.device, tokens: Sequence[list[int]] | None = None
) -> Sampled:
    """Both draw the same; what that is."""
    ours, reference = samplers(rows, logits.shape[1], device, tokens)
    at = Positions(range(len(rows)), [6] * len(rows))
    got, expected = ours.draw(logits.to(device), at).read(), reference.draw(logits.clone(), at).read()
    assert_alike(got, expected, rows)
    return got


# ---- one by one ------------------------------------------------------------------------------------------------------


@triton.jit
def put_uniforms(seeds, positions, out):
    at = tl.program_id(0)
    tl.store(out + at, draws.uniform(tl.load(seeds + at), tl.load(positions + at)))


def test_random_numbers_have_the_bits_of_the_cpus(device: torch.device) -> None:
    seeds = [0, 1, 42, 2**31, 2**32 + 5, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)]
    positions = [0, 1, 7, 2**31 - 1, 5, 9, 100_000, 3, 0, 1]
    words = np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64).view(np.int64)
    out = torch.zeros(len(seeds), dtype=torch.float64, device=device)
    put_uniforms[len(seeds),](torch.from_numpy(words).to(device), torch.tensor(positions, device=device), out)
    assert out.tolist() == uniforms(seeds, positions).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 300, 1025, 5003])
def test_greedy_takes_the_first_of_the_largest(dtype: torch.dtype, vocab: int, device: torch.device) -> None:
    logits = logits_of(1, 12, vocab, dtype)
    logits[0] = 1.0
    logits[1] = -1.0
    logits[2, [vocab // 2, vocab - 1]] = 50.0
    logits[3] = -0.0
    logits[3, vocab // 3] = 0.0
    logits[4] = -INF
    logits[5, vocab - 1] = INF
    logits[6, vocab // 2] = NAN
    logits[7, 0] = -NAN
    logits[8] = -INF
    logits[8, vocab // 2] = -3.0
    for rows in ([SeqParams(slot=0)] * 12, [SeqParams(slot=0)] * 11 + [SeqParams(slot=0, banned_token_ids=[0])]):
        found = check(logits, rows, device).token_ids  # alone, and beside a row that takes the long way
        assert found[4:8] == [NO_TOKEN] * 4
        assert found[8] == vocab // 2
        assert found[:4] == [0, 0, vocab // 2, 0]


WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": GUESS},
    {"top_k": GUESS + 1},
    {"top_k": 700},
    {"top_k": 10**6},
    {"top_p": 0.8},
    {"top_p": 0.3, "temperature": 0.5},
    {"top_p": 1e-9},
    {"top_p": 0.999999},
    {"min_p": 0.02},
    {"min_p": 1e-4, "temperature": 3.0},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 2.0, "top_k": 300, "top_p": 0.95},
    {"temperature": 2.0, "top_k": 300, "top_p": 0.95, "min_p": 0.001},
    {"temperature": 4.0, "top_p": 0.95},
]


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(299, torch.float32), (2503, torch.float16), (5003, torch.bfloat16)], ids=str
)
def test_every_way_to_draw_is_the_cpus(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Half-precision logits have many ties."""
    logits = logits_of(2, len(WAYS), vocab, dtype)
    rows = [SeqParams(slot=0, seed=seed, **({"temperature": 1.0} | way)) for seed, way in enumerate(WAYS)]
    check(logits, rows, device)


@pytest.mark.parametrize("vocab", [40, 1101])
def test_tied_logits_are_cut_as_on_the_cpu(vocab: int, device: torch.device) -> None:
    """All alike, few values, and ties where top_k and top_p cut."""
    ways: list[dict[str, Any]] = [
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_p": 0.51, "top_k": 30},
        {"min_p": 0.5},
        {"top_k": 90},
    ]
    rows = [SeqParams(slot=0, temperature=1.0, seed=seed, **way) for way in ways for seed in range(2)]
    few = logits_of(3, len(rows), vocab).round() / 2
    check(few, rows, device)
    check(torch.zeros(len(ways), vocab), rows[::2], device)


def test_stop_ids_are_back_where_nothing_else_is_left_but_no_banned_ones(device: torch.device) -> None:
    logits = torch.zeros(2, 1100)
    logits[:, 3], logits[:, 4] = 5.0, 4.0
    few = SeqParams(slot=0, min_position=9, stop_token_ids=[3, 4], allowed_token_ids=[3, 4])
    assert check(logits, [few, msgspec.structs.replace(few, banned_token_ids=[3])], device).token_ids == [3, 4]


def test_stop_ids_are_banned_before_their_position_and_not_at_it(device: torch.device) -> None:
    """`check` draws at position 6."""
    logits = torch.zeros(2, 1100)
    logits[:, 3], logits[:, 4] = 5.0, 4.0
    rows = [SeqParams(slot=0, min_position=at, stop_token_ids=[3], logprobs=0) for at in (6, 7)]
    assert check(logits, rows, device).token_ids == [3, 4]


def test_of_tied_logits_the_first_is_the_most_likely_also_where_logits_are_edited_or_reported(
    device: torch.device,
) -> None:
    """Two in one chunk, and one in the chunk behind it."""
    logits = torch.zeros(4, 1100)
    logits[:, [40, 30, 1050]] = 2.0
    rows = [SeqParams(slot=0), SeqParams(slot=0, logprobs=0), SeqParams(slot=0, logit_bias={5: 0.5})]
    rows.append(SeqParams(slot=0, banned_token_ids=[7]))
    assert check(logits, rows, device).token_ids == [30] * 4


@pytest.mark.parametrize("others", [-INF, -200.0], ids=["in pairs", "in passes"])
def test_what_begins_where_the_nucleus_is_full_is_not_in_it(others: float, device: torch.device) -> None:
    """Four tokens of a quarter each: the third begins at a half."""
    logits = torch.full((24, 1100), others)
    logits[:, [3, 7, 900, 1000]] = 0.0
    rows = [SeqParams(slot=0, temperature=1.0, top_p=0.5, seed=seed) for seed in range(24)]
    assert set(check(logits, rows, device).token_ids) == {3, 7}


def test_of_tied_logits_the_first_ids_are_kept_also_before_larger_ones(device: torch.device) -> None:
    """Too many for a comparison in pairs: 100 large logits behind 300 tied ones, of which 72 fill the nucleus."""
    logits = torch.zeros(12, 400)
    logits[:, 300:] = 1.0
    rows = [SeqParams(slot=0, temperature=1.0, top_p=0.6, seed=seed) for seed in range(12)]
    found = check(logits, rows, device).token_ids
    assert set(found) <= {*range(72), *range(300, 400)}
    assert min(found) < 72
    assert max(found) >= 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_that_are_none_give_no_token(dtype: torch.dtype, device: torch.device) -> None:
    vocab = 1100
    ways: list[dict[str, Any]] = [
        {}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 20}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
        {"banned_token_ids": [3, 700]}, {"logprobs": 2}, {"temperature": 1.0, "repetition_penalty": 1.3},
    ]  # fmt: skip
    broken: list[Tensor] = []
    for number, at in ((NAN, 3), (-NAN, 700), (INF, 5), (None, 0)):
        row = logits_of(4, 1, vocab, dtype)[0]
        if number is None:
            row.fill_(-INF)
        else:
            row[at] = number
        broken.append(row)
    rows = [SeqParams(slot=0, **way) for way in ways for _ in broken]
    found = check(torch.stack(broken * len(ways)), rows, device, [[1, 2]] * len(rows))
    banned = [0, 1]  # where the number that is none is banned, the row goes on
    expected_tokens = [4 * 4 + i for i in banned]
    assert [i for i, token in enumerate(found.token_ids) if token != NO_TOKEN] == expected_tokens
    lone = torch.full((1, vocab), -INF)
    lone[0, 600] = -7.0
    for way in ways[1:4]:
        assert check(lone, [SeqParams(slot=0, **way)], device).token_ids == [600]
    large = logits_of(5, 1, vocab)
    large[0, 9] = 3e38
    assert check(large, [SeqParams(slot=0, temperature=0.5)], device).token_ids == [NO_TOKEN]


def test_ids_that_are_banned_allowed_or_biased(device: torch.device) -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])

    def first(**way: Any) -> int:
        return check(logits, [SeqParams(slot=0, **way)], device).token_ids[0]

    assert first(banned_token_ids=[0, 1, 0]) == 2
    assert first(allowed_token_ids=[4, 3]) == 3
    assert first(allowed_token_ids=[0, 3], banned_token_ids=[0]) == 3
    assert first(logit_bias={4: 10.0, 0: -1.0}) == 4
    assert first(logit_bias={4: 10.0}, allowed_token_ids=[2]) == 2
    assert first(stop_token_ids=[0], min_position=50) == 1
    assert first(stop_token_ids=[1], min_position=50, allowed_token_ids=[1]) == 1  # something must be drawn
    assert first(stop_token_ids=[0, 1, 2], min_position=50, banned_token_ids=[3, 4, 1]) == 0
    assert first(stop_token_ids=[0, 1], min_position=50, allowed_token_ids=[0, 1, 4]) == 4


# ---- together --------------------------------------------------------------------------------------------------------


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
            repetition_penalty=either(1.0, 1.4),
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
    return rows, [rng.integers(vocab, size=6).tolist() for _ in range(count)]


@pytest.mark.parametrize(("count", "dtype"), [(3, torch.float32), (7, torch.bfloat16)], ids=str)
def test_everything_at_once_is_the_cpus(count: int, dtype: torch.dtype, device: torch.device) -> None:
    """Steps one after the other, so that what was drawn counts; then some again, and a slot's next sequence."""
    vocab = 1103
    rows, tokens = random_rows(7, count, vocab)
    logits = logits_of(8, count, vocab, dtype)
    ours, reference = samplers(rows, vocab, device, tokens)
    drawn = []
    for position in (6, 7, 8, 7, 8):  # rolled back to 7: nothing is counted twice
        at = Positions(range(count), [position] * count)
        got = ours.draw(logits.to(device, copy=True), at).read()
        assert_alike(got, reference.draw(logits.clone(), at).read(), rows)
        drawn.append(got.token_ids)
    assert drawn[1:3] == drawn[3:5]
    assert ours._counts is not None
    assert not ours._counts.any()
    rows, tokens = random_rows(9, count, vocab)
    for sampler in (ours, reference):
        for slot in range(count):
            sampler.admit(msgspec.structs.replace(rows[slot], slot=slot, token_ids=tokens[slot]))
    at = Positions(list(range(count))[::-1], [6] * count)
    assert_alike(ours.draw(logits.to(device), at).read(), reference.draw(logits.clone(), at).read())


def test_a_row_draws_the_same_in_any_batch(device: torch.device) -> None:
    vocab, count = 1103, 6
    rows, tokens = random_rows(11, count, vocab)
    logits = logits_of(12, count, vocab)
    together, alone = (samplers(rows, vocab, device, tokens)[0] for _ in range(2))
    expected = together.draw(logits.to(device), Positions(range(count), [6] * count)).read()
    for slot in range(count):
        got = alone.draw(logits[slot : slot + 1].to(device), Positions([slot], [6])).read()
        assert got.token_ids[0] == expected.token_ids[slot]
        assert (got.logprobs or [None])[0] == (expected.logprobs or [None] * count)[slot]


def test_drafts_are_drawn_behind_as_if_they_were_tokens(device: torch.device) -> None:
    """Right drafts give what single steps give; behind a wrong one, what was drawn in its place counts afterwards."""
    vocab, count, length = 307, 4, 4
    rows, tokens = random_rows(20, count, vocab)
    rows = [msgspec.structs.replace(row, repetition_penalty=1.5, frequency_penalty=1.0) for row in rows]
    logits = logits_of(13, count, vocab)
    ours, reference = samplers(rows, vocab, device, tokens)
    steps = [reference.draw(logits.clone(), Positions(range(count), [6 + i] * count)).read() for i in range(length)]
    wrong_at = 2
    for guesses in (None, wrong_at):
        slots = [slot for slot in range(count) for _ in range(length)]
        positions = [6 + i for _ in range(count) for i in range(length)]
        drafts = [steps[i].token_ids[slot] for slot in range(count) for i in range(length)]
        if guesses is not None:
            drafts = [(draft + 1) % vocab if i % length == guesses else draft for i, draft in enumerate(drafts)]
        drafts = [NO_TOKEN if i % length == length - 1 else draft for i, draft in enumerate(drafts)]
        drawing = logits.to(device)[slots]
        got = ours.draw(drawing, Positions(slots, positions, drafts)).read()
        until = length if guesses is None else guesses + 1
        for i, token in enumerate(got.token_ids):
            if i % length < until:
                assert token == steps[i % length].token_ids[slots[i]]
    for step in range(wrong_at + 1, length):  # single steps go on behind the wrong draft
        got = ours.draw(logits.to(device), Positions(range(count), [6 + step] * count)).read()
        assert_alike(got, steps[step])


def test_draws_follow_the_exact_distribution(device: torch.device) -> None:
    """Where the probabilities are exact, each token comes up as often as the CPU's numbers say."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    rows, positions = [SeqParams(slot=0, temperature=1.0, seed=3)], list(range(2, 152))
    ours, _ = samplers(rows, 4, device)
    logits = p.log()[None].repeat(len(positions), 1)
    found = np.array(ours.draw(logits.to(device), Positions([0] * len(positions), positions)).read().token_ids)
    exact = np.searchsorted(np.cumsum([0.1, 0.2, 0.3, 0.4]), uniforms([3] * len(positions), positions), side="right")
    assert (found != exact).sum() <= 1  # one may lie where rounding decides


@pytest.mark.parametrize("ways", [[{}], [{"top_k": 20, "temperature": 0.7, "top_p": 0.8}, {"top_p": 0.95}]])
def test_a_vocabulary_of_qwens_size(ways: list[dict[str, Any]], device: torch.device) -> None:
    logits = logits_of(14, 2, 151_936, torch.bfloat16)
    logits[1] *= 3  # few tokens have most of the mass
    rows = [SeqParams(slot=0, **({"temperature": 1.0} | way), seed=5) for way in (ways * 2)[:2]]
    check(logits, rows, device)
    check(logits, [SeqParams(slot=0), SeqParams(slot=0, logprobs=5, repetition_penalty=1.1)], device, [[1, 2], [9, 9]])


# ---- log probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probabilities_are_those_of_the_models_logits(dtype: torch.dtype, device: torch.device) -> None:
    vocab = 1100
    logits = logits_of(15, 5, vocab, dtype)
    logits[3] = 0.5  # all tied
    logits[4] = logits[4].round()
    rows = [
        SeqParams(slot=0, logprobs=4, temperature=2.0, top_k=2, banned_token_ids=[int(logits[0].argmax())]),
        SeqParams(slot=0),
        SeqParams(slot=0, logprobs=0),
        SeqParams(slot=0, logprobs=20, temperature=1.0),
        SeqParams(slot=0, logprobs=CANDIDATES + 1),
    ]
    found = check(logits, rows, device)
    assert found.logprobs[3] is not None
    assert found.logprobs[3][1] == list(range(20))
    greedy = check(logits[:1], [SeqParams(slot=0, logprobs=1)], device).logprobs[0]
    assert greedy is not None
    assert greedy[0] == greedy[2][0]
    assert check(logits[:2], [SeqParams(slot=0)] * 2, device).logprobs == []


# ---- in the runner ---------------------------------------------------------------------------------------------------

PROMPTS = [[7, 8, 9] * 7, [40], [i % 150 for i in range(30)], [11, 12]]
ROWS = [
    SeqParams(slot=0),
    SeqParams(slot=0, temperature=1.0, seed=5, logprobs=2),
    SeqParams(slot=0, temperature=0.8, seed=6, frequency_penalty=0.7, repetition_penalty=1.2, num_prompt_tokens=30),
    SeqParams(slot=0, presence_penalty=1.0, num_prompt_tokens=2, min_position=12, stop_token_ids=[3, 5, 7]),
]


def test_a_model_gives_the_tokens_that_it_gives_on_the_cpu(tmp_path: Path, device: torch.device) -> None:
    """Admissions step by step, a slot given on, a sequence preempted, and drafts in parts of a step."""
    folder = save_checkpoint(Shape("plain", 4, 2, 16, 64, 160, eos_token_id=3), tmp_path)
    generated = []
    for kernel in (RowSampler if device.type == "cpu" else TorchSampler, TritonSampler):
        registry = backend_registry("torch")
        registry._entries["sampler"] = [kernel]
        driver = Driver(make_runner(folder, "torch", registry=registry, device=device.type))
        assert driver.runner.info.kernels["sampler"] == kernel.name
        driver.runner._sampler.rows_max = 3
        rows, found = [], []
        for slot, (prompt, row) in enumerate(zip(PROMPTS, ROWS, strict=True)):
            rows.append(driver.add(slot, prompt, row))
            driver.step(*rows)
            found.append(driver.last.logprobs)
        driver.release(rows[2])
        driver.step(*rows)
        rows[0] = driver.add(0, PROMPTS[1], ROWS[2])
        driver.step(*rows)
        driver.verify(rows, [row.tokens[-2:] for row in rows])
        driver.verify(rows, [[5], [], [6, 7, 8], [9]])
        generated.append([row.tokens for row in rows])
        assert any(found)
    assert generated[0] == generated[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_forbid_in_their_rows_and_their_step(dtype: torch.dtype, device: torch.device) -> None:
    """Rows of several chunks, with masks and without; none of it is left behind the step."""
    vocab, count = 1103, 12
    rng = np.random.default_rng(31)
    rows, tokens = random_rows(32, count, vocab)
    rows[4] = SeqParams(slot=0, stop_token_ids=[17], min_position=50)
    rows[5] = rows[6] = SeqParams(slot=0, logprobs=5)
    rows[8], rows[10] = (SeqParams(slot=0, banned_token_ids=[9], logprobs=asked) for asked in (None, 5))
    logits = logits_of(33, count, vocab, dtype)
    logits[7, 3] = logits[8, 9] = logits[10, 9] = NAN
    allowed = [sorted(rng.permutation(vocab)[: int(rng.integers(300, 1000))].tolist()) for _ in range(count)]
    allowed[4], allowed[5], allowed[6] = [17], [vocab - 1, 2], []
    allowed[7] = [token for token in allowed[7] if token != 3]
    allowed[8] = allowed[10] = [9]
    masked = [i for i in range(count) if i % 4 != 1 or i == 5]
    masks = Masks(masked, np.stack([packed_mask(allowed[i], vocab) for i in masked]))
    ours, reference = samplers(rows, vocab, device, tokens)
    at = Positions(range(count), [6] * count)
    for where in (at._replace(masks=masks), at):
        got = ours.draw(logits.to(device, copy=True), where).read()
        assert_alike(got, reference.draw(logits.clone(), where).read(), rows)
        if where.masks:
            assert [got.token_ids[i] for i in (4, 6, 8, 10)] == [17, NONE_ALLOWED, NONE_ALLOWED, NO_TOKEN]
            assert got.logprobs[5] is not None
            assert sorted(got.logprobs[5][1]) == [2, vocab - 1]
    # Greedy rows alone, where most steps take no more than two launches.
    ours, reference = samplers([SeqParams(slot=0)] * count, vocab, device)
    where = at._replace(masks=masks)
    got = ours.draw(logits.to(device, copy=True), where).read()
    assert_alike(got, reference.draw(logits.clone(), where).read())


# ---- contract --------------------------------------------------------------------------------------------------------


def test_rows_of_a_padded_graph_are_harmless(device: torch.device) -> None:
    """A record of zeros is no row: no token, nothing written, whatever its logits are."""
    vocab = 300
    rows = [SeqParams(slot=0, temperature=1.0, repetition_penalty=1.5, logprobs=2)]
    ours, reference = samplers(rows, vocab, device, [[4, 5]])
    logits = torch.full((4, vocab), NAN)
    logits[0] = logits_of(16, 1, vocab)[0]
    records = torch.zeros(4, ours._records.shape[1], dtype=torch.int64)
    records[0] = torch.from_numpy(ours._records[0])
    records[0, POSITION.value] = 2
    found = torch.full((4 + 4 * 5,), 77, dtype=torch.int64, device=device)
    flags = int(records[0, FLAGS.value])
    ours.draw_rows(logits.to(device), records.to(device), found, flags, 2, has_drafts=True)
    expected = reference.draw(logits[:1].clone(), Positions([0], [2])).read().token_ids
    assert found[:4].tolist() == [*expected, NO_TOKEN, NO_TOKEN, NO_TOKEN]
    assert found[4 + 5 :].tolist() == [77] * 15
    assert ours._history is not None
    assert ours._history[:, 3:].count_nonzero() == 0


def test_what_draws_may_take_over_time_is_told_before(device: torch.device) -> None:
    """All that stays, and what a draw of as many rows as there may be holds at once."""
    for num_slots, num_rows in ((3, 64), (100, 128), (1000, 256)):
        sampler = TritonSampler.over(50, num_slots, 20, device)
        assert sampler.rows_max == num_rows
        stays = 4 * num_slots * 21 + num_rows * 50 * 4
        assert stays + num_rows * 50 * 4 < sampler.scratch_bytes < 2 * (stays + num_rows * 50 * 4) + num_rows * 4000


def test_tokens_are_on_the_device_before_they_are_read(device: torch.device) -> None:
    ours, _ = samplers([SeqParams(slot=0)], 50, device)
    draw = ours.draw(logits_of(17, 1, 50).to(device), Positions([0], [3]))
    assert draw.token_ids.dtype == torch.int64
    assert draw.token_ids.device.type == device.type
    assert draw.token_ids.tolist() == draw.read().token_ids


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (SeqParams(slot=9), "admitted slots of a step must be 0 to 2, not 9"),
        (SeqParams(slot=0, presence_penalty=1.0), "penalties need the tokens so far"),
        (SeqParams(slot=0, presence_penalty=1.0, token_ids=[50]), "token_ids of a step must be 0 to 49, not 50"),
        (SeqParams(slot=0, banned_token_ids=[-1]), "banned_token_ids of a step must be 0 to 49, not -1"),
        (SeqParams(slot=0, allowed_token_ids=[3, 50]), "allowed_token_ids of a step must be 0 to 49, not 50"),
        (SeqParams(slot=0, stop_token_ids=[99]), "stop_token_ids of a step must be 0 to 49, not 99"),
        (SeqParams(slot=0, logit_bias={50: 1.0}), "logit_bias of a step must be 0 to 49, not 50"),
    ],
)
def test_ids_that_are_not_there_are_refused(row: SeqParams, sentence: str, device: torch.device) -> None:
    ours, _ = samplers([SeqParams(slot=0)], 50, device)
    with pytest.raises(ValueError, match=sentence):
        ours.admit(row)
    assert ours.draw(logits_of(18, 1, 50).to(device), Positions([0], [3])).read().token_ids != [NO_TOKEN]


def test_logits_of_another_shape_are_refused(device: torch.device) -> None:
    ours, _ = samplers([SeqParams(slot=0)], 50, device)
    for wrong in (torch.zeros(1, 49), torch.zeros(2, 50), torch.zeros(1, 50, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"logits must be \[1, 50\]"):
            ours.draw(wrong.to(device), Positions([0], [3]))
    assert TritonSampler.refuses(1 << 22, device) is not None
    assert TritonSampler.refuses(300, torch.device("meta")) is not None


def test_the_torch_sampler_draws_the_same_tokens(device: torch.device) -> None:
    """The reference of the self-test, on the same rows."""
    vocab, count = 700, 5
    rows, tokens = random_rows(30, count, vocab)
    logits, found = logits_of(31, count, vocab), []
    for kernel in (TritonSampler, TorchSampler):
        sampler: Any = kernel.over(vocab, count, 64, device)
        for slot, row in enumerate(rows):
            sampler.admit(msgspec.structs.replace(row, slot=slot, token_ids=tokens[slot]))
        found.append(sampler.draw(logits.to(device, copy=True), Positions(range(count), [6] * count)).read())
    assert_alike(*found)
