"""Bugs planted in what tenants share: whose turn it is, who has to go, and whose prefixes are found."""

from __future__ import annotations

from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.schedule.order import Order
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import Mutant

SHARE_MUTANTS = [
    # ---- whose turn it is
    Mutant("what a tenant is given is not counted", Order, "charge", "if len(self._given) < 2 and", "if True or"),
    Mutant(
        "what is sampled costs a tenant nothing",
        Order,
        "charge",
        "self._given[request.tenant.id] += 1 / request.tenant.weight",
        "pass",
        first=167,
    ),
    Mutant(
        "a tenant of twice the weight is given half",
        Order,
        "charge",
        "self.given(request) + count / request.tenant.weight",
        "self.given(request) + count * request.tenant.weight",
    ),
    Mutant(
        "time in which a tenant asked for nothing is owed to it",
        Order,
        "arrives",
        "max(self.given(request), least)",
        "self.given(request)",
    ),
    Mutant(
        "what a tenant was given before is forgotten when it comes again",
        Order,
        "arrives",
        "max(self.given(request), least)",
        "least",
        seeds=1000,
    ),
    Mutant(
        "a tenant that comes waits for the one that was given most",
        Order,
        "arrives",
        "least = min(",
        "least = max(",
        first=317,
    ),
    Mutant("what was given is remembered though nothing waits", Order, "arrives", "self.forget()", "pass", first=437),
    Mutant(
        "one tenant has its turn until nothing of it waits",
        Order,
        "_merged",
        "given += request.num_remaining / request.tenant.weight",
        "pass",
        first=509,
    ),
    Mutant(
        "the least urgent goes first", Order, "rank", "else request.params.priority", "else -request.params.priority"
    ),
    Mutant("what has waited for too long waits for all others", Order, "rank", "return AGED if", "return -AGED if"),
    Mutant(
        "what comes while another one ages never does",
        Scheduler,
        "_age_over",
        "if event.request_id < self._last_submitted:",
        "if False:",
    ),
    Mutant("nothing ages", Scheduler, "_submit", "and self._ages is None:", "and self._ages is not None:"),
    Mutant(
        "within a tenant, too, what is given counts before work",
        Order,
        "by_work",
        "self.given(request), request.work,",
        "-self.given(request), request.work,",
    ),
    # ---- who has to go
    Mutant(
        "the tenant that was given least is preempted",
        Order,
        "loss",
        "-self.given(request)",
        "self.given(request)",
        first=131,
    ),
    Mutant("the most urgent is preempted", Order, "loss", "-self.rank(request)", "self.rank(request)"),
    Mutant(
        "a tenant waits until another one leaves a slot",
        Planner,
        "_beyond_share",
        "if first.tenant.id in running:",
        "if True:",
        seeds=1000,
        first=167,
    ),
    Mutant(
        "a request's only slot is taken from its tenant",
        Planner,
        "_beyond_share",
        "running[r.tenant.id] > 1 and",
        "True and",
        seeds=1000,
        first=113,
    ),
    # ---- whose prefixes are found
    Mutant(
        "a tenant finds what another one has computed",
        Scheduler,
        "_submit",
        'tenant = "" if self._limits.share_prefix_cache else event.tenant.id',
        'tenant = ""',
    ),
    Mutant(
        "no tenant finds what another one has computed, though all may",
        Scheduler,
        "_submit",
        'tenant = "" if self._limits.share_prefix_cache else event.tenant.id',
        "tenant = event.tenant.id",
    ),
    Mutant("salt has no taste", Scheduler, "_submit", 'event.params.cache_salt or ""', '""'),
    Mutant(
        "the end of another tenant's prompt is found",
        BlockCache,
        "_tail_name",
        "parent = names[num_full - 1] if num_full else table.space",
        'parent = names[num_full - 1] if num_full else b""',
        seeds=1000,
        first=389,
    ),
]
