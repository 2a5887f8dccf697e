"""What a request may ask for: prompts, choices, seeds and stops."""

from __future__ import annotations

from typing import Any

import pytest

from novainfer import (
    Chat,
    ContextLengthExceeded,
    FinishReason,
    InvalidParameter,
    SamplingParams,
)
from novainfer.actors.device.fake import EOS, FakeDevice
from tests.actors.helpers import expected
from tests.api.helpers import ask, fake_engine, greedy

# ---- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("hello", list(b"hello")),
        ([104, 105], [104, 105]),
        ({"prompt": "hello"}, list(b"hello")),
        ({"prompt_token_ids": [104, 105]}, [104, 105]),
        ([{"role": "user", "content": "hi"}, {"role": "user", "content": "you"}], list(b"hi\nyou")),
        (Chat(messages=[{"role": "user", "content": "hi"}]), list(b"hi")),
        ("日本", list("日本".encode())),
    ],
    ids=str,
)
async def test_every_form_of_prompt_is_taken(prompt: Any, token_ids: list[int]) -> None:
    async with fake_engine() as engine:
        found = await ask(engine, prompt, greedy(5))
        assert found.prompt_token_ids == token_ids
        assert found.token_ids() == expected(token_ids, 5)
        assert found.text() == bytes(expected(token_ids, 5)).decode()
        assert (found.last.finish_reason, found.last.num_prompt_tokens) == (FinishReason.LENGTH, len(token_ids))
        assert found.last.num_generated_tokens == 5


@pytest.mark.parametrize("prompt", ["x" * 500 + "hello", [120] * 500 + list(b"hello")], ids=["text", "ids"])
@pytest.mark.parametrize(("kept", "num_kept"), [(5, 5), (3, 3), (1000, 505), (-1, 256 - 6)])
async def test_a_prompt_that_is_too_long_loses_its_beginning_where_it_may(
    prompt: Any, kept: int, num_kept: int
) -> None:
    max_model_len = 1024 if num_kept == 505 else 256
    async with fake_engine(FakeDevice(max_model_len=max_model_len)) as engine:
        found = await ask(engine, prompt, greedy(6, truncate_prompt_tokens=kept))
        assert found.prompt_token_ids == ([120] * 500 + list(b"hello"))[-num_kept:]
        assert (found.last.num_prompt_tokens, found.last.num_generated_tokens) == (num_kept, 6)
        assert engine.statistics().admission.num_queued_tokens == 0


async def test_a_prompt_that_is_kept_too_long_is_still_refused() -> None:
    async with fake_engine(FakeDevice(max_model_len=256)) as engine:
        with pytest.raises(ContextLengthExceeded):
            await ask(engine, "x" * 500, greedy(6, truncate_prompt_tokens=251))


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def _told(**kwargs: Any) -> Chat:
    return Chat(messages=[{"role": "user", "content": "x"}], template_kwargs=kwargs)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": "abc", "prompt": "x"}, "prompt"),
        ([257], "prompt"),
        ([-1], "prompt"),
        ([1, "2"], "prompt"),
        ([1.5], "prompt"),
        ([True], "prompt"),
        ([1, {"role": "user"}], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        (b"bytes", "prompt"),
        (Chat(messages=[]), "messages"),
        (Chat(messages=["hello"]), "messages"),  # type: ignore[list-item]
        ([{"content": "no role"}], "messages"),
        ([{"role": 5, "content": "x"}], "messages"),
        ("half \ud800", "prompt"),
        ([{"role": "user", "content": "half \ud800"}], "messages"),
        ([{"role": "user", "content": "x", "number": 10**30}], "messages"),
        ([{"role": "user", "content": "x", "set": {1, object()}}], "messages"),
        ([{"role": "user", "content": _nested(33)}], "messages"),
        (_told(chat_template="{{ 'x' * 50000000 }}"), "chat_template_kwargs.chat_template"),
        (_told(tokenize=True), "chat_template_kwargs.tokenize"),
        (_told(tools=[]), "chat_template_kwargs.tools"),
        (_told(deep=_nested(10_000)), "chat_template_kwargs"),
        (_told(number=2**64), "chat_template_kwargs"),
        (_told(text="\udfff"), "chat_template_kwargs"),
        (_told(text="x" * (16 << 10)), "chat_template_kwargs"),
        (Chat(messages=[{"role": "user"}], template_kwargs=[]), "chat_template_kwargs"),  # type: ignore[arg-type]
    ],
    ids=lambda value: ascii(value)[:40] if isinstance(value, str) else type(value).__name__,
)
async def test_a_bad_prompt_is_refused_and_names_the_field(prompt: Any, param: str) -> None:
    async with fake_engine() as engine:
        with pytest.raises(InvalidParameter) as caught:
            await ask(engine, prompt, greedy())
        assert caught.value.param == param
        assert engine.statistics().num_waiting == 0
        assert len(engine.check_room([prompt], greedy())) == 1, "whether there is room is another question"
        assert (await ask(engine, "next", greedy(2))).token_ids() == expected("next", 2)


async def test_token_ids_given_as_a_prompt_dict_win_over_its_text() -> None:
    async with fake_engine() as engine:
        found = await ask(engine, {"prompt": "x", "prompt_token_ids": [65]}, greedy(2))
        assert found.prompt_token_ids == [65]


async def test_a_prompt_beyond_the_context_says_how_long_it_may_be() -> None:
    async with fake_engine(FakeDevice(max_model_len=64)) as engine:
        with pytest.raises(ContextLengthExceeded, match="length is 64 tokens, but 100 prompt") as caught:
            await ask(engine, [65] * 100, SamplingParams(max_tokens=None))
        assert (caught.value.param, caught.value.status) == ("prompt", 400)
        with pytest.raises(ContextLengthExceeded, match="plus max_tokens=60") as caught:
            await ask(engine, [65] * 10, greedy(60))
        assert caught.value.param == "max_tokens"
        found = await ask(engine, [65] * 10, SamplingParams(temperature=0, max_tokens=None))
        assert found.last.num_generated_tokens == 54


async def test_the_context_is_no_longer_than_the_kv_cache() -> None:
    async with fake_engine(FakeDevice(num_blocks=4), max_num_seqs=4) as engine:
        assert engine.model_info.max_model_len == 64
        with pytest.raises(ContextLengthExceeded, match="64 tokens"):
            await ask(engine, [65] * 60, greedy(10))


# ---- choices, seeds, stops -----------------------------------------------------------------------------------------


async def test_n_choices_come_as_one_stream() -> None:
    async with fake_engine() as engine:
        found = await ask(engine, "abc", greedy(6, n=4))
        assert [found.token_ids(choice) for choice in range(4)] == [expected("abc", 6)] * 4
        assert {delta.finish_reason for delta in found.deltas} <= {None, FinishReason.LENGTH}
        assert sum(delta.finish_reason is not None for delta in found.deltas) == 4
        assert len({delta.request_id for delta in found.deltas}) == 1


async def test_more_choices_than_the_queue_holds_are_refused() -> None:
    async with fake_engine(max_num_queued_reqs=4) as engine:
        with pytest.raises(InvalidParameter, match="n must be at most 4, not 5"):
            await ask(engine, "abc", greedy(n=5))


async def test_a_seed_is_drawn_and_returned_when_none_is_given() -> None:
    async with fake_engine() as engine:
        seeds = {(await ask(engine, "abc", SamplingParams(max_tokens=1))).seed for _ in range(5)}
        assert None not in seeds
        assert len(seeds) == 5
        assert (await ask(engine, "abc", SamplingParams(max_tokens=1, seed=42))).seed == 42
        assert (await ask(engine, "abc", SamplingParams(max_tokens=1, seed=-1))).seed == 2**64 - 1


async def test_an_engine_with_a_seed_draws_the_same_seeds_again() -> None:
    drawn: list[list[int | None]] = []
    for _ in range(2):
        async with fake_engine(seed=7) as engine:
            drawn.append([(await ask(engine, "abc", SamplingParams(max_tokens=1))).seed for _ in range(3)])
    assert drawn[0] == drawn[1]


async def test_end_of_sequence_stops_and_ignore_eos_does_not() -> None:
    def next_token(token_id: int) -> int:
        return EOS if token_id == ord("c") else (token_id + 1) % EOS

    async with fake_engine(FakeDevice(next_token=next_token)) as engine:
        found = await ask(engine, "a", greedy(10))
        assert (found.text(), found.last.finish_reason, found.last.stop_reason) == ("bc", FinishReason.STOP, None)
        assert found.token_ids() == [*b"bc", EOS]
        found = await ask(engine, "a", greedy(10, ignore_eos=True))
        assert (found.last.finish_reason, found.last.num_generated_tokens) == (FinishReason.LENGTH, 10)
        found = await ask(engine, "a", greedy(10, min_tokens=5))
        assert found.last.num_generated_tokens >= 5


async def test_a_stop_string_ends_before_it_and_is_told() -> None:
    async with fake_engine() as engine:
        found = await ask(engine, "a", greedy(20, stop=["zz", "ef"]))
        assert (found.text(), found.last.finish_reason, found.last.stop_reason) == ("bcd", FinishReason.STOP, "ef")
        found = await ask(engine, "a", greedy(20, stop="ef", include_stop_str_in_output=True))
        assert found.text() == "bcdef"
        found = await ask(engine, "a", greedy(20, stop_token_ids=[ord("d")]))
        assert (found.text(), found.last.stop_reason) == ("bc", ord("d"))


async def test_text_never_splits_a_character() -> None:
    answer = "naïve 日本語 👩‍👩‍👧".encode()

    def next_token(token_id: int) -> int:
        return next_token.answer.pop(0) if next_token.answer else EOS  # type: ignore[attr-defined]

    next_token.answer = list(answer)  # type: ignore[attr-defined]
    async with fake_engine(FakeDevice(next_token=next_token)) as engine:
        found = await ask(engine, "a", greedy(200))
        assert found.text() == answer.decode()
        assert all("\ufffd" not in delta.text for delta in found.deltas)


async def test_each_choice_has_a_seed_of_its_own_by_which_it_is_had_alone() -> None:
    """The seed of a request is that of its first choice; JavaScript's numbers hold all that are drawn."""
    async with fake_engine() as engine:
        found = await ask(engine, "abc", SamplingParams(max_tokens=1, n=3))
        seeds = {delta.index: delta.seed for delta in found.deltas}
        assert [seeds[0] + i for i in range(3)] == [seeds[i] for i in range(3)]
        assert 0 <= seeds[0] < 2**52
        last = await ask(engine, "abc", SamplingParams(max_tokens=1, n=2, seed=2**64 - 1))
        assert {delta.index: delta.seed for delta in last.deltas} == {0: 2**64 - 1, 1: 0}


async def test_a_chat_beyond_the_context_names_its_messages() -> None:
    async with fake_engine(FakeDevice(max_model_len=64)) as engine:
        with pytest.raises(ContextLengthExceeded) as caught:
            await ask(engine, [{"role": "user", "content": "x" * 64}], greedy())
        assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("num_prompts", "params", "param"),
    [
        (1025, greedy(), "prompt"),
        (9, greedy(n=128), "n"),
        (1025, greedy(n=2), "prompt"),
        (2049, greedy(max_queue_s=1.0), "prompt"),
    ],
)
async def test_more_requests_than_the_queue_ever_holds_are_the_callers_fault(
    num_prompts: int, params: SamplingParams, param: str
) -> None:
    async with fake_engine() as engine:
        with pytest.raises(InvalidParameter, match=f"^{param}: .* and the queue holds") as caught:
            engine.check_room(["a"] * num_prompts, params)
        assert caught.value.param == param
        engine.check_room(["a"] * 1024, greedy())
        engine.check_room(["a"] * 8, greedy(n=128))


async def test_more_tokens_than_the_queue_ever_holds_are_the_callers_fault() -> None:
    async with fake_engine(max_num_queued_tokens=100) as engine:
        with pytest.raises(InvalidParameter, match="prompt: these have some 120 tokens, and the queue holds 100"):
            engine.check_room([[1] * 60, {"prompt_token_ids": [1] * 60}], greedy())
        engine.check_room([[1] * 300], greedy())  # one alone is let in
        engine.check_room(["a" * 60, Chat(messages=[{"role": "user", "content": "hi"}])], greedy())


@pytest.mark.parametrize("name", ["half \ud800", "x" * 513])
async def test_an_id_that_no_recording_can_hold_is_refused(name: str) -> None:
    async with fake_engine() as engine:
        with pytest.raises(InvalidParameter, match="request_id"):
            engine.add_request("abc", greedy(), request_id=name)
