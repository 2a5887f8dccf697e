"""What one seed draws: the size of its world, its clients, how long things take, and how often what goes wrong."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.simulation.checks.retry import Steady
from novainfer.fsm.simulation.swarm.crashes import Plague, crashing_shape
from novainfer.fsm.simulation.swarm.kin import Kin
from novainfer.fsm.simulation.world.device import NAN_TOKEN, POISONS, VOCAB_SIZE
from novainfer.fsm.simulation.world.pace import Pace
from novainfer.fsm.simulation.world.shape import ALL_MODES, BEST, LEAN, SAFE, Shape
from novainfer.fsm.simulation.world.shortage import Shortage, draw_shortage

# Per step or job: what a device does with it. Per event: what happens beside it.
PER_JOB = ("oom", "exception", "unlaunched", "hang", "job")
PER_EVENT = {"cancel": 8, "duplicate": 4, "early": 32, "jump": 512, "die": 64, "overdue": 64}
PER_EVENT |= {"die_spare": 32, "die_both": 64, "freeze_spare": 64, "echo": 32}  # so many times rarer
FAULTS = (*PER_JOB, *PER_EVENT, "stall", "timeout", "encode", "poison", "nan")
STOPS = ["a", "ab", "bca", "c ", "\u00e9", "c\u20ac", "\U0001f600", "<sep>", "\ufffd"]
PROMPT_TOKENS = range(1, NAN_TOKEN)
ADORNED = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k"),
    *("logit_bias", "allowed_token_ids", "banned_token_ids"),
)


SCARCE_TOKENS = [40, 80, 160]  # of a request in a world with a shortage, and
LASTING_TOKENS = [240, 320]  # where that lasts until all is well again
LATE_PROMPTS = 12  # after so many, those are short: steps need less of what they may hold
CLIENTS_LARGE = 4096  # of one seed in a hundred
SLOTS_LARGE = 1024


class Mix:
    """All draws of `rng` that are made before the world begins, and the clients', one by one."""

    def __init__(
        self,
        rng: random.Random,
        *,
        is_large: bool = False,
        is_uneven: bool = False,
        is_slow: bool = False,
        is_languid: bool = False,
        is_scarce: bool = False,
        plague: Plague | None = None,
        is_slow_step: bool = False,
        kin: Kin | None = None,
        pace: Pace | None = None,
        steady: Steady | None = None,
    ) -> None:
        self.rng = rng
        self.kin = kin
        self.pace = pace
        self.steady = steady
        self.is_large = is_large
        self.is_scarce = is_scarce
        self.plague = plague
        self.has_slow_steps = is_slow_step  # of seconds, and a watch that looks on
        is_odd = is_large or is_scarce or plague is not None or is_slow_step
        self.is_uneven = is_uneven and not is_odd  # prompts of one token beside others of a hundred
        self.lasts = False  # a shortage is over so early that all is well before the world ends
        self._num_prompts = 0
        self.shape = self._large_shape() if is_large else self._scarce_shape() if is_scarce else self._shape()
        if self.is_uneven:
            self.shape = self._uneven_shape()
        elif self.plague is not None:
            self.shape = crashing_shape(rng, self.plague, self.shape)
        if kin is not None:
            self.shape = kin.shape(self.shape)
        if pace is not None:
            self.shape = pace.shape(self.shape)
        if steady is not None:
            self.shape = steady.shape(self.shape)
        # The mix of faults is drawn too, log-uniform, often zero: much of one finds more than a little of everything.
        self.rates = {name: 10 ** rng.uniform(-3, -0.3) if rng.random() < 0.4 else 0.0 for name in FAULTS}
        if not self.shape.max_restarts and rng.random() < 0.8:  # such a world ends with the first of these
            self.rates |= dict.fromkeys(("hang", "die", "overdue", "poison"), 0.0)
        self.is_watched = (
            self.shape.processes and rng.random() < 0.5
        )  # a watch finds what hangs; else it is said at any time
        self.come_up_fails = rng.random() < 0.02
        self.spite = rng.choice([0.0, 0.0, 0.1, 0.5])  # how often requests are cancelled in a step that will fail
        self.is_brisk = rng.random() < 0.3  # readers take each token as it comes
        self.lateness_s = 10 ** rng.uniform(-4, 1)
        self.hop_s = 10 ** rng.uniform(-5, -2.5)  # from one machine to the next
        self.step_s = 10 ** rng.uniform(-3, -1.5)  # of the device
        self.jobs_s = 10 ** rng.uniform(-3, 0)  # how long the device's other jobs take, as a share of the longest
        self.num_clients = rng.choice([12, 24, 32, 48])
        self.burst = rng.choice([8, 16, 24, 32])  # clients that come together, and
        self.burst_gap_s = 10 ** rng.uniform(-1, 3.8)  # how far the next ones are behind them
        self.heal_after_s = 10 ** rng.uniform(-2, 1.5)
        self.alphabet = rng.sample(PROMPT_TOKENS, rng.choice([2, len(PROMPT_TOKENS), len(PROMPT_TOKENS)]))
        self.prefixes = [[rng.choice(self.alphabet) for _ in range(rng.randint(1, 12))] for _ in range(2)]
        # Prompts that begin alike, differ in the middle, and end alike, mostly at the edges of blocks.
        self.parts = [self._parts(2), self._parts(rng.choice([2, 3, 6])), self._parts(2)]
        self.is_patched = rng.choice([0.0, 0.0, 0.3, 0.9])  # how many prompts are made of these parts
        self.is_adorned = rng.choice([0.0, 0.1, 0.3, 0.9])  # how many clients want more than the likeliest token

        self.encode_s = self.step_s  # for a prompt
        if is_slow and not is_large:
            self.encode_s = 10 ** rng.uniform(-1, 1.5)
            self.rates["timeout"] = max(self.rates["timeout"], 0.3)
        if self.is_uneven:
            self.rates = {name: rate / 8 for name, rate in self.rates.items()}
            self.is_patched = 0.0
        if is_large:
            self.num_clients, self.burst = CLIENTS_LARGE, rng.choice([1024, CLIENTS_LARGE])
            self.burst_gap_s = min(self.burst_gap_s, 60.0)
            self.rates = {name: rate / 8 for name, rate in self.rates.items()}
            self.hop_s = min(self.hop_s, 1e-4)  # one message at a time: more, and the deadlines of all would pass

        if is_languid:
            self._be_languid()
        if self.plague is not None:
            self._be_crashing(self.plague)
        if is_slow_step:
            self.rates |= dict.fromkeys(("hang", "overdue", "poison"), 0.0)  # what is late then, is so rightly
            self.step_s, self.is_watched = 10 ** rng.uniform(-0.3, 0.7), False

        if kin is not None and kin.is_crowd:
            self.num_clients = self.burst = kin.num_clients
            self.rates = {name: rate / 32 for name, rate in self.rates.items()}
            self.hop_s = min(self.hop_s, 1e-4)
        if steady is not None:
            self.num_clients, self.burst, self.burst_gap_s = steady.num_clients, steady.burst, steady.burst_gap_s
            self.step_s, self.hop_s, self.is_brisk = steady.step_s, min(self.hop_s, steady.step_s / 200), True
            self.rates = dict.fromkeys(self.rates, 0.0)
            self.is_watched = self.come_up_fails = False
        self.shortage: Shortage | None = None
        if is_scarce:  # and nothing else goes wrong: what it costs can be counted
            self.shortage = draw_shortage(rng, self.shape, is_brief=self.lasts) if pace is None else pace.shortage()
            self.rates = dict.fromkeys(self.rates, 0.0)
            self.is_watched, self.come_up_fails, self.is_brisk = False, False, True
            self.num_clients = self.burst = pace.num_clients if pace is not None else 60 if self.lasts else 24

    def _be_languid(self) -> None:
        """Nearly all readers are slow, and there are so few slots that not all of those can be parked for long."""
        rng = self.rng
        self.shape = msgspec.structs.replace(
            self.shape,
            max_num_seqs=2,
            max_num_queued_reqs=64,
            max_num_queued_tokens=1 << 20,
            stall_high=rng.choice([1, 6]),
            stall_low=0,
            stall_keep_s=rng.choice([0.1, 10.0]),
            stall_timeout_s=3000.0,
        )
        self.rates = {name: rate / 8 for name, rate in self.rates.items()} | {"stall": 0.9, "timeout": 0.0}
        self.num_clients = self.burst = 32

    def _be_crashing(self, plague: Plague) -> None:
        """Few clients, long times between them, and nothing else that goes wrong."""
        rng = self.rng
        self.rates = dict.fromkeys(self.rates, 0.0) | {"echo": rng.choice([0.0, 0.1])}
        self.rates |= {"job": plague.job_odds, "spare_job": plague.spare_odds, "exception": plague.step_odds}
        self.come_up_fails = self.is_watched = False
        self.jobs_s = rng.choice(plague.jobs_s)
        self.num_clients, self.burst, self.burst_gap_s = 12, 4, 10 ** rng.uniform(2.5, 3.5)
        if plague.step_odds:
            self.num_clients, self.burst = 32, 1
            self.burst_gap_s = self.shape.restart_window_s / self.shape.max_restarts / 2

    def _scarce_shape(self) -> Shape:
        """Long requests, and room for all of them, so that nothing but the shortage makes steps small."""
        rng = self.rng
        self.lasts = rng.random() < 0.25
        max_num_seqs, chunk = 4 if self.lasts else rng.choice([4, 8, 16]), rng.choice([32, 64, 128])
        return msgspec.structs.replace(
            self._shape(),
            num_blocks=max_num_seqs * 48,
            block_size=8,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=chunk + max_num_seqs,
            prefill_chunk_tokens=chunk,
            max_model_len=384,
            max_num_queued_reqs=256,
            max_num_queued_tokens=1 << 20,
            stall_high=384,
            max_restarts=20,
            processes=False,
            warm_spare=False,
        )

    def _large_shape(self) -> Shape:
        """So many of everything that whatever takes more than its share of time or room would be seen."""
        rng = self.rng
        shape = self._shape()
        return msgspec.structs.replace(
            shape,
            num_blocks=rng.choice([1024, 4096]),
            max_num_seqs=SLOTS_LARGE,
            max_num_batched_tokens=2048,
            prefill_chunk_tokens=rng.choice([512, 2048]),
            block_size=8,
            max_num_queued_reqs=CLIENTS_LARGE,
            max_num_queued_tokens=1 << 20,
            max_num_overflow_reqs=CLIENTS_LARGE,
        )

    def _uneven_shape(self) -> Shape:
        """Room for many prompts at once, and steps that hold parts of some of them."""
        rng = self.rng
        return msgspec.structs.replace(
            self._shape(),
            num_blocks=1024,
            max_num_seqs=32,
            max_num_batched_tokens=rng.choice([64, 128]),
            prefill_chunk_tokens=rng.choice([16, 32, 64]),
            block_size=rng.choice([1, 2, 4]),
            max_model_len=128,
            max_num_queued_reqs=64,
            max_num_queued_tokens=1 << 20,
        )

    def _shape(self) -> Shape:
        rng = self.rng
        max_num_seqs = rng.choice([2, 8, 16, 16, 32])
        block_size = rng.choice([1, 2, 4, 4, 8, 8])
        max_model_len = rng.choice([32, 40, 48])
        # Room for one request at least, and for all of them at most.
        most = max_num_seqs * max_model_len // block_size
        least = -(-max_model_len // block_size)
        max_restarts = rng.choice([0, 2, 5, 5, 20, 20])
        has_processes = max_restarts > 0 and rng.random() < 0.6
        return Shape(
            num_blocks=max(least, min(int(most * rng.choice([0.1, 0.3, 0.5, 0.7])), 128)),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(rng.choice([16, 64, 128, 128]), max_num_seqs),  # as EngineConfig demands
            prefill_chunk_tokens=rng.choice([4, 16, 32, 64, 64]),
            max_model_len=max_model_len,
            max_num_queued_reqs=rng.choice([8, 32, 64, 64]),
            max_num_queued_tokens=rng.choice([60, 1 << 20, 1 << 20]),
            enable_prefix_caching=rng.random() < 0.8,
            stall_high=rng.choice([1, 6, 12, 24]),
            stall_low=rng.choice([0, 1]),
            stall_keep_s=rng.choice([0.1, 10.0]),
            stall_timeout_s=rng.choice([30.0, 300.0]),
            max_num_overflow_reqs=rng.choice([0, 4, 16]),
            num_host_blocks=rng.choice([0, 0, 4, 64]),
            modes=rng.choice([(BEST,), (BEST, SAFE), ALL_MODES, (BEST, LEAN)]),
            ladder_quiet_s=rng.choice([0.1, 5.0, 60.0]),
            max_restarts=max_restarts,
            restart_window_s=rng.choice([1.0, 10.0, 60.0, 60.0]),
            processes=has_processes,
            warm_spare=has_processes and rng.random() < 0.8,
            kv_is_lazy=rng.random() < 0.7,
            shows_death=rng.random() < 0.8,
        )

    def arrival_gap_s(self, num_arrived: int) -> float:
        """From one client to the next: they come in bursts."""
        if num_arrived % self.burst:
            if self.steady is not None:
                return self.steady.gap_s(num_arrived, self.rng.random())
            if self.is_large or (self.kin is not None and self.kin.is_crowd):
                return self.hop_s * self.rng.random()
            return self.rng.random() * 2 * self.step_s
        return self.burst_gap_s * (0.5 + self.rng.random())

    def reading_gap_s(self, stream_id: int) -> float:
        """How long this client takes to come back for more: most at once, some after seconds or minutes."""
        rate = self.rates["stall"]
        if not rate:
            return self.hop_s if self.is_brisk else self.step_s * self.rng.random() * 6
        draw = self.rng.random
        if (stream_id * 7919 % 100) / 100 < rate:  # a slow client is slow all the time
            return 10 ** (draw() * 3.3 - 1)
        return self.step_s * draw() * 4

    def prompt(self) -> str | list[int]:
        """What a client asks for: short, long, empty; half of them begin alike."""
        rng = self.rng
        if own := self.kin or self.pace or self.steady:
            return own.prompt()
        length = rng.choice([1, 2, 3, 5, 8]) if rng.random() < 0.97 else rng.choice([0, self.shape.context_len])
        if self.is_uneven:
            length = rng.choice([rng.randint(1, 8), rng.randint(1, 8), rng.randint(30, 100)])
        head = [] if self.is_uneven and rng.random() < 0.7 else rng.choice([[], *self.prefixes])
        if self.is_scarce:
            self._num_prompts += 1
            is_late = self.lasts and self._num_prompts > LATE_PROMPTS
            head, length = [], 1 if is_late else rng.choice([1, 8, 30, 60])
        if self.is_patched and rng.random() < self.is_patched:
            head, length = [token for part in self.parts for token in rng.choice(part)], rng.choice([0, 1, 1, 2])
        prompt = [*head, *(rng.choice(self.alphabet) for _ in range(length))]
        if self.rates["poison"] and rng.random() < self.rates["poison"]:
            prompt.insert(rng.randrange(len(prompt) + 1), rng.choice(POISONS))
        if self.rates["nan"] and rng.random() < self.rates["nan"]:
            prompt.insert(rng.randrange(len(prompt) + 1), NAN_TOKEN)
        return "".join(map(chr, prompt)) if rng.random() < 0.5 else prompt

    def _parts(self, num: int) -> list[list[int]]:
        """So many pieces of prompts, of one length: a block or two, or nearly."""
        rng, size = self.rng, self.shape.block_size
        length = min(size * rng.choice([1, 1, 2]) + rng.choice([0, 0, 0, 1]), self.shape.context_len // 5)
        return [[rng.choice(self.alphabet) for _ in range(length)] for _ in range(num)]

    def _adorned(self) -> dict[str, Any]:
        """What makes the next token depend on more than its context: a few of all such wishes."""
        rng = self.rng
        wishes: dict[str, Any] = {}
        for name in rng.sample(ADORNED, rng.choice([1, 1, 2, 3])):
            ids = rng.sample(range(VOCAB_SIZE), 12)
            wishes[name] = {
                "repetition_penalty": 1.5,
                "presence_penalty": rng.choice([0.5, -0.5]),
                "frequency_penalty": rng.choice([0.5, -0.5]),
                "logit_bias": dict.fromkeys(ids[:2], 1.0),
                "allowed_token_ids": ids if rng.random() < 0.7 else [*ids, *range(VOCAB_SIZE // 2)],
                "banned_token_ids": rng.sample(range(VOCAB_SIZE), 30),
                "temperature": rng.choice([0.5, 1.0]),
                "top_k": rng.choice([1, 5]),
            }[name]
        if "allowed_token_ids" in wishes and "banned_token_ids" in wishes:
            wishes["banned_token_ids"] = wishes["allowed_token_ids"][::2]
        return wishes

    def params(self) -> SamplingParams:
        """How a client wants it."""
        if self.kin is not None and self.kin.is_crowd:
            return self.kin.params()
        if own := self.pace or self.steady:
            return own.params()
        rng, draw = self.rng, self.rng.random
        adorned = self._adorned() if self.is_adorned and draw() < self.is_adorned else {}
        some = adorned.get("allowed_token_ids", range(VOCAB_SIZE))  # where all of them stop, none can be banned
        max_tokens = rng.choice([1, 2, 4] if self.is_large else [2, 8, 10, 11, 12, 12, 13, 14, 16, 20, None])
        stops = draw() < 0.15
        hurry = draw() < self.rates["timeout"]
        if self.is_scarce:
            most = rng.choice(LASTING_TOKENS if self.lasts else SCARCE_TOKENS)
            return SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0)
        return SamplingParams(
            n=1 if self.is_large else rng.choice([1, 1, 1, 2, 2, 3]),
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens or 8) if draw() < (0.4 if adorned else 0.15) else 0,
            stop=[rng.choice(STOPS) for _ in range(rng.randint(1, 3))] if stops else None,
            stop_token_ids=rng.sample(some, rng.choice([3, 6, 12])) if draw() < (0.4 if adorned else 0.1) else [],
            include_stop_str_in_output=stops and draw() < 0.4,
            ignore_eos=draw() < 0.4,
            skip_special_tokens=draw() < 0.8,
            logprobs=(0, 2, 9)[rng.randrange(3)] if draw() < 0.1 else None,  # four weigh as much as a token
            temperature=adorned.pop("temperature", 0.0),
            max_queue_s=10 ** rng.uniform(-2 if hurry else 1, 2) if hurry or draw() < 0.1 else None,
            timeout_s=10 ** rng.uniform(-2 if hurry else 1, 2) if hurry or draw() < 0.1 else None,
            **adorned,
        )
