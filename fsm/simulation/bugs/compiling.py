"""Bugs planted in how grammars are compiled: which thread is waited for, for how long, and who hears of its end."""

from __future__ import annotations

from novainfer.fsm.device.compiling import Compiled, Compiling
from novainfer.fsm.simulation.bugs.mutants import Mutant, unguarded

COMPILING_MUTANTS = [
    unguarded("a grammar that nobody waits for any more is given to those who wait for another", Compiling, Compiled),
    Mutant(
        "what waits behind a grammar that takes too long is not compiled",
        Compiling,
        "_leave_behind",
        "return self._go_on()",
        "return S.COMPILING",
    ),
    Mutant(
        "who wants the grammar that takes too long waits on",
        Compiling,
        "_leave_behind",
        "self._fail(self.wanted.pop(grammar), TOO_LONG, LIMIT)",
        "self.wanted.pop(grammar)",
    ),
    Mutant(
        "who waits when as many threads are left behind as may be waits on",
        Compiling,
        "_leave_behind",
        "self._fail(request_ids, TOO_MANY, OVERLOADED)",
        "pass",
    ),
    Mutant(
        "more threads are left behind than may be",
        Compiling,
        "_leave_behind",
        "if len(self.left_behind) < LEFT_BEHIND_MAX:",
        "if len(self.left_behind) <= LEFT_BEHIND_MAX:",
    ),
    Mutant(
        "a thread that is left behind is given the next grammar",
        Compiling,
        "_leave_behind",
        "self.thread += 1",
        "pass",
    ),
    Mutant(
        "a grammar that a thread is left behind with is begun again",
        Compiling,
        "_want",
        "if event.grammar in self.left_behind.values():",
        "if False:",
    ),
    Mutant(
        "a second grammar is begun beside the first",
        Compiling,
        "_want",
        "is_first = not self.wanted",
        "is_first = True",
    ),
    Mutant(
        "a grammar that is compiled in time has a limit still",
        Compiling,
        "_compiled",
        "self._drop(CompileOver(event.thread))",
        "pass",
    ),
    Mutant(
        "a grammar is compiled without a limit",
        Compiling,
        "_go_on",
        "self._after(COMPILE_LIMIT_S, CompileOver(self.thread))",
        "pass",
    ),
    Mutant(
        "a thread that has returned is left behind for ever",
        Compiling,
        "_returned",
        "del self.left_behind[event.thread]",
        "pass",
    ),
    Mutant(
        "a request that has ended waits for its grammar",
        Compiling,
        "_forget",
        "request_ids.remove(event.request_id)",
        "pass",
    ),
    Mutant(
        "a grammar that nobody wants any more is compiled in its turn",
        Compiling,
        "_forget",
        "if not request_ids and grammar != first:",
        "if False:",
    ),
    Mutant(
        "the end of a request takes the grammar away that is compiled",
        Compiling,
        "_forget",
        "if not request_ids and grammar != first:",
        "if not request_ids:",
    ),
]
