"""W5: the systems of one precision as servers, asked by streaming clients over HTTP/1.1, in turns.

NovaInfer's library answers the same prompts between them, as many at once, each when another has ended: what the way
over HTTP costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from click import ClickException

from novainfer.bench.load import Load, drive
from novainfer.bench.peers.child import forget_peaks, tree_memory
from novainfer.bench.peers.known import OURS, WARM_UPS, SystemSpec
from novainfer.bench.peers.launch import Server, ServerError, tree_cpu_s
from novainfer.bench.peers.records import Records
from novainfer.bench.serve import CLIENTS, VOCAB_SIZE, W5, find_model
from novainfer.bench.worker import Child, ChildError, Result, Task
from novainfer.bench.workload import Workload

__all__ = ["HTTP_WORK", "LIBRARY", "take_http"]

HTTP_WORK = W5
LIBRARY = "novainfer, no HTTP"
FAILURES = (ServerError, ChildError, ClickException, OSError)  # of a system; a connection that is refused is the last
READY_TIMEOUT_S = 400.0  # vLLM compiles for minutes when it starts first


def take_http(
    specs: Sequence[SystemSpec],
    work: Workload,
    repeat: int,
    records: Records,
) -> None:
    """Each server in turn; one that does not start, or fails on the way, is left out.

    It has ended by then, so that it computes beside no other one.
    """
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        asked: dict[str, Callable[[list[list[int]], int], Result]] = {}

        def leave_out(name: str, error: Exception) -> None:
            asked.pop(name, None)
            if name in servers:
                servers[name].close()
            records.leave_out(name, [work.name], error)

        for spec in specs:
            if spec.server is None:
                continue
            records.progress(f"{spec.precision}: starting {spec.name} as a server")
            try:
                server = servers[spec.name] = stack.enter_context(Server(spec.server, spec.environment))
                server.wait_until_ready(READY_TIMEOUT_S)
                ask = _clients(server)
                for task in WARM_UPS:
                    ask(task.prompts, task.max_tokens)
            except FAILURES as error:
                leave_out(spec.name, error)
            else:
                asked[spec.name] = ask
            if spec.name == OURS:
                asked[LIBRARY] = _library(stack.enter_context(Child(spec.command, spec.environment)))
        for repetition in range(repeat):
            prompts = work.prompts(VOCAB_SIZE, repetition)
            shift = repetition % len(asked)
            for name in [*asked][shift:] + [*asked][:shift]:
                try:
                    records.take(work.name, name, repetition, partial(asked[name], prompts, work.max_tokens))
                except FAILURES as error:
                    leave_out(name, error)


def _clients(server: Server) -> Callable[[list[list[int]], int], Result]:
    load: Load = find_model(server.url, None)

    def ask(prompts: list[list[int]], max_tokens: int) -> Result:
        forget_peaks(server.pid)
        cpu_s = tree_cpu_s(server.pid)
        found = asyncio.run(drive(load, "h1", prompts, max_tokens, CLIENTS))
        for line in found.timelines:
            if line.error is not None:
                raise ServerError(line.error)
        cpu_s = tree_cpu_s(server.pid) - cpu_s
        return Result(wall_s=found.wall_s, cpu_s=cpu_s, timelines=found.timelines, memory=tree_memory(server.pid))

    return ask


def _library(child: Child) -> Callable[[list[list[int]], int], Result]:
    for task in WARM_UPS:
        child.run(task)
    return lambda prompts, max_tokens: child.run(Task(prompts=prompts, max_tokens=max_tokens, clients=CLIENTS))
