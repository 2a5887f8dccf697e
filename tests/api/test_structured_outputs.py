"""Answers that are held to a grammar, from the demo model: each is what was asked for, whatever befalls its worker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from typing import Any

import pytest

from novainfer import (
    Engine,
    EngineConfig,
    EngineOverloaded,
    GrammarLimit,
    InvalidParameter,
    NoTokenAllowed,
    SamplingParams,
    StructuredOutputsParams,
)
from novainfer.actors.grammar import masking
from novainfer.actors.grammar.compiler import Compiler, Masks
from novainfer.fsm.device.compiling import CompileOver
from novainfer.fsm.messages.structured import GRAMMAR_BYTES_MAX
from tests.api.helpers import ask, blocks_back, eventually, fake_engine
from tests.api.test_speculation import LOOKUP

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 10, "maximum": 99},
        "kind": {"enum": ["fox", "bear"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
        "name": {"type": "string", "minLength": 3, "maxLength": 12},
    },
    "required": ["count", "kind", "flags", "name"],
    "additionalProperties": False,
}
NUMBER = {"type": "integer", "minimum": 10, "maximum": 99}
TAGGED = {"structures": [{"begin": "The", "schema": NUMBER, "end": ";"}], "triggers": ["The"]}
PROMPT = "Once upon a time there was a fox. "


# The default is room for the schema above however it is indented: how much of that a model likes is its own affair.
def held_to(max_tokens: int = 900, *, temperature: float = 0.0, seed: int = 7, **how: Any) -> SamplingParams:
    more = {name: how.pop(name) for name in list(how) if name in SamplingParams.__struct_fields__}
    grammar = StructuredOutputsParams(**how)
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, structured_outputs=grammar, **more)


def check_schema(text: str) -> bool:
    found = json.loads(text)
    assert list(found) == ["count", "kind", "flags", "name"]
    assert type(found["count"]) is int
    assert 10 <= found["count"] <= 99
    assert found["kind"] in ("fox", "bear")
    assert 2 <= len(found["flags"]) <= 4
    assert all(type(flag) is bool for flag in found["flags"])
    return 3 <= len(found["name"]) <= 12


@pytest.mark.slow
async def test_every_kind_of_grammar_is_kept_to_and_ends_where_it_accepts() -> None:
    whole = r"\{\"count\":[1-9][0-9],.*\}"
    asked: list[tuple[SamplingParams, Any]] = [
        *((held_to(json=SCHEMA, temperature=t, seed=s), check_schema) for t, s in ((0.0, 1), (1.0, 2), (1.5, 3))),
        (held_to(json=json.dumps(SCHEMA), disable_any_whitespace=True), lambda text: re.fullmatch(whole, text)),
        (held_to(json=SCHEMA, whitespace_pattern=" "), lambda text: check_schema(text) and "\n" not in text),
        (held_to(regex=r"[a-c]{3}-[0-9]{2}"), lambda text: re.fullmatch(r"[a-c]{3}-[0-9]{2}", text)),
        (held_to(choice=["a badger", "an owl"]), lambda text: text in ("a badger", "an owl")),
        (held_to(grammar='root ::= "sum: " [0-9] "+" [0-9]'), lambda text: re.fullmatch(r"sum: \d\+\d", text)),
        (held_to(grammar='start: "x" Y\nY: /[yz]{4}/'), lambda text: re.fullmatch(r"x[yz]{4}", text)),
        (held_to(150, json_object=True, min_tokens=4, logit_bias={}), lambda text: text.startswith("{")),
        (held_to(json=SCHEMA, presence_penalty=1.0, repetition_penalty=1.3, logprobs=2), check_schema),
        (held_to(json=SCHEMA, stop=['"kind"']), lambda text: json.loads(text.rstrip(", \n") + "}")["count"]),
        # It is complete with its second token, and nothing but its end may follow, however early.
        (held_to(choice=["yes"], min_tokens=40), lambda text: text == "yes"),
    ]
    async with Engine(EngineConfig(max_num_seqs=16)) as engine:
        answers = await asyncio.gather(*(ask(engine, PROMPT, params) for params, _ in asked))
        for answer, (params, is_right) in zip(answers, asked, strict=True):
            text = answer.text()
            assert is_right(text), (text, params.structured_outputs)
            if params.structured_outputs and not params.structured_outputs.json_object:
                assert answer.last.finish_reason == "stop", text
        await blocks_back(engine)
        assert engine._runtime._grammars.num_held == 0


@pytest.mark.slow
async def test_text_is_free_up_to_a_trigger_and_held_to_the_schema_behind_it() -> None:
    async with Engine(EngineConfig()) as engine:
        fact = "The capital of France is Paris."
        plain = (await ask(engine, fact, SamplingParams(max_tokens=60, temperature=0.0, min_tokens=60))).text()
        assert not [record.name for record in engine.actors() if "grammar" in record.name]
        text = (await ask(engine, fact, held_to(60, structural_tag=TAGGED, min_tokens=60))).text()
        done = {record.name: record.handled_total for record in engine.actors() if record.state in ("IDLE", "WORKING")}
        assert done["grammar compiler"] == 2  # what compiles is made first
        assert done["grammar masks"] > 50
        begin = plain.index("The") + len("The")
        assert text[:begin] == plain[:begin]
        assert text.count("The") > 1
        assert all(re.match(r"[1-9][0-9];", behind) for behind in text.split("The")[1:-1]), text


@pytest.mark.slow
async def test_choices_beside_free_requests_and_guesses_give_what_each_gives_alone() -> None:
    asked = [held_to(json=SCHEMA, temperature=1.0, n=3), held_to(json=SCHEMA, seed=5)]
    free = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)

    async def all_of(**config: Any) -> list[Any]:
        async with Engine(EngineConfig(**config)) as engine:
            answers = await asyncio.gather(*(ask(engine, PROMPT, params) for params in (*asked, free)))
            return [[answer.token_ids(choice) for choice in range(3)] for answer in answers]

    together = await all_of()
    assert await all_of(max_num_seqs=1) == together
    assert await all_of(speculative_config=LOOKUP) == together
    assert len({tuple(tokens) for tokens in together[0]}) == 3


@pytest.mark.slow
async def test_an_answer_goes_on_token_for_token_when_its_worker_is_killed() -> None:
    asked = [held_to(json=SCHEMA), held_to(json=SCHEMA, temperature=1.0, n=2), held_to(400, json_object=True)]

    async def all_of(engine: Engine, seen: list[str]) -> list[list[list[int]]]:
        async def one(params: SamplingParams) -> list[list[int]]:
            found: list[list[int]] = [[] for _ in range(params.n)]
            async for delta in engine.generate(PROMPT, params):
                found[delta.index] += delta.token_ids
                seen.append(delta.text)
            return found

        return await asyncio.gather(*map(one, asked))

    async with Engine(EngineConfig(worker="process", dtype="float32", max_num_seqs=8)) as engine:
        wanted = await all_of(engine, [])
        for at in range(2):
            seen: list[str] = []
            answers = asyncio.create_task(all_of(engine, seen))
            await eventually(lambda at=at, seen=seen: len(seen) > 10 + 60 * at)
            os.kill(engine._runtime._link.pid, signal.SIGKILL)
            assert await answers == wanted
        assert engine.statistics().worker_losses == 2


@pytest.mark.slow
async def test_a_grammar_that_cannot_be_used_ends_its_request_alone_with_a_sentence() -> None:
    bad: list[tuple[SamplingParams, type[Exception], str]] = [
        (held_to(regex="a(?=b)"), InvalidParameter, "the regular expression cannot be used: .*look-around"),
        (held_to(json="{"), InvalidParameter, "the JSON schema cannot be used"),
        (held_to(json={"type": "foo"}), InvalidParameter, "Invalid type: foo"),
        (held_to(grammar="start: ("), InvalidParameter, "the grammar cannot be used"),
        (held_to(structural_tag={"structures": [], "triggers": []}), InvalidParameter, "at least one"),
        (held_to(json={"multipleOf": 1000003, "type": "integer"}), GrammarLimit, "multipleOf 1000003 .* 10000"),
        (held_to(regex="(a{1000}){1000}"), GrammarLimit, r"step_lexer_fuel \(200000\)"),
        (held_to(regex="[ab]+", allowed_token_ids=[5]), NoTokenAllowed, "its grammar allows none"),
    ]
    async with Engine(EngineConfig()) as engine:
        right = asyncio.create_task(ask(engine, PROMPT, held_to(json=SCHEMA)))
        for params, kind, sentence in bad:
            with pytest.raises(kind, match=sentence):
                await ask(engine, PROMPT, params)
        assert check_schema((await right).text())
        assert engine._runtime._grammars.num_held == 0


class Endless:
    """Compiling a regular expression of `ENDLESS` returns when it is let go of, each by itself."""

    ENDLESS = ("x1", "x2")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.goes_on = {source: threading.Event() for source in self.ENDLESS}
        compile_ = Compiler.compile

        def compile_or_block(compiler: Compiler, params: StructuredOutputsParams) -> Any:
            self.begun.append(params.source)
            if params.source in self.goes_on:
                self.goes_on[params.source].wait()
            return compile_(compiler, params)

        monkeypatch.setattr(Compiler, "compile", compile_or_block)

    def left_behind(self, engine: Engine) -> int:
        assert engine.health().is_live
        return sum(record.state == "LEFT_BEHIND" for record in engine.actors())


def time_is_over(engine: Engine) -> None:
    """For the grammar that is compiled now; its timer runs out on the loop, and in no task."""
    compilers = engine._runtime._grammars._compilers
    compilers._stop_timer()
    asyncio.get_running_loop().call_soon(compilers._over, CompileOver(compilers.compiling.thread))


async def test_a_grammar_that_is_compiled_for_ever_ends_its_request_and_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endless = Endless(monkeypatch)
    known, other, third = (held_to(choice=[word]) for word in ("fox", "bear", "owl"))
    async with Engine(EngineConfig()) as engine:
        assert (await ask(engine, PROMPT, known)).text() == "fox"
        stuck = asyncio.create_task(ask(engine, PROMPT, held_to(regex="x1", n=3)))
        await eventually(lambda: "x1" in endless.begun)
        waits = asyncio.create_task(ask(engine, PROMPT, other))
        assert (await ask(engine, PROMPT, known)).text() == "fox"
        assert not waits.done()
        time_is_over(engine)
        with pytest.raises(GrammarLimit, match=r"compile_limit_s \(10\)"):
            await stuck
        assert (await waits).text() == "bear"
        with pytest.raises(GrammarLimit, match="compile_limit_s"):
            await ask(engine, PROMPT, held_to(regex="x1"))
        assert endless.left_behind(engine) == 1

        stuck = asyncio.create_task(ask(engine, PROMPT, held_to(regex="x2")))
        await eventually(lambda: "x2" in endless.begun)
        time_is_over(engine)
        with pytest.raises(GrammarLimit, match="compile_limit_s"):
            await stuck
        assert endless.left_behind(engine) == 2
        with pytest.raises(EngineOverloaded, match="2 that take too long are still at work"):
            await ask(engine, PROMPT, third)
        assert (await ask(engine, PROMPT, other)).text() == "bear"

        endless.goes_on["x1"].set()
        await eventually(lambda: endless.left_behind(engine) == 1)
        assert (await ask(engine, PROMPT, third)).text() == "owl"
        assert (await ask(engine, PROMPT, held_to(regex="x1"))).text() == "x1"
        assert engine._runtime._grammars.num_held == 0
    assert endless.begun.count("x1") == 2
    endless.goes_on["x2"].set()  # it was not waited for
    await eventually(lambda: all(thread.name != "novainfer-grammar-compiler" for thread in threading.enumerate()))


async def test_who_waits_for_a_costly_mask_waits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, is_blocked = threading.Event(), threading.Event()
    advance = Masks.advance

    def advance_or_block(masks: Masks, *rows: Any) -> Any:
        if threading.current_thread().name == "novainfer-grammar-slow-masks":
            is_blocked.set()
            goes_on.wait()
        return advance(masks, *rows)

    monkeypatch.setattr(Masks, "advance", advance_or_block)
    monkeypatch.setattr(masking, "SLOW_S", -1.0)
    async with Engine(EngineConfig()) as engine:
        costly = asyncio.create_task(ask(engine, PROMPT, held_to(regex="[ab]{20}")))
        await eventually(is_blocked.is_set)
        monkeypatch.setattr(masking, "SLOW_S", 1e9)
        assert len((await ask(engine, PROMPT, held_to(regex="[cd]{20}"))).text()) == 20
        assert not costly.done()
        goes_on.set()
        assert re.fullmatch("[ab]{20}", (await costly).text())
        slow = next(record for record in engine.actors() if record.name == "grammar slow masks")
        assert slow.handled_total == 1  # it was quick by itself, and joined the others again


async def test_a_model_without_a_tokenizer_says_so() -> None:
    async with fake_engine() as engine:
        with pytest.raises(InvalidParameter, match="no tokenizer, which structured outputs need"):
            await ask(engine, [1, 2, 3], held_to(regex="a"))
        assert len((await ask(engine, [1, 2, 3], SamplingParams(max_tokens=2))).token_ids()) == 2


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({}, "must hold exactly one of json, regex, choice, grammar, json_object, structural_tag, and none is given"),
        ({"regex": "a", "choice": ["b"]}, "not regex and choice"),
        ({"choice": []}, "between 1 and 4096 strings, not 0"),
        ({"choice": [""]}, "strings that are not empty"),
        ({"regex": ""}, "regex must not be empty"),
        ({"regex": "a" * (GRAMMAR_BYTES_MAX + 1)}, f"at most {GRAMMAR_BYTES_MAX} bytes"),
        ({"json_object": False}, "none is given"),
        ({"regex": "\ud800"}, "regex holds half of a surrogate pair"),
        ({"json_object": True, "whitespace_pattern": "\udfff"}, "whitespace_pattern holds half of a surrogate pair"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "exclude each other"),
    ],
)
def test_a_grammar_that_is_none_is_refused_at_once(how: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(sentence)) as caught:
        StructuredOutputsParams(**how)
    assert (caught.value.param or "").startswith("structured_outputs")


def test_a_dict_is_no_grammar_and_is_refused_before_an_engine_has_it() -> None:
    grammar: Any = {"regex": "a"}
    with pytest.raises(
        InvalidParameter, match="structured_outputs must be StructuredOutputsParams, not dict"
    ) as caught:
        SamplingParams(structured_outputs=grammar)
    assert caught.value.param == "structured_outputs"


def test_an_answer_cannot_go_on_behind_the_end_of_its_grammar() -> None:
    with pytest.raises(InvalidParameter, match="ignore_eos cannot be combined with structured_outputs"):
        held_to(regex="a", ignore_eos=True)
