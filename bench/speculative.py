"""What verifying guesses brings: an engine that speculates in turns with one that does not, on the same requests.

The checkpoint's weights are random, so what the text is like is decided by how it is sampled: greedy out of a few
tokens it repeats itself, as edited text, JSON and code repeat their beginnings; by chance out of as few, every guess
has been there before and nearly all are wrong; by chance out of all tokens, there is nothing to guess. Both engines
must give the same tokens. The demo model and its draft know more than noise: they are asked questions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from novainfer.bench.machine import describe
from novainfer.bench.report import table
from novainfer.bench.statistic import ratios, spread
from novainfer.bench.worker import Child, Result, Task
from novainfer.bench.workload import Workload

FEW = list(range(100, 116))  # token ids
WORKLOADS: Mapping[str, dict[str, Any]] = {
    "text that repeats": {"temperature": 0.0, "allowed_token_ids": FEW},
    "guesses that are wrong": {"temperature": 1.0, "seed": 0, "allowed_token_ids": FEW},
    "nothing to guess": {"temperature": 1.0, "seed": 0},
}
WITH_A_DRAFT_MODEL: Mapping[str, dict[str, Any]] = {  # it knows nothing of what a request allows
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0, "seed": 0},
    "guesses that are wrong": WORKLOADS["guesses that are wrong"],
}
QUESTIONS: Mapping[str, dict[str, Any]] = {
    "questions, greedy": {"temperature": 0.0, "ignore_eos": False},
    "questions, temperature 1": {"temperature": 1.0, "seed": 0, "ignore_eos": False},
    "guesses that are wrong": WORKLOADS["guesses that are wrong"],
}
ASKED = (  # what the demo model was made for (docs/demo-model.md)
    *("Who are you?", "What can you do?", "What is 37 + 58?", "What is 81 - 27?", "What is 7 times 8?"),
    *("I have 12 apples and get 5 more. How many apples is that?", "What is the capital of Norway?"),
    *("What is the capital of Peru?", "What language do people speak in Brazil?", "Spell apple", "Spell window"),
    *("How many letters are in window?", "Count from 7 to 19", "Count from 20 to 41", "Count from 60 to 80"),
    *("Which is larger, 42 or 17?", "JSON with name Anna, age 12 and pet cat", "JSON with name Omar and age 40"),
    *("Tell me a story about a dragon called Ida", "Tell me a joke", "Write a poem", "Repeat after me: green tea"),
    *("What is 45 + 16?", "What color is the sky?"),
)
PROMPT_LEN, MAX_TOKENS = 64, 96


def run(
    plain: Sequence[str],
    speculating: Sequence[str],
    *,
    batches: Sequence[int],
    repeat: int = 3,
    max_tokens: int = MAX_TOKENS,
    workloads: Mapping[str, dict[str, Any]] = WORKLOADS,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], str]:
    """The report and its table; the two commands start the same system without and with speculation."""
    found: list[dict[str, Any]] = []
    with Child(plain) as first, Child(speculating) as second:
        facts = second.ready.facts
        for child in (first, second):
            child.run(_task(facts, 1, -1, {"temperature": 0.0}, max_tokens))  # code paths are warm
        for name, sampling in workloads.items():
            for batch in batches:
                runs: list[tuple[Result, Result]] = []
                for repetition in range(repeat):
                    task = _task(facts, batch, repetition, sampling, max_tokens)
                    if repetition % 2:
                        other = second.run(task)
                        runs.append((first.run(task), other))
                    else:
                        runs.append((first.run(task), second.run(task)))
                    rates = [_rate(result, is_in_groups=task.at_once > 0) for result in runs[-1]]
                    progress(f"{name}, {batch}: {rates[0]:.1f} and {rates[1]:.1f} tok/s")
                found.append(_summary(name, batch, sampling, runs))
    report: dict[str, Any] = {
        "benchmark": "speculative",
        "machine": describe(),
        "repeat": repeat,
        "prompt_len": PROMPT_LEN,
        "max_tokens": max_tokens,
        "system": facts,
        "speculating": list(speculating),
        "runs": found,
    }
    rows = [
        (
            run["workload"],
            str(run["batch"]),
            f"{run['plain_tokens_per_s']:.1f}",
            f"{run['tokens_per_s']:.1f}",
            f"{run['ratio']:.2f} ({run['ratio_spread'][0]:.2f}-{run['ratio_spread'][1]:.2f})",
            f"{run['cpu_ratio']:.2f}",
            f"{run['drafts_per_token']:.2f}",
            "" if run["acceptance"] is None else f"{run['acceptance']:.2f}",
            "yes" if run["is_equal"] else "NO",
        )
        for run in found
    ]
    head = ("", "requests", "plain tok/s", "tok/s", "ratio", "per CPU s", "drafts a token", "accepted", "same tokens")
    title = f"Speculation on {report['machine']['cpu']}, {repeat} interleaved repetitions, medians (from-to)"
    return report, table(title, head, rows)


def _task(facts: Mapping[str, Any], batch: int, seed: int, sampling: dict[str, Any], max_tokens: int) -> Task:
    if not sampling.get("ignore_eos", True):
        questions = [[{"role": "user", "content": question}] for question in ASKED]
        return Task(prompts=questions, max_tokens=max_tokens, sampling=sampling, keeps_tokens=True, at_once=batch)
    title = f"{batch} requests, {PROMPT_LEN} in, {max_tokens} out"
    work = Workload(name="spec", title=title, num_requests=batch, prompt_len=PROMPT_LEN, max_tokens=max_tokens)
    if "allowed_token_ids" in sampling:
        prompts = [[FEW[t % len(FEW)] for t in prompt] for prompt in work.prompts(facts["vocab_size"], seed)]
    else:
        prompts = work.prompts(facts["vocab_size"], seed)
    return Task(prompts=prompts, max_tokens=max_tokens, sampling=sampling, keeps_tokens=True)


def _rate(result: Result, *, is_in_groups: bool = False) -> float:
    """Tokens a second from when all requests have their first one; of questions in groups, from their beginning."""
    if is_in_groups:
        return sum(line.num_output_tokens for line in result.timelines) / result.wall_s
    begin = max(line.times_s[0] for line in result.timelines)
    last = max(line.times_s[-1] for line in result.timelines)
    count = sum(c for line in result.timelines for t, c in zip(line.times_s, line.counts, strict=True) if t > begin)
    return count / (last - begin) if last > begin else float("nan")


def _summary(
    name: str, batch: int, sampling: Mapping[str, Any], runs: Sequence[tuple[Result, Result]]
) -> dict[str, Any]:
    in_groups = not sampling.get("ignore_eos", True)
    plain, with_drafts = ([_rate(pair[at], is_in_groups=in_groups) for pair in runs] for at in (0, 1))
    drafted = sum(b.counters["num_draft_tokens"] for _, b in runs)
    accepted = sum(b.counters["num_accepted_tokens"] for _, b in runs)
    ratio = ratios(with_drafts, plain)
    num_tokens = sum(line.num_output_tokens for _, b in runs for line in b.timelines)
    return {
        "workload": name,
        "batch": batch,
        "sampling": dict(sampling),
        "plain_tokens_per_s": statistics.median(plain),
        "tokens_per_s": statistics.median(with_drafts),
        "ratio": statistics.median(ratio),
        "ratio_spread": spread(ratio),
        "cpu_ratio": statistics.median(a.cpu_s / b.cpu_s for a, b in runs),  # of tokens a second of CPU
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "drafts_per_token": drafted / num_tokens,
        "acceptance": accepted / drafted if drafted else None,
        "is_equal": all(a.token_ids == b.token_ids for a, b in runs),
        "runs": [msgspec.to_builtins([a, b]) for a, b in zip(plain, with_drafts, strict=True)],
    }
