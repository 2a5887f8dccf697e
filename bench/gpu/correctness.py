"""Whether a GPU gives the right tokens: the tests of the kernels, and whole answers against the CPU's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from novainfer.bench.speculative import ASKED
from novainfer.bench.worker import Child, ChildError, Task

__all__ = ["CASES", "compare_answers", "run_tests"]

NUM_TOKENS = 48
REPEATED = 3  # each question so often, so that steps hold more rows than questions
# What must not change an answer: each is a set of options of the engine.
CASES: dict[str, dict[str, Any]] = {
    "as it is served": {},
    "no graphs": {"enforce_eager": True},
    "one step in flight": {"async_scheduling": False},
    "two steps in flight, no graphs": {"async_scheduling": True, "enforce_eager": True},
    "prompts in chunks": {"max_num_batched_tokens": 16},
    "preemption": {"kv_cache_capacity_mode": "fixed", "num_kv_blocks": 40, "max_model_len": 256},
    "preemption with swap space": {
        "kv_cache_capacity_mode": "fixed", "num_kv_blocks": 40, "max_model_len": 256, "swap_space_gib": 0.1,
    },
    "drafts looked up in the prompt": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "batch-invariant": {"batch_invariant": True},
    "torch's attention": {"attention_backend": "sdpa"},
    "torch alone": {"native": "0"},
    "a worker in a thread": {"worker": "thread"},
}  # fmt: skip


def run_tests(folder: Path, paths: Sequence[str], *, timeout_s: float) -> dict[str, Any]:
    """pytest over `paths` of a checkout, on this machine's device; `ok` says whether all went well."""
    # Without the project's own settings: they name plug-ins that a machine for measurements may not have.
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(folder)]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", *(str(folder / path) for path in paths)]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"ok": False, "last_words": f"it took longer than {timeout_s:.0f} s"}
    lines = (done.stdout + done.stderr).strip().splitlines()
    return {"ok": done.returncode == 0, "last_words": "\n".join(lines[-1 if done.returncode == 0 else -30 :])}


def compare_answers(
    model: str, device: str, cases: Mapping[str, dict[str, Any]] | None = None, *, dtype: str = "float32"
) -> dict[str, Any]:
    """For each case: how many answers differ from the CPU's, and where the first one does."""
    prompts = [[{"role": "user", "content": question}] for question in ASKED] * REPEATED
    task = Task(
        prompts=prompts, max_tokens=NUM_TOKENS, keeps_tokens=True, sampling={"temperature": 0.0, "ignore_eos": False}
    )
    expected = _answers(model, {"device": "cpu", "dtype": dtype}, task)
    found: dict[str, Any] = {}
    for name, options in (CASES if cases is None else cases).items():
        try:
            got = _answers(model, {"worker": "process", "device": device, "dtype": dtype, **options}, task)
        except ChildError as error:
            found[name] = {"ok": False, "error": str(error)}
            continue
        different = [i for i, (one, other) in enumerate(zip(expected, got, strict=True)) if one != other]
        found[name] = {"ok": not different, "answers": len(prompts), "different": len(different)}
        if different:
            one, other = expected[different[0]], got[different[0]]
            at = next(
                (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
            )
            found[name]["first"] = {"answer": different[0], "at": at, "expected": one[at:][:4], "got": other[at:][:4]}
    return found


def _answers(model: str, options: dict[str, Any], task: Task) -> list[list[int]]:
    command = [sys.executable, "-m", "novainfer.bench.peers.run_novainfer", model, json.dumps(options)]
    with Child(command) as child:
        return child.run(task).token_ids
