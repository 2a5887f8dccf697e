"""Tokenizers without their models: loaded once, kept for a while, and never more than a few."""

import asyncio

import pytest

from novainfer import Chat, EngineClosed, EngineConfig, EngineOverloaded, ModelLoadError
from novainfer.tokens import TOKENIZERS_MAX, ModelTokens, Tokenizers

CHAT = Chat(messages=[{"role": "user", "content": "Hello"}])


class Scripted(ModelTokens):
    """A tokenizer that comes up at once; `made` are all, in order."""

    made: list["Scripted"]

    def __init__(self, name: str, error: ModelLoadError | None = None) -> None:
        self.name = name
        self.error = error
        self.num_starts = 0
        self.closed = asyncio.Event()
        self.made.append(self)

    async def start(self) -> None:
        self.num_starts += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error

    async def aclose(self) -> None:
        self.closed.set()


@pytest.fixture(autouse=True)
def made() -> list[Scripted]:
    Scripted.made = []
    return Scripted.made


async def test_a_tokenizer_alone_makes_the_tokens_that_its_engine_makes():
    tokens = ModelTokens(EngineConfig(model="demo", max_model_len=64))
    await tokens.start()
    try:
        ids = await tokens.tokenize("Hello world")
        assert b"".join(await tokens.detokenize(ids)).endswith(b"Hello world")
        assert len(await tokens.tokenize(CHAT)) > len(await tokens.tokenize("Hello"))
        assert tokens.max_model_len == 64
        assert tokens.tokenizer_info().chat_template is not None
    finally:
        await tokens.aclose()
    with pytest.raises(EngineClosed):
        await tokens.tokenize("Hello")


async def test_one_that_is_missing_says_so_and_leaves_nothing(tmp_path):
    tokens = ModelTokens(EngineConfig(model=tmp_path))
    with pytest.raises(ModelLoadError):
        await tokens.start()
    assert tokens._running is not None
    assert tokens._running.done()


async def test_one_is_loaded_once_for_all_who_ask_and_goes_when_it_was_idle_for_long(made):
    tokenizers = Tokenizers(Scripted, idle_s=0.0)

    async def use() -> None:
        async with tokenizers.use("a"):
            await asyncio.sleep(0)

    await asyncio.gather(use(), use(), use())
    assert [one.num_starts for one in made] == [1]
    await made[0].closed.wait()
    await use()
    assert len(made) == 2
    await tokenizers.aclose()
    assert all(one.closed.is_set() for one in made)


async def test_there_are_few_and_the_one_that_was_used_longest_ago_goes(made):
    tokenizers = Tokenizers(Scripted)
    for name in ("a", "b", "a", "c"):
        async with tokenizers.use(name):
            pass
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert TOKENIZERS_MAX == 2
    assert [(one.name, one.closed.is_set()) for one in made] == [("a", False), ("b", True), ("c", False)]
    async with tokenizers.use("a"), tokenizers.use("c"):
        with pytest.raises(EngineOverloaded):
            async with tokenizers.use("b"):
                pass
    await tokenizers.aclose()


async def test_one_that_cannot_be_loaded_is_tried_again(made):
    errors = iter([ModelLoadError("it is damaged"), None])
    tokenizers = Tokenizers(lambda name: Scripted(name, next(errors)))
    with pytest.raises(ModelLoadError):
        async with tokenizers.use("a"):
            pass
    async with tokenizers.use("a") as found:
        assert found is made[1]
    await tokenizers.aclose()
