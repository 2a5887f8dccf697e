"""The runner's contract with its worker: capacity, steps of any mix, errors that come through, nothing left behind."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Shape, save_checkpoint
from driver import Driver, make_runner

from novainfer.bench.make_checkpoint import SHAPES, make_checkpoint
from novainfer.fsm.messages.step import SeqParams, StepDone, StepPlan
from novainfer.kernels import threads
from novainfer.kernels.errors import LoadError
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.runtime.step_costs import TOKENS, TRIES, measure_step_costs
from novainfer.kernels.sampling.draw_row import draw_row
from novainfer.kernels.sampling.sampler import LOGIT_ROWS_MAX
from novainfer.kernels.sampling.uniform import uniforms

SHAPE = Shape("plain", 4, 2, 16, 64, 160, eos_token_id=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(SHAPE, tmp_path_factory.mktemp("plain"))


def load(folder: Path, **options: Any) -> ModelRunner:
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": None}
    return ModelRunner.load(folder, **(defaults | options))


def test_info_says_what_was_loaded(folder: Path) -> None:
    info = load(folder, max_model_len=100).info
    assert (info.architecture, info.dtype, info.device) == ("Qwen2ForCausalLM", "float32", "cpu")
    assert (info.vocab_size, info.num_layers, info.max_model_len) == (160, 2, 100)
    assert info.eos_token_ids == (3,)
    weights = 160 * 64 + 2 * (64 * (64 + 2 * 32) + 128 + 64 * 64 + 3 * 64 * 72 + 2 * 64) + 64
    assert info.num_parameters == weights
    assert info.weight_bytes >= 4 * weights
    assert info.kv_bytes_per_block >= 2 * 2 * 2 * 16 * 16 * 4
    assert set(info.kernels) == {"linear", "attention", "ops", "forward", "sampler"}


def test_a_step_says_how_long_it_chose_tokens_and_only_where_it_did(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(folder, max_model_len=128)
    runner.fit(mode="fixed", num_blocks=8)
    ticks = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    first = StepPlan([0], [8], [8], list(range(8)), [0], [0], [0], [0], admissions=[SeqParams(slot=0)])
    runner.execute(first)
    assert runner.sample_s == 1.0
    chunk = StepPlan([0], [8], [16], list(range(8)), [], [], [], [])
    runner.execute(chunk)
    assert runner.sample_s == 0.0


def test_auto_capacity_is_what_all_sequences_can_use(folder: Path) -> None:
    runner = load(folder, max_model_len=100)
    assert runner.fit(mode="auto", memory_utilization=0.5) == 4 * 7  # seven blocks of 16 hold 100 tokens


def test_auto_capacity_stays_within_the_share_of_free_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(folder, max_model_len=100)
    per_block = runner.info.kv_bytes_per_block
    monkeypatch.setattr("novainfer.kernels.runtime.cache.free_bytes", lambda device: 20 * per_block)
    assert runner.fit(mode="auto", memory_utilization=0.5) == 10
    with pytest.raises(LoadError, match=r"needs 7 KV blocks of 16 tokens, but .* hold 6: .* at most 96"):
        runner.fit(mode="auto", memory_utilization=0.3)
    with pytest.raises(LoadError, match=r"only .* GiB are free: at most 20 blocks fit"):
        runner.fit(mode="fixed", num_blocks=21)


def test_auto_capacity_leaves_others_their_share_of_all_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(folder, max_model_len=100)
    per_block, weights = runner.info.kv_bytes_per_block, runner.info.weight_bytes
    monkeypatch.setattr("novainfer.kernels.runtime.cache.total_bytes", lambda: 2 * (weights + 40 * per_block))
    monkeypatch.setattr("novainfer.kernels.runtime.cache.free_bytes", lambda device: 100 * per_block)
    assert runner.fit(mode="auto", memory_utilization=0.5, memory_share=0.5) == 20
    assert runner.fit(mode="auto", memory_utilization=0.5) == 28  # all that its sequences can use
    monkeypatch.setattr("novainfer.kernels.runtime.cache.free_bytes", lambda device: 16 * per_block)
    assert runner.fit(mode="auto", memory_utilization=0.5, memory_share=0.5) == 8
    with pytest.raises(LoadError, match="hold 0"):
        runner.fit(mode="auto", memory_utilization=0.5, memory_share=0.01)


def test_fixed_capacity_must_hold_one_sequence(folder: Path) -> None:
    runner = load(folder, max_model_len=100)
    with pytest.raises(LoadError, match="but 6 KV blocks hold 6: max_model_len must be at most 96"):
        runner.fit(mode="fixed", num_blocks=6)
    with pytest.raises(LoadError, match="needs a number of blocks"):
        runner.fit(mode="fixed")
    assert runner.fit(mode="fixed", num_blocks=7) == 7


def test_more_samples_than_logit_rows_are_sampled_in_parts(folder: Path) -> None:
    count = LOGIT_ROWS_MAX + 7
    runner = make_runner(folder, num_blocks=2 * count, max_num_seqs=count)
    driver = Driver(runner)
    prompts = [[7, i % 50, i // 50] for i in range(count)]
    rows = [SeqParams(slot=0, logprobs=1) if i == count - 1 else SeqParams(slot=0) for i in range(count)]
    together = [driver.add(i, prompt, row) for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))]
    tokens = driver.step(*together)
    logprobs = driver.last.logprobs
    assert len(logprobs) == count
    assert [entry is not None for entry in logprobs] == [False] * (count - 1) + [True]
    for i in (0, LOGIT_ROWS_MAX - 1, LOGIT_ROWS_MAX, count - 1):
        driver.release(together[i])
        alone = driver.add(i, prompts[i])
        assert driver.step(alone) == [tokens[i]]


def test_samples_come_in_the_order_asked_for(folder: Path) -> None:
    driver = Driver(make_runner(folder))
    a, b, c = (driver.add(i, [9 + i, 4, 30 * i]) for i in range(3))
    driver.step(a, b, c)
    expected = driver.step(a, b, c)
    for sequence in (a, b, c):
        assert sequence.num_computed == 4
    blocks = [(s.slot, 0, s.blocks[0]) for s in (a, b, c)]
    batch = StepPlan(
        [a.slot, b.slot, c.slot], [1, 1, 1], [4, 4, 4], [s.tokens[3] for s in (a, b, c)],
        [slot for slot, _, _ in blocks], [index for _, index, _ in blocks], [block for _, _, block in blocks],
    )  # fmt: skip
    for order in ([2, 0], [2, 0, 1], [1], [0, 1, 2]):
        batch.sample_seqs = order
        assert driver.runner.execute(batch).token_ids == [expected[seq] for seq in order]


def test_a_token_is_drawn_by_the_position_it_will_have(folder: Path) -> None:
    """The promise of a seed is (seed, absolute position), whatever was computed in the step."""
    driver = Driver(make_runner(folder), capture=True)
    prompt = [4, 8, 15, 16, 23, 42]
    driver.step(driver.add(0, prompt))
    row = driver.capturing.logits[0].numpy().copy()
    expected = draw_row(row, SeqParams(slot=0, temperature=1.0), float(uniforms([11], [len(prompt)])[0]))
    driver = Driver(make_runner(folder))
    sampling = SeqParams(slot=0, temperature=1.0, seed=11)
    sequence = driver.add(1, prompt, sampling)
    driver.step((sequence, 2))
    assert driver.step(sequence) == [expected]


def test_a_full_context_can_be_computed(folder: Path) -> None:
    runner = make_runner(folder, max_model_len=64, max_num_batched_tokens=64, num_blocks=4)
    driver = Driver(runner)
    sequence = driver.add(0, [5] * 60, SeqParams(slot=0, temperature=1.0, frequency_penalty=0.1, num_prompt_tokens=60))
    driver.generate([sequence], 5)  # the token after the last position of the context is still sampled
    assert len(sequence.tokens) == 65


def test_a_batch_over_the_limits_is_a_programmers_error(folder: Path) -> None:
    runner = make_runner(folder, max_num_batched_tokens=8)
    for batch in (
        StepPlan([0], [9], [9], [1] * 9, [0], [0], [0], [0]),  # more tokens than a step may have
        StepPlan([0], [3], [3], [1, 2], [0], [0], [0], [0]),
        StepPlan([0, 1], [2, 0], [2, 1], [1, 2], [0], [0], [0], [0]),
        StepPlan([0], [1], [257], [1], [0], [16], [0], [0]),  # behind the context
        StepPlan([0], [1], [1], [160], [0], [0], [0], [0]),  # no such token
        StepPlan([0], [1], [1], [1], [0], [0], [64], [0]),  # no such block
        StepPlan([0], [1], [1], [1], [6], [0], [0], [0]),  # no such row of the block table
        StepPlan([0], [1], [1], [1], [0], [-1], [0], [0]),  # no such place in it
        StepPlan([-1], [1], [1], [1], [0], [0], [0], [0]),  # no such slot
        StepPlan([0], [2], [1], [1, 1], [0], [0], [0], [0]),  # before the context
        StepPlan([0], [1], [1], [1], [0], [0], [0], [-2]),  # a token for a sequence that is not there
        StepPlan([0], [1], [1], [1], [0], [0], [0], [0], [SeqParams(slot=6)]),
    ):
        with pytest.raises(ValueError, match=r"step|query_lens sum to 3, but there are 2"):
            runner.execute(batch)


UNASSERTED = """
import sys
from pathlib import Path
from novainfer.fsm.messages.step import StepPlan
from novainfer.kernels.runtime.runner import ModelRunner

runner = ModelRunner.load(Path(sys.argv[1]), max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64)
runner.fit(mode="fixed", num_blocks=8, swap_space_bytes=4 * runner.info.kv_bytes_per_block)
for batch in (
    StepPlan([0], [1], [1], [10**6], [0], [0], [0], [0]),
    StepPlan([0], [1], [1], [1], [0], [0], [10**6], [0]),
    StepPlan(swap_out_blocks=[10**6], swap_out_hosts=[0]),
    StepPlan(swap_in_hosts=[10**6], swap_in_blocks=[0]),
    StepPlan(copy_from_blocks=[0], copy_to_blocks=[10**6]),
):
    try:
        runner.execute(batch)
    except ValueError as error:
        print(error)
assert False, "not under -O"
"""


@pytest.mark.slow
def test_numbers_that_point_to_nothing_are_refused_without_assertions_too(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-c", UNASSERTED, str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "input_ids of a step must be 0 to 159, not 1000000",
        "table_blocks of a step must be 0 to 7, not 1000000",
        "swapped blocks of a step must be 0 to 7, not 1000000",
        "host blocks of a step must be 0 to 3, not 1000000",
        "copy_to_blocks of a step must be 0 to 7, not 1000000",
    ]


def test_what_the_device_raises_comes_through_and_the_next_step_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(folder)
    batch = StepPlan([0], [2], [2], [5, 6], [0], [0], [3], [0], [SeqParams(slot=0)])
    expected = runner.execute(batch).token_ids

    def out_of_memory(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(runner._decoder, "head", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            runner.execute(batch)
    assert runner.execute(batch).token_ids == expected


def test_closing_frees_weights_and_cache(folder: Path) -> None:
    def live() -> int:
        gc.collect()
        return sum(type(o) is torch.Tensor for o in gc.get_objects())

    def cycle() -> None:
        runner = make_runner(folder)
        runner.execute(StepPlan([0], [2], [2], [5, 6], [0], [0], [3], [0], [SeqParams(slot=0, temperature=1.0)]))
        runner.close()

    cycle()
    before = live()
    for _ in range(3):
        cycle()
    assert live() <= before


def test_a_made_checkpoint_has_the_shape_it_is_named_after_and_a_working_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_checkpoint("tiny", tmp_path)
    runner = make_runner(tmp_path, max_model_len=256)
    assert (runner.info.dtype, runner.info.num_layers, runner.info.vocab_size) == ("bfloat16", 2, 512)
    driver = Driver(runner)
    assert len(driver.generate([driver.add(0, [72, 101])], 3)[0]) == 3
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Grüße, 12 кошек\n<|im_end|>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert ids[-1] == 258
    assert len(tokenizer) == 512
    assert all(tokenizer.decode([token_id]) for token_id in range(259, 512))
    assert runner.info.eos_token_ids == (258,)
    with pytest.raises(ValueError, match="known shapes: qwen"):
        make_checkpoint("gpt-7", tmp_path)
    assert {"qwen2.5-0.5b", "qwen2.5-1.5b"} <= set(SHAPES)


def test_threads_are_those_asked_for_or_those_a_quota_grants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(threads, "CPU_QUOTA", quota)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        for text, expected in (("max 100000", 4), ("800000 100000", 4), ("150000 100000", 2), ("5000 100000", 1)):
            quota.write_text(text + "\n")
            torch.set_num_threads(4)
            threads.use_threads(None)
            assert torch.get_num_threads() == expected
        threads.use_threads(3)
        assert torch.get_num_threads() == 3
        quota.unlink()
        threads.use_threads(None)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_takes_the_native_kernels_throughout(folder: Path, dtype: str) -> None:
    try:
        runner = load(folder, batch_invariant=True, native="require", dtype=dtype)
    except LoadError as error:
        pytest.skip(str(error))
    assert runner.info.row_invariant
    assert runner.info.kernels == dict.fromkeys(("linear", "attention", "ops", "forward", "sampler"), "native")


def test_step_costs_are_measured_by_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("novainfer.kernels.runtime.step_costs.LIMIT_S", 60.0)  # also on a busy machine
    runner = load(folder, max_model_len=48)
    runner.fit(mode="auto")
    costs = runner.measure_step_costs()
    assert [num_tokens for num_tokens, _ in costs] == sorted(n for n in TOKENS if n <= 48)
    assert all(ms > 0 for _, ms in costs)


class Clocked:
    """A device whose steps take `first_ms` and `each_ms` for each token, and twice as much in all rounds but one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first_ms: float, each_ms: float) -> None:
        self.now_s = 100.0
        self.taken: list[int] = []
        self._first_ms, self._each_ms = first_ms, each_ms
        monkeypatch.setattr("novainfer.kernels.runtime.step_costs.time.perf_counter", lambda: self.now_s)

    def execute(self, plan: StepPlan) -> StepDone:
        (num_tokens,) = plan.query_lens
        assert len(plan.input_ids) == num_tokens == plan.context_lens[0]
        assert plan.num_drafts == [min(num_tokens, 32) - 1], "so many are sampled that a step's logits stay small"
        times = 1 if self.taken.count(num_tokens) == 1 else 2
        self.taken.append(num_tokens)
        self.now_s += 1e-3 * times * (self._first_ms + self._each_ms * num_tokens)
        return StepDone(0, 0, [])


def test_step_costs_are_the_fastest_of_tries_that_are_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Clocked(monkeypatch, 1.0, 0.01)
    costs = measure_step_costs(device.execute, 300, 16)
    assert costs == [(n, round(1.0 + 0.01 * n, 3)) for n in sorted(TOKENS)], "to a microsecond: people read them"
    assert device.taken == list(TOKENS) * TRIES
    device.taken.clear()
    assert [n for n, _ in measure_step_costs(device.execute, 20, 16)] == [1, 2, 3, 4, 6, 8, 12, 16]


def test_step_costs_are_measured_for_so_long_as_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Clocked(monkeypatch, 20.0, 0.7)
    measure_step_costs(device.execute, 2048, 16)
    assert device.taken[:3] == [1, 16, 64]
    assert 256 not in device.taken, "it would have taken more than was left"
    assert device.now_s - 100.0 < 0.4 * 1.2
    large = Clocked(monkeypatch, 400.0, 15.0)
    costs = measure_step_costs(large.execute, 2048, 16)
    assert {1, 16, 64} <= dict(costs).keys(), "of a large model the curve is told as well"
    assert large.now_s - 100.0 < 10 * 0.83


def test_a_step_that_samples_nothing_is_over_when_it_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nothing else would wait for it, and what it was told to read would be used again."""
    runner = load(folder)
    runner.fit(mode="fixed", num_blocks=64)
    done: list[str] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking, "a core would be busy with waiting"

        def record(self) -> None:
            done.append("recorded")

        def synchronize(self) -> None:
            done.append("waited for")

    monkeypatch.setattr(runner, "_is_ahead", True)
    monkeypatch.setattr(runner._kernels, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    flight = runner.launch(StepPlan([0], [8], [8], [0] * 8, [0], [0], [0], []))
    assert (flight.is_through, done) == (False, ["recorded"])
    flight.wait()
    assert (flight.done().token_ids, done) == ([], ["recorded", "waited for"])
