"""Grammars are compiled in a thread, which another one takes the place of when it is at one for too long.

What is compiled is kept: choices of one request, and requests with the same schema, wait for no thread. Threads share
the tokenizer, which none of them changes. One that is left behind goes on with the lowest priority, until its call
returns, and what it gives is dropped (`fsm/device/compiling.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from novainfer.actors.core.thread import JobThread
from novainfer.fsm.core.machine import After, Drop, Effect, Send, Start
from novainfer.fsm.device.compiling import (
    Compile,
    Compiled,
    CompileOver,
    Compiling,
    Key,
    LeaveBehind,
    Share,
    Unwanted,
    Wanted,
)
from novainfer.fsm.health import GrammarState
from novainfer.fsm.messages.events import Constrain

logger = logging.getLogger(__name__)

NO_TOKENIZER = "this model has no tokenizer, which structured outputs need"
KEPT_MAX = 64  # grammars; a megabyte or two each
# llguidance recurses over rules that name each other: 30,000 of them in 260 KB of text need half a gigabyte of stack
# (measured), and less would end this process. The memory is address space: ordinary grammars touch some kilobytes.
STACK_BYTES = 1 << 30


class Compilers:
    """On the loop. `source` gives the text of a tokenizer.json, or None.

    `found(request_id, compiled)` takes each grammar (None: the request wants none), and `failed(request_id, message,
    code)` each error.
    """

    def __init__(
        self,
        source: Callable[[], str | None],
        found: Callable[[int, Any], None],
        failed: Callable[[int, str, str], None],
    ) -> None:
        self._source = source
        self._found = found
        self._failed = failed
        self.vocab_size = 0
        self.eos_token_ids: Sequence[int] = ()
        self.compiler: Any = None  # made in the first thread, with the first request; or the error that it is not
        self._asked: dict[int, Constrain] = {}  # by request; before the compiler is there, all of them wait for it
        self._kept: OrderedDict[Key, Any] = OrderedDict()
        self.compiling = Compiling()
        self._answer: Any = None  # of the thread that is through
        self._timer: asyncio.TimerHandle | None = None
        self._thread = self._make_thread(0)
        self._left_behind: dict[int, JobThread] = {}
        self._has_begun = False
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- life ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Live from now until `stop`; raises what killed a thread."""
        self._loop = asyncio.get_running_loop()
        try:
            running = None
            while running is not self._thread:  # until the last one has ended, and none has taken over
                running = self._thread
                await running.run()
        finally:
            self._stop_timer()

    def stop(self) -> None:
        """End after what is compiled, which nobody waits for any more."""
        self._stop_timer()
        self._thread.stop(drop_waiting=True)

    def give_up(self) -> None:
        """End now."""
        if self._thread.num_waiting:
            logger.warning("the thread %s is left behind: its grammar takes too long", self._thread.name)
        self._thread.abandon()

    def threads(self) -> list[tuple[str, GrammarState, JobThread]]:
        """Each thread with its name, and what it does."""
        state = GrammarState.WORKING if self._thread.num_waiting else GrammarState.IDLE
        found = [("grammar compiler", state, self._thread)]
        return found + [
            (f"grammar compiler {number}", GrammarState.LEFT_BEHIND, thread)
            for number, thread in self._left_behind.items()
        ]

    # ---- requests ------------------------------------------------------------------------------------------------

    def want(self, asked: Constrain) -> None:
        """The grammar of this request: it is found, or fails, now or later."""
        if not self._has_begun:
            self._has_begun = True
            self._thread.put(self._make_compiler)
        self._asked[asked.request_id] = asked
        if self.compiler is not None:
            self._look(asked)

    def unwant(self, request_id: int) -> None:
        """This request has ended, whatever it has got."""
        del self._asked[request_id]
        self._perform(self.compiling.handle(Unwanted(request_id)))

    def _look(self, asked: Constrain) -> None:
        if isinstance(self.compiler, Exception):
            self._fail(asked.request_id, self.compiler)
        elif asked.grammar is None:
            self._found(asked.request_id, None)
        elif (kept := self._kept.get(asked.grammar.key)) is not None:
            self._kept.move_to_end(asked.grammar.key)
            self._found(asked.request_id, kept)
        else:
            self._perform(self.compiling.handle(Wanted(asked.request_id, asked.grammar.key)))

    def _fail(self, request_id: int, error: Any) -> None:
        self._failed(request_id, error.message, error.code)

    # ---- threads -------------------------------------------------------------------------------------------------

    def _make_thread(self, number: int) -> JobThread:
        name = "novainfer-grammar-compiler"
        return JobThread(name, partial(self._work, number), lambda _: None, stack_bytes=STACK_BYTES)

    def _work(self, number: int, job: Callable[[], Any]) -> None:
        """In a thread: make the compiler, or compile. The loop hears of its end also when it was left behind."""
        from novainfer.actors.grammar.compiler import GrammarError

        assert self._loop is not None
        answer: Any = None  # it raises what no grammar may
        try:
            answer = job()
        except GrammarError as error:
            answer = error
        finally:
            say = self._made if self.compiler is None else partial(self._through, number)
            self._loop.call_soon_threadsafe(say, answer)

    def _make_compiler(self) -> Any:
        from novainfer.actors.grammar.compiler import Compiler, GrammarError

        if (source := self._source()) is None:
            raise GrammarError(NO_TOKENIZER)
        return Compiler(source, self.vocab_size, self.eos_token_ids)

    def _made(self, compiler: Any) -> None:
        self.compiler = compiler
        for asked in list(self._asked.values()) if compiler is not None else ():
            self._look(asked)

    def _through(self, number: int, answer: Any) -> None:
        if number in self._left_behind:
            logger.warning("a thread that was left behind has compiled its grammar: it takes its place no more")
            del self._left_behind[number]
        elif answer is None:  # the thread has died
            return
        else:
            self._answer = answer
        self._perform(self.compiling.handle(Compiled(number)))

    # ---- what the machine decides --------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Start):
                self._start(effect.job)
            elif isinstance(effect, Send):
                event = effect.event
                self._failed(event.request_id, event.message, event.code)
            elif isinstance(effect, After):
                assert self._loop is not None
                self._timer = self._loop.call_later(effect.delay_s, self._over, effect.event)
            else:
                assert isinstance(effect, Drop)
                self._stop_timer()

    def _start(self, job: Compile | Share | LeaveBehind) -> None:
        if isinstance(job, Compile):
            self._thread.put(partial(self.compiler.compile, self._asked[job.request_id].grammar))
        elif isinstance(job, LeaveBehind):
            self._leave_behind(job.thread)
        else:
            self._share(job)

    def _share(self, job: Share) -> None:
        answer, self._answer = self._answer, None
        if isinstance(answer, Exception):
            for request_id in job.request_ids:
                self._fail(request_id, answer)
            return
        self._kept[job.grammar] = answer
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        for request_id in job.request_ids:
            self._found(request_id, answer)

    def _leave_behind(self, number: int) -> None:
        logger.warning("a grammar was not compiled in time: its request ends, and its thread is left behind")
        self._left_behind[number] = self._thread
        self._thread.abandon()
        self._thread.give_way()
        self._thread = self._make_thread(number + 1)

    def _over(self, event: CompileOver) -> None:
        self._timer = None
        self._perform(self.compiling.handle(event))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
