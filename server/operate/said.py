"""What `novainfer serve` says on the terminal: what it runs with, where it is, and now and then how much it does."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from novainfer.fsm.kv.blocks import tokens_in
from novainfer.models import Models
from novainfer.server.engine import ServedEngine

if TYPE_CHECKING:
    from novainfer import EngineStatistics, ModelInfo

GIB = 1 << 30
MIB = 1 << 20
INTERVAL_S = 10.0  # between lines of throughput, and only when there was work: vLLM's interval


def about(engine: ServedEngine) -> str:
    """Lines that say what the engine has: model, memory, limits, process, recorder."""
    info = engine.model_info
    tokens = tokens_in(info.num_kv_blocks, info.block_size)
    weights, cache = _size(info.weight_bytes), _size(info.num_kv_blocks * info.kv_bytes_per_block)
    pids = sorted({actor.pid for actor in engine.actors() if actor.name.startswith("worker")} - {os.getpid()})
    worker = f"; the worker's process is {', '.join(map(str, pids))}" if pids else ""  # none: it is a thread here
    folder = engine.recorder_dir
    recorder = (
        f"writes to {folder} when something goes wrong"
        if folder is not None
        else "writes no file by itself: it has no folder"
    )
    quantized = f", weights in {info.precision}," if info.precision not in ("", info.dtype) else ""
    threads = f", {info.num_threads} threads" if info.num_threads else ""
    return "\n".join(
        [
            f"  model     {info.dtype}{quantized} on {info.device}{threads}; kernels: {_kernels(info)}{worker}",
            f"  memory    {weights} weights, {cache} KV: "
            f"{info.num_kv_blocks} blocks of {info.block_size}, {tokens} tokens",
            f"  limits    {info.max_model_len} tokens of context; {info.max_num_seqs} requests at once, "
            f"{min(info.max_num_seqs, tokens // info.max_model_len)} of them if each fills its context",
            f"  recorder  {recorder}",
            *(f"  FAILED    {kernel}: self-test {why}" for kernel, why in info.failed_kernels.items()),
        ]
    )


def about_models(models: Models[ServedEngine]) -> str:
    """Lines that say which models there are, and how many may be loaded at once."""
    share = 100 / models.max_loaded
    lines = [f"  at most {models.max_loaded} loaded at once, each with {share:.0f} % of the memory"]
    for record in models.models():
        why = f" ({record.failure})" if record.failure else ""
        lines.append(f"  {record.name}: {record.state.lower()}{why}")
    return "\n".join(lines)


def _kernels(info: ModelInfo) -> str:
    """One word where all operations have the same kind."""
    kinds = set(info.kernels.values())
    if len(kinds) == 1:
        return kinds.pop()
    return ", ".join(f"{operation} {kind}" for operation, kind in info.kernels.items()) or "the device's own"


def _size(num_bytes: int) -> str:
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / MIB:.{0 if num_bytes >= 10 * MIB else 1}f} MiB"


class Throughput:
    """Makes a line of throughput from counts that only grow, `INTERVAL_S` apart; none when nothing was computed."""

    def __init__(self, began_s: float) -> None:
        self._since_s = began_s
        self._last = (0, 0)

    def line(self, look: Callable[[], EngineStatistics], now_s: float) -> str | None:
        """What to say at `now_s` (on the clock of `began_s`), if anything; looks only when it is time."""
        elapsed_s = now_s - self._since_s
        if elapsed_s < INTERVAL_S:
            return None
        found = look()
        counts = (found.prompt_tokens_total, found.generation_tokens_total)
        prompt, generated = (now - before for now, before in zip(counts, self._last, strict=True))
        self._since_s, self._last = now_s, counts
        if not prompt and not generated:
            return None
        used = found.kv_blocks_owned / found.kv_blocks_total if found.kv_blocks_total else 0.0
        rung = "" if found.rung == "FULL" else f", degraded to {found.rung}"
        return (
            f"{prompt / elapsed_s:.1f} prompt and {generated / elapsed_s:.1f} generated tokens/s; "
            f"{found.num_running} running, {found.num_waiting} waiting; KV {used:.0%} used{rung}"
        )
