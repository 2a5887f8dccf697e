"""The workloads: how many requests, how long, and what they share. Token ids are random, and fresh for each repetition.

W1 one request decodes; W2 a batch; W3 long prompts; W4 prompts with one long beginning, submitted together on a cold
cache. The sizes are those that NovaInfer and its peers have been measured with since its beginning.
"""

from __future__ import annotations

import random

import msgspec


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`num_requests` at once, of `prompt_len` tokens each, the first `shared_len` of them the same in all."""

    name: str
    title: str
    num_requests: int
    prompt_len: int
    max_tokens: int
    shared_len: int = 0

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Token ids `[num_requests][prompt_len]`; another seed shares nothing with this one."""
        chance = random.Random(f"{self.name}/{seed}")
        shared = chance.choices(range(vocab_size), k=self.shared_len)
        own = self.prompt_len - self.shared_len
        return [shared + chance.choices(range(vocab_size), k=own) for _ in range(self.num_requests)]


WORKLOADS = (
    Workload(name="W1", title="one request, 32 in, 64 out", num_requests=1, prompt_len=32, max_tokens=64),
    Workload(name="W2", title="32 requests, 128 in, 64 out", num_requests=32, prompt_len=128, max_tokens=64),
    Workload(name="W3", title="8 requests, 1024 in, 8 out", num_requests=8, prompt_len=1024, max_tokens=8),
    Workload(
        name="W4",
        title="16 requests, 768 shared + 32 in, 16 out",
        num_requests=16,
        prompt_len=800,
        max_tokens=16,
        shared_len=768,
    ),
)
# Beside peers two more: prompts so long that attention counts, and traffic.
LONG = Workload(name="W6", title="4 prompts of 8k, 32 out", num_requests=4, prompt_len=8192, max_tokens=32)


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of many sizes that come by a Poisson clock, at a share of what the system can answer."""

    name: str = "W7"
    title: str = "64 requests of 32 to 1024 in, 16 to 128 out, by a Poisson clock at 70 % of capacity"
    num_requests: int = 64
    prompt_lens: tuple[int, int] = (32, 1024)
    lengths: tuple[int, int] = (16, 128)
    load: float = 0.7

    def scaled(self, divisor: int) -> Traffic:
        """The same shape, smaller."""
        return msgspec.structs.replace(
            self,
            num_requests=max(2, self.num_requests // divisor),
            prompt_lens=(max(4, self.prompt_lens[0] // divisor), max(4, self.prompt_lens[1] // divisor)),
            lengths=(max(2, self.lengths[0] // divisor), max(2, self.lengths[1] // divisor)),
        )

    def requests(self, vocab_size: int, seed: int) -> tuple[list[list[int]], list[int]]:
        """Prompts, and the tokens of each answer: as many short ones as long ones, by factors."""
        chance = random.Random(f"{self.name}/{seed}")

        def size(least: int, most: int) -> int:
            return int(least * (most / least) ** chance.random())

        prompts = [chance.choices(range(vocab_size), k=size(*self.prompt_lens)) for _ in range(self.num_requests)]
        return prompts, [size(*self.lengths) for _ in prompts]

    def arrivals_s(self, per_s: float, seed: int) -> list[float]:
        """When each request comes, the first one at 0; the same clock at any rate, slower or faster."""
        chance = random.Random(f"{self.name}/clock/{seed}")
        found = [0.0]
        for _ in range(self.num_requests - 1):
            found.append(found[-1] + chance.expovariate(1.0) / per_s)
        return found


TRAFFIC = Traffic()
MAX_LEN = max(w.prompt_len + w.max_tokens for w in WORKLOADS)
MAX_TOKENS_AT_ONCE = max(w.num_requests * (w.prompt_len + w.max_tokens) for w in WORKLOADS)
# A request whose long beginning is in the cache, against the one that put it there.
PREFIX = Workload(
    name="prefix", title="768 cached + 32 in", num_requests=2, prompt_len=800, max_tokens=2, shared_len=768
)


def scaled(workload: Workload, divisor: int) -> Workload:
    """The same shape, smaller: for a quick look, and for tests."""
    return msgspec.structs.replace(
        workload,
        num_requests=max(1, workload.num_requests // divisor) if workload.num_requests > 2 else workload.num_requests,
        prompt_len=max(4, workload.prompt_len // divisor),
        max_tokens=max(2, workload.max_tokens // divisor),
        shared_len=workload.shared_len // divisor,
    )
