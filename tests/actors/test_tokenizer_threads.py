"""The tokenizer's lanes: what one prompt can delay, what a cancel leaves behind, and an end that comes in any case."""

from __future__ import annotations

import asyncio
import threading
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest

from novainfer.actors.device.fake import ByteTokenizer, FakeDevice
from novainfer.actors.tokenizer.threads import ASKED_MAX, BATCH_BYTES, BATCH_MAX, LARGE_BYTES, size_of
from novainfer.actors.tokenizer.tokenizer import NFC_SHRINK, HFTokenizer
from novainfer.fsm.messages.errors import ContextLengthExceeded, EngineClosed, EngineOverloaded
from novainfer.fsm.messages.events import Chat, Encoded
from tests.actors.helpers import WAIT_S, answer, ask, eventually, params, read_all, running

LARGE = "x" * (LARGE_BYTES + 1)
DEVICE_TOKENS = 8 * LARGE_BYTES


class Gated(ByteTokenizer):
    """Holds each batch until it is let through; `batches` are those that have begun."""

    def __init__(self, *, holds: int = LARGE_BYTES) -> None:
        self._holds = holds  # only prompts of more bytes
        self._permits = threading.Semaphore(0)
        self.batches: list[list[str | Chat]] = []

    def encode_batch(self, prompts: Sequence[str | Chat]) -> list[list[int] | str]:
        self.batches.append(list(prompts))
        if any(size_of(prompt) > self._holds for prompt in prompts):
            assert self._permits.acquire(timeout=WAIT_S), "the tokenizer was never let through"
        return super().encode_batch(prompts)

    def let(self, count: int = 1) -> None:
        self._permits.release(count)


def device() -> FakeDevice:
    return FakeDevice(num_blocks=DEVICE_TOKENS, max_model_len=DEVICE_TOKENS)


async def test_small_prompts_pass_a_large_one() -> None:
    tokenizer = Gated()
    async with running(device(), tokenizer=tokenizer) as runtime:
        large = ask(runtime, LARGE, params(1))
        await eventually(lambda: tokenizer.batches == [[LARGE]])
        for _ in range(3):
            assert (await answer(runtime, "small", params(1))).is_well
        assert not large.has_deltas
        tokenizer.let()
        assert (await read_all(large)).is_well


async def test_large_prompts_are_tokenised_one_at_a_time_and_small_ones_in_bounded_batches() -> None:
    tokenizer = Gated(holds=0)
    async with running(device(), tokenizer=tokenizer) as runtime:
        first = ask(runtime, "first", params(1))
        await eventually(lambda: len(tokenizer.batches) == 1)
        many = [ask(runtime, "s" * 2048, params(1)) for _ in range(200)]
        tiny = [ask(runtime, "t", params(1)) for _ in range(3 * BATCH_MAX)]
        large = [ask(runtime, LARGE + str(i), params(1)) for i in range(3)]
        tokenizer.let(1000)
        for handle in (first, *many, *tiny, *large):
            assert (await read_all(handle)).is_well
    sizes = [sum(map(size_of, batch)) for batch in tokenizer.batches]
    assert all(size <= BATCH_BYTES for size in sizes)
    assert max(map(len, tokenizer.batches)) <= BATCH_MAX
    assert [len(batch) for batch in tokenizer.batches if size_of(batch[0]) > LARGE_BYTES] == [1, 1, 1]


async def test_each_chat_is_a_batch_of_its_own() -> None:
    """Sixty-four templates that run into their limit of 2 s would else be one silence of two minutes."""
    tokenizer = Gated(holds=0)
    chat = Chat(messages=[{"role": "user", "content": "hi"}])
    async with running(device(), tokenizer=tokenizer) as runtime:
        first = ask(runtime, "first", params(1))
        await eventually(lambda: len(tokenizer.batches) == 1)
        handles = [ask(runtime, prompt, params(1)) for prompt in ("a", "b", chat, chat, "c", "d")]
        tokenizer.let(10)
        for handle in (first, *handles):
            assert (await read_all(handle)).is_well
    assert tokenizer.batches == [["first"], ["a", "b"], [chat], [chat], ["c", "d"]]


async def test_asked_prompts_take_turns_with_those_of_requests() -> None:
    """However many tokens are asked for, a request's prompt waits for one batch of them."""
    tokenizer = Gated(holds=0)
    async with running(device(), tokenizer=tokenizer) as runtime:
        asked = [asyncio.create_task(runtime.tokenize(LARGE + str(i))) for i in range(4)]
        await eventually(lambda: len(tokenizer.batches) == 1)
        requests = [ask(runtime, LARGE + name, params(1)) for name in "xy"]
        tokenizer.let(6)
        for handle in requests:
            assert (await read_all(handle)).is_well
        for i, task in enumerate(asked):
            assert (await task) == Encoded(-1 - i, list((LARGE + str(i)).encode()))
        assert runtime._threads.num_waiting == 0
    assert [batch[0][-1] for batch in tokenizer.batches if isinstance(batch[0], str)] == ["0", "x", "1", "y", "2", "3"]


async def test_so_many_prompts_may_be_asked_and_one_whose_asker_leaves_is_dropped() -> None:
    tokenizer = Gated(holds=0)
    async with running(device(), tokenizer=tokenizer) as runtime:
        asked = [asyncio.create_task(runtime.tokenize(f"{i}")) for i in range(ASKED_MAX)]
        await eventually(lambda: runtime._threads.num_waiting == ASKED_MAX)
        with pytest.raises(EngineOverloaded):
            await runtime.tokenize("too many")
        asked[5].cancel()
        await eventually(lambda: runtime._threads.num_waiting == ASKED_MAX - 1)
        last = asyncio.create_task(runtime.tokenize("last"))
        tokenizer.let(ASKED_MAX)
        assert isinstance(await last, Encoded)
        await asyncio.gather(*asked, return_exceptions=True)
    assert sum(len(batch) for batch in tokenizer.batches) == ASKED_MAX
    assert ["5"] not in [[prompt] for batch in tokenizer.batches for prompt in batch]


async def test_who_waits_for_tokens_hears_that_the_engine_ends() -> None:
    tokenizer = Gated(holds=0)
    async with running(device(), tokenizer=tokenizer) as runtime:
        asked = [asyncio.create_task(runtime.tokenize(name)) for name in "ab"]
        await eventually(lambda: runtime._threads.num_waiting == 2)
        tokenizer.let()
    for task in asked:
        with pytest.raises(EngineClosed):
            await task
    with pytest.raises(EngineClosed):
        await runtime.tokenize("late")


async def test_a_cancelled_prompt_is_dropped_when_its_credits_come_back() -> None:
    """The queue's limit bounds what waits, however fast clients come and go."""
    tokenizer = Gated()
    async with running(device(), tokenizer=tokenizer, max_queue=(4, 1 << 20)) as runtime:
        ask(runtime, LARGE, params(1))
        await eventually(lambda: len(tokenizer.batches) == 1)
        for _ in range(400):
            gone = ask(runtime, LARGE, params(1))
            await eventually(lambda: runtime._threads.num_waiting == 2)
            runtime.abandon(gone.stream_id)
            await eventually(lambda: runtime._threads.num_waiting == 1)
        last = ask(runtime, LARGE + "!", params(1))
        tokenizer.let(2)
        assert (await read_all(last)).is_well
    assert len(tokenizer.batches) == 2


async def test_an_engine_that_is_closed_waits_for_no_tokenizer_that_never_returns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("novainfer.actors.tokenizer.threads.LAST_WORD_S", 0.01)
    tokenizer = Gated()
    async with running(device(), tokenizer=tokenizer) as runtime:
        handle = ask(runtime, LARGE, params(1))
        await eventually(lambda: len(tokenizer.batches) == 1)
        await runtime.aclose()
        assert (await read_all(handle)).end.code == "draining"
    assert any("novainfer-tokenizer-large is left behind" in message for message in caplog.messages)
    (left,) = [thread for thread in threading.enumerate() if thread.name == "novainfer-tokenizer-large"]
    tokenizer.let()
    await asyncio.to_thread(left.join)


# ---- what is refused before it is tokenised --------------------------------------------------------------------------


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    tokenizer = Gated(holds=1 << 30)
    async with running(FakeDevice(max_model_len=64), tokenizer=tokenizer) as runtime:
        with pytest.raises(ContextLengthExceeded, match="context length is 64 tokens, but the prompt has at least 65"):
            ask(runtime, "x" * 65)
        assert runtime.num_queued == 0
        assert not tokenizer.batches
        assert (await answer(runtime, "x" * 60, params(1))).is_well


@pytest.mark.parametrize("name", ["ascii", "composed", "tokens", "spaces", "mixed"])
def test_no_text_has_fewer_tokens_than_its_lower_bound(demo: HFTokenizer, name: str) -> None:
    longest = max(demo._tokenizer.get_vocab(), key=len)
    text = {
        "ascii": "the quick brown fox " * 50,
        "composed": "\u0399\u0308\u0301\u03b9\u0308\u0301" * 200,
        "tokens": "<|im_start|>" * 100,
        "spaces": " " * 1000,
        "mixed": demo._tokenizer.convert_tokens_to_string([longest]) * 100,
    }[name]
    (found,) = demo.encode_batch([text])
    assert isinstance(found, list)
    assert 0 < demo.tokens_min(text) <= len(found)


def test_composing_characters_makes_of_three_bytes_one_at_least() -> None:
    points = (chr(point) for point in range(0x110000) if not 0xD800 <= point <= 0xDFFF)
    longest = max(
        max(len(unicodedata.normalize("NFD", char).encode()), len(char.encode()))
        / len(unicodedata.normalize("NFC", char).encode())
        for char in points
    )
    assert longest == NFC_SHRINK


@pytest.fixture(scope="module")
def demo() -> HFTokenizer:
    from importlib.resources import files

    return HFTokenizer(Path(str(files("novainfer.kernels"))) / "demo" / "model")
