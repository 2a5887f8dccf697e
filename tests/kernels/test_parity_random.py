"""Random checkpoints under random schedules: chunks, decodes, sharing and preemption in any mix."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import YARN, Shape, greedy, load_transformers, save_checkpoint
from driver import Driver, Sequence, make_runner

NUM_TOKENS = 5
SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 60))]


def random_shape(draw: random.Random) -> Shape:
    kv_heads = draw.choice([1, 2, 3, 4])
    heads = kv_heads * draw.choice([1, 2, 3, 7])
    family, hidden = draw.choice(["Qwen2", "Qwen3", "Llama", "Mistral"]), draw.choice([8, 24, 48, 90, 128])
    return Shape(
        "random",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=draw.choice([8, 16, 20, 32, 64, 80, 128]),
        hidden_size=-(-hidden // heads) * heads if family == "Llama" else hidden,  # transformers wants a multiple there
        vocab_size=draw.choice([50, 127, 256, 911]),
        tied=draw.random() < 0.5,
        sharded=draw.random() < 0.3,
        rope_theta=draw.choice([100.0, 1e4, 1e6]),
        num_layers=draw.choice([1, 2, 3]),
        intermediate_size=draw.choice([8, 40, 77, 200]),
        family=family,
        rope=draw.choice([(), YARN]),
        others=() if family == "Llama" else windows(draw),
    )


def windows(draw: random.Random) -> tuple[tuple[str, Any], ...]:
    return (
        *draw.choice([(), (("use_sliding_window", True), ("max_window_layers", 1))]),
        # Not 1: transformers' cache keeps its tokens from `1 - sliding_window` on, and from 0 on these are all
        ("sliding_window", draw.choice([2, 7, 16, 33])),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_any_schedule_gives_the_tokens_of_transformers(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    shape = random_shape(draw)
    folder = save_checkpoint(shape, tmp_path, seed=seed)
    model = load_transformers(folder, torch.float32)
    prefix = [draw.randrange(shape.vocab_size) for _ in range(40)]
    prompts = [
        prefix[: draw.randint(1, 40)] + [draw.randrange(shape.vocab_size) for _ in range(draw.randint(1, 30))]
        for _ in range(5)
    ]
    expected = [greedy(model, prompt, NUM_TOKENS)[0] for prompt in prompts]
    block_size = draw.choice([4, 16, 32])
    for backend in ("torch", "mkldnn", "native"):
        runner = make_runner(folder, backend, num_blocks=80 * 16 // block_size + 64, block_size=block_size)
        driver = Driver(runner, seed=seed)
        assert run(driver, prompts, random.Random(seed)) == expected, (shape, backend, block_size)


@pytest.mark.parametrize("seed", SEEDS)
def test_row_invariant_bf16_gives_the_same_tokens_alone_and_under_any_schedule(seed: int, tmp_path: Path) -> None:
    draw = random.Random(1000 + seed)
    shape = random_shape(draw)
    folder = save_checkpoint(shape, tmp_path, torch.bfloat16, seed=seed)
    runner = make_runner(folder, "native", num_blocks=160)
    if not runner.info.row_invariant:
        pytest.skip(f"these kernels are not row-invariant: {runner.info.kernels}")
    prefix = [draw.randrange(shape.vocab_size) for _ in range(40)]
    prompts = [
        prefix[: draw.randint(1, 40)] + [draw.randrange(shape.vocab_size) for _ in range(draw.randint(1, 30))]
        for _ in range(5)
    ]
    alone = []
    for prompt in prompts:
        driver = Driver(runner)
        alone += driver.generate([driver.add(0, prompt)], NUM_TOKENS)
    for schedule in range(3):
        assert run(Driver(runner, seed=schedule), prompts, random.Random(schedule)) == alone, (shape, schedule)


def run(driver: Driver, prompts: list[list[int]], draw: random.Random) -> list[list[int]]:
    """Compute every prompt's continuation under a random schedule."""
    waiting = list(range(len(prompts)))
    sequences: dict[int, Sequence] = {}
    while waiting or any(not finished(sequences[i], prompts[i]) for i in sequences):
        if waiting and draw.random() < 0.6:
            index = waiting.pop(0)
            sequences[index] = admit(driver, index, prompts[index], sequences, draw)
        running = [s for i, s in sequences.items() if not finished(s, prompts[i])]
        victims = [s for s in running if s.num_computed and draw.random() < 0.05 and not shared(s, sequences)]
        for victim in victims:
            driver.release(victim)
        work: list[Sequence | tuple[Sequence, int]] = []
        for sequence in draw.sample(running, draw.randint(0, len(running))):
            left = len(sequence.tokens) - sequence.num_computed
            work.append((sequence, draw.randint(1, left)))
        if work:
            driver.step(*work)
    return [sequences[i].tokens[len(p) : len(p) + NUM_TOKENS] for i, p in enumerate(prompts)]


def finished(sequence: Sequence, prompt: list[int]) -> bool:
    return len(sequence.tokens) == len(prompt) + NUM_TOKENS


def shared(sequence: Sequence, sequences: dict[int, Sequence]) -> bool:
    """Whether another sequence holds one of its blocks: this driver does not count references."""
    return any(set(s.blocks) & set(sequence.blocks) for s in sequences.values() if s is not sequence)


def admit(
    driver: Driver, slot: int, prompt: list[int], sequences: dict[int, Sequence], draw: random.Random
) -> Sequence:
    """A new sequence that takes over the full blocks another has computed of the same tokens."""
    size = driver.block_size
    for other in sequences.values():
        whole = other.num_computed // size * size
        if whole and prompt[:whole] == other.tokens[:whole] and len(prompt) > whole and draw.random() < 0.7:
            sequence = driver.add(slot, prompt)
            sequence.blocks = other.blocks[: whole // size]
            sequence.num_computed = whole
            return sequence
        common = size
        if whole >= common < len(prompt) and prompt[:common] == other.tokens[:common]:
            sequence = driver.add(slot, prompt)
            sequence.blocks = other.blocks[:1]
            sequence.num_computed = common
            return sequence
    return driver.add(slot, prompt)
