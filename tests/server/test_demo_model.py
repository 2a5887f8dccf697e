"""The whole path: OpenAI's own client, over each version of HTTP, to the demo model."""

import asyncio
import json
import re
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from novainfer import Engine, EngineConfig
from novainfer.server.serve import Server
from novainfer.server.settings import ServerSettings
from tests.server.test_chat import events

pytestmark = pytest.mark.slow  # loading torch takes two seconds

KEY = "test-key"
SUM = [{"role": "user", "content": "What is 7 + 5?"}]


class DemoServer:
    """The demo model behind HTTP, in a thread with a loop of its own, as an application beside its clients."""

    def __init__(self, *api_keys: str, recorder_dir: Path | None = None, **settings: Any) -> None:
        self._settings = {"port": 0, "api_keys": api_keys, "shutdown_timeout_s": 0.0, **settings}
        self._recorder_dir = recorder_dir
        self.server: Server
        self.engine: Engine
        self._loop: asyncio.AbstractEventLoop
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.server = Server(ServerSettings(**self._settings))

        def make_engine() -> Engine:
            self.engine = Engine(EngineConfig(num_threads=2, max_num_seqs=64, recorder_dir=self._recorder_dir))
            return self.engine

        await self.server.run(make_engine, on_ready=self._ready.set)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self.server.stop.set)
        self._thread.join()
        assert self._error is None


@pytest.fixture(scope="module")
def demo() -> Iterator[DemoServer]:
    server = DemoServer(KEY)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def open_demo() -> Iterator[DemoServer]:
    """One that wants no key, as the docs assume."""
    server = DemoServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["http/1.1", "h2c"])
def client(request: pytest.FixtureRequest, demo: DemoServer) -> openai.AsyncOpenAI:
    """OpenAI's client, plain and with an HTTP/2 transport."""
    http2 = request.param == "h2c"
    return openai.AsyncOpenAI(
        base_url=f"{demo.server.url}/v1",
        api_key=KEY,
        max_retries=0,
        http_client=httpx2.AsyncClient(http1=not http2, http2=http2, timeout=30),
    )


async def idle(demo: DemoServer) -> None:
    """Wait until the engine has nothing to do: what was cancelled must be gone, blocks and all."""
    async with asyncio.timeout(10):
        while (found := demo.engine.statistics()).num_running or found.num_waiting or found.kv_blocks_owned:  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # the engine lives in another thread's loop


async def test_openais_client_streams_a_sensible_answer(client: openai.AsyncOpenAI) -> None:
    async with client:
        stream = await client.chat.completions.create(
            model="demo", messages=SUM, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        assert "12" in text
        assert chunks[-2].choices[0].finish_reason == "stop"
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.completion_tokens > 3
        whole = await client.chat.completions.create(model="demo", messages=SUM, temperature=0)
        assert whole.choices[0].message.content == text
        assert whole.usage is not None
        assert whole.usage.completion_tokens == usage.completion_tokens
        assert [model.id async for model in client.models.list()] == ["demo"]


@pytest.mark.parametrize("http2", [False, True], ids=["http/1.1", "h2c"])
async def test_anthropics_client_gets_the_answer_that_openais_gets(demo: DemoServer, http2: bool) -> None:
    http_client = httpx2.AsyncClient(http1=not http2, http2=http2, timeout=30)
    asked: Any = {"model": "demo", "messages": SUM, "extra_body": {"temperature": 0}}
    async with (
        openai.AsyncOpenAI(base_url=f"{demo.server.url}/v1", api_key=KEY, http_client=http_client) as theirs,
        anthropic.AsyncAnthropic(
            base_url=demo.server.url,
            api_key=KEY,
            max_retries=0,
            http_client=http_client,
            _strict_response_validation=True,
        ) as claude,
    ):
        expected = await theirs.chat.completions.create(**asked)
        message = await claude.messages.create(**asked, max_tokens=2000)
        async with claude.messages.stream(**asked, max_tokens=5000) as stream:
            events = [event.type async for event in stream]
            final = await stream.get_final_message()
        count = await claude.messages.count_tokens(model="demo", messages=asked["messages"])
        stopped = await claude.messages.create(**asked, max_tokens=60, stop_sequences=["12"])
        held = await claude.messages.create(
            **asked,
            max_tokens=60,
            output_config={"format": {"type": "json_schema", "schema": {"enum": ["twelve", "seven"]}}},
        )
    [said] = message.content
    assert said.type == "text"
    assert said.text == expected.choices[0].message.content == text_of(final)
    assert expected.usage is not None
    for usage in (message.usage, final.usage):
        assert usage.output_tokens == expected.usage.completion_tokens
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == expected.usage.prompt_tokens
    assert count.input_tokens == expected.usage.prompt_tokens
    assert (events[0], events[-1], final.stop_reason) == ("message_start", "message_stop", "end_turn")
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "12")
    assert text_of(stopped) == said.text.partition("12")[0]
    assert text_of(held) in ('"twelve"', '"seven"')


def text_of(message: anthropic.types.Message) -> str:
    [block] = message.content
    assert block.type == "text"
    return block.text


async def test_completions_take_every_form_of_prompt(client: openai.AsyncOpenAI) -> None:
    async with client:
        text = await client.completions.create(model="demo", prompt=["Once upon"] * 2, max_tokens=8, temperature=0, n=2)
        assert len({choice.text for choice in text.choices}) == 1
        assert [choice.index for choice in text.choices] == [0, 1, 2, 3]
        extra = {"return_token_ids": True}
        by_ids = await client.completions.create(
            model="demo", prompt=[[300, 301], [302]], max_tokens=3, logprobs=2, extra_body=extra
        )
        assert by_ids.choices[1].model_extra is not None
        assert by_ids.choices[1].model_extra["prompt_token_ids"] == [302]
        logprobs = by_ids.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert len(logprobs.tokens) == 3


async def test_embeddings_are_vectors_in_every_form(demo: DemoServer, client: openai.AsyncOpenAI) -> None:
    """OpenAI's client asks for base64 unless it is told otherwise, and gives numbers."""
    async with client:
        texts = ["What is 7 + 5?", "What is 7 + 4?", "The capital of France is Paris."]
        found = await client.embeddings.create(model="demo", input=texts)
        first, second, third = (item.embedding for item in found.data)
        assert [len(first), len(second), len(third)] == [192] * 3
        assert [item.index for item in found.data] == [0, 1, 2]
        assert sum(number * number for number in first) == pytest.approx(1.0)

        def cosine(a: list[float], b: list[float]) -> float:
            return sum(x * y for x, y in zip(a, b, strict=True))

        assert cosine(first, second) > cosine(first, third)
        numbers = await client.embeddings.create(model="demo", input=texts[0], encoding_format="float")
        assert numbers.data[0].embedding == pytest.approx(first, abs=2e-3)
        ids = await demo_ids(demo, texts[0])
        by_ids = await client.embeddings.create(model="demo", input=[ids, ids[:3]], dimensions=16)
        assert by_ids.usage.prompt_tokens == by_ids.usage.total_tokens == len(ids) + 3
        assert [len(item.embedding) for item in by_ids.data] == [16, 16]
        more = {"pooling": "mean", "normalize": False}
        mean = await client.embeddings.create(model="demo", input=texts[0], user="me", extra_body=more)
        assert mean.data[0].embedding != pytest.approx(first, abs=0.1)
        with pytest.raises(openai.BadRequestError, match="dimensions must be between 1 and 192, not 193") as caught:
            await client.embeddings.create(model="demo", input="x", dimensions=193)
        assert caught.value.param == "dimensions"
        with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as caught:
            await client.embeddings.create(model="demo", input=[[5] * 3, [5] * 2049])
        assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")


async def demo_ids(demo: DemoServer, text: str) -> list[int]:
    async with httpx.AsyncClient(base_url=demo.server.url, headers={"authorization": f"Bearer {KEY}"}) as http:
        found = (await http.post("/tokenize", json={"prompt": text})).json()
    ids: list[int] = found["tokens"]
    return ids


async def test_a_seed_gives_the_same_answer_again(client: openai.AsyncOpenAI) -> None:
    async with client:

        async def story(seed: int | None) -> openai.types.Completion:
            return await client.completions.create(
                model="demo", prompt="Once", max_tokens=20, temperature=1.5, seed=seed
            )

        first = await story(None)
        assert first.choices[0].model_extra is not None
        drawn = first.choices[0].model_extra["seed"]
        again, other = await asyncio.gather(story(drawn), story(drawn + 1))
        assert again.choices[0].text == first.choices[0].text
        assert other.choices[0].text != first.choices[0].text


async def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: openai.AsyncOpenAI) -> None:
    async with client:
        reply = await client.completions.create(
            model="demo", prompt="Once upon", max_tokens=30, temperature=0, stop=[" there"]
        )
        assert reply.choices[0].finish_reason == "stop"
        assert reply.choices[0].text == " a time,"


async def test_32_at_once_are_batched(demo: DemoServer, client: openai.AsyncOpenAI) -> None:
    async with client:
        before = demo.engine.statistics()
        replies = await asyncio.gather(
            *(
                client.completions.create(
                    model="demo", prompt=f"{i} +", max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
                )
                for i in range(32)
            )
        )
        after = demo.engine.statistics()
        assert sum(reply.usage.completion_tokens for reply in replies if reply.usage) == 32 * 40
        assert after.steps - before.steps < 32 * 40 / 4


async def test_errors_are_openais_exceptions(client: openai.AsyncOpenAI) -> None:
    async with client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="demo", messages=SUM, temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as caught:
            await client.completions.create(model="demo", prompt="a b " * 2000, stream=True)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.completions.create(model="demo", prompt="a", max_tokens=5000)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-5", messages=SUM)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="demo", prompt=[1 << 40])
        assert caught.value.param == "prompt"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="demo", prompt="a", logit_bias={"99999": 1})
        assert caught.value.param == "logit_bias"


async def test_who_leaves_or_is_cancelled_is_gone_at_once(
    demo: DemoServer, client: openai.AsyncOpenAI, request: pytest.FixtureRequest
) -> None:
    endless = {"ignore_eos": True}
    async with client:
        # httpcore does not reset a stream that is closed early on HTTP/2 (its issue 943); test_endings.py does
        is_http2 = "h2c" in request.node.name
        for how in ("cancel",) if is_http2 else ("close", "cancel"):
            stream = await client.completions.create(
                model="demo", prompt="Once", max_tokens=2000, stream=True, extra_body=endless
            )
            first = await anext(aiter(stream))
            if how == "close":
                await stream.close()
            else:
                await client.post(f"/requests/{first.id}/cancel", cast_to=object)
                with pytest.raises(openai.APIError, match="cancelled"):
                    async for _ in stream:
                        pass
            await idle(demo)


async def test_two_conversations_share_their_beginning(demo: DemoServer) -> None:
    long = [{"role": "system", "content": "You are a helpful model. " * 20}, *SUM]
    async with httpx.AsyncClient(base_url=demo.server.url, headers={"authorization": f"Bearer {KEY}"}) as http:
        cached = []
        for _ in range(2):
            response = await http.post("/v1/chat/completions", json={"messages": long, "max_tokens": 4})
            cached.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] < cached[1]
        response = await http.post("/v1/chat/completions", json={"messages": SUM, "stream": True, "max_tokens": 4})
        assert events(response.text)[-1] == "[DONE]"
        metrics = (await http.get("/metrics")).text
        assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="demo"}' in metrics


async def test_tokens_are_those_that_answers_begin_with(demo: DemoServer) -> None:
    async with httpx.AsyncClient(base_url=demo.server.url, headers={"authorization": f"Bearer {KEY}"}) as http:

        async def post(path: str, **body: object) -> Any:
            response = await http.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        chat = await post("/v1/chat/completions", messages=SUM, max_tokens=4, return_token_ids=True)
        tokens = chat["prompt_token_ids"]
        assert (await post("/tokenize", messages=SUM))["tokens"] == tokens
        assert (await post("/v1/chat/completions/render", messages=SUM))["token_ids"] == tokens
        rendered = (await post("/detokenize", tokens=tokens))["prompt"]
        assert SUM[0]["content"] in rendered
        assert (await post("/tokenize", prompt=rendered))["tokens"] == tokens
        kept = await post(
            "/v1/completions", prompt=rendered, max_tokens=4, truncate_prompt_tokens=5, return_token_ids=True
        )
        assert kept["choices"][0]["prompt_token_ids"] == tokens[-5:]
        info = (await http.get("/tokenizer_info")).json()
        assert info["eos_token"] in rendered
        assert "messages" in info["chat_template"]
        found = (await http.get("/server_info")).json()["model"]
        assert (found["name"], found["prompt_kind"]) == ("demo", "chat")
        assert (await http.get("/load")).json()["kv_cache_usage"] == 0.0
        response = await http.post("/tokenize", json={"messages": SUM, "chat_template_kwargs": {"tools": []}})
        assert response.json()["error"]["param"] == "chat_template_kwargs.tools"


async def test_an_echoed_answer_scores_what_it_did_when_it_was_written(client: openai.AsyncOpenAI) -> None:
    """As lm-eval asks: the prompt by token ids, one token more, and `[begin:-1]` of what the tokens scored."""
    async with client:
        asked = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.9, "seed": 3, "logprobs": 1}
        extra = {"return_token_ids": True}
        written = await client.completions.create(model="demo", **asked, extra_body=extra)
        [choice] = written.choices
        assert choice.model_extra is not None
        tokens = choice.model_extra["prompt_token_ids"] + choice.model_extra["token_ids"]
        begin = len(choice.model_extra["prompt_token_ids"])
        for prompt in (tokens, [tokens]):
            scored = await client.completions.create(
                model="demo", prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=1
            )
            told, was = scored.choices[0].logprobs, choice.logprobs
            assert told is not None
            assert was is not None
            assert scored.choices[0].text.startswith(f"Once upon a time{choice.text}")
            assert told.token_logprobs is not None
            assert told.token_logprobs[0] is None
            assert len(told.token_logprobs) == len(tokens) + 1
            assert told.token_logprobs[begin:-1] == pytest.approx(was.token_logprobs, abs=1e-4)
            assert told.tokens is not None
            assert told.tokens[begin:-1] == was.tokens
            assert told.top_logprobs is not None
            pairs = zip(told.top_logprobs[1:], told.tokens[1:], strict=True)
            greedy = [max(top.values()) == top[token] for top, token in pairs]
            assert len(set(greedy)) == 2  # at that temperature some were the likeliest, and some were not


@pytest.mark.parametrize("is_by_ids", [False, True])
async def test_bad_words_are_not_written(client: openai.AsyncOpenAI, is_by_ids: bool) -> None:
    async with client:

        async def story(words: list[str]) -> str:
            prompt: Any = [610, 620] if is_by_ids else "Once upon"
            done = await client.completions.create(
                model="demo", prompt=prompt, max_tokens=60, temperature=0, extra_body={"bad_words": words}
            )
            return done.choices[0].text

        free = await story([])
        words = sorted(set(re.findall(r"[A-Za-z]{4,}", free)))
        assert len(words) > 3
        found = await story(words)
        assert not set(words) & set(re.findall(r"[A-Za-z]+", found))
        assert await story(["Zanzibar"]) == free


async def test_the_likeliest_of_several_completions_is_given_back(client: openai.AsyncOpenAI) -> None:
    async with client:
        asked = {"model": "demo", "prompt": "Once upon", "max_tokens": 12, "temperature": 1.5, "seed": 7, "logprobs": 0}
        made = await client.completions.create(**asked, n=4)
        best = await client.completions.create(**asked, n=2, best_of=4)

        def mean(choice: openai.types.CompletionChoice) -> float:
            assert choice.logprobs is not None
            return statistics.fmean(choice.logprobs.token_logprobs or [])

        expected = sorted(made.choices, key=mean, reverse=True)[:2]
        assert [choice.text for choice in best.choices] == [choice.text for choice in expected]
        assert len({choice.text for choice in made.choices}) == 4


def test_responses_are_those_of_chats_and_remember(demo: DemoServer) -> None:
    with openai.OpenAI(base_url=f"{demo.server.url}/v1", api_key=KEY, max_retries=0) as client:
        chat = client.chat.completions.create(model="demo", messages=SUM, temperature=0)  # type: ignore[arg-type]
        first = client.responses.create(model="demo", input="What is 7 + 5?", temperature=0)
        assert first.output_text == chat.choices[0].message.content
        assert first.usage is not None
        assert chat.usage is not None
        assert first.usage.output_tokens == chat.usage.completion_tokens
        told = client.responses.create(model="demo", input="My name is Ada.", temperature=0)
        asked = client.responses.create(
            model="demo", input="What is my name?", temperature=0, previous_response_id=told.id
        )
        assert "Ada" in asked.output_text


def test_a_response_is_made_in_the_background_and_read_from_where_it_was_left(demo: DemoServer) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    text: Any = {"format": {"type": "json_schema", "name": "sum", "schema": schema}}
    with openai.OpenAI(base_url=f"{demo.server.url}/v1", api_key=KEY, max_retries=0) as client:
        asked: dict[str, Any] = {"model": "demo", "input": "What is 7 + 5?", "temperature": 0, "text": text}
        whole = client.responses.create(**asked)
        assert isinstance(json.loads(whole.output_text)["sum"], int)
        stream = client.responses.create(**asked, background=True, stream=True)
        begun = [next(stream) for _ in range(4)]
        stream.close()
        response_id = begun[0].response.id
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=3))
        assert [event.sequence_number for event in [*begun, *rest]] == list(range(4 + len(rest)))
        said = "".join(event.delta for event in rest if event.type == "response.output_text.delta")
        assert said == client.responses.retrieve(response_id).output_text == whole.output_text
        client.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)


async def test_a_response_in_the_background_is_cancelled(demo: DemoServer, client: openai.AsyncOpenAI) -> None:
    async with client:
        made = await client.responses.create(
            model="demo", input="Tell me a story", background=True, extra_body={"ignore_eos": True}
        )
        assert made.status == "queued"
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        assert (await client.responses.retrieve(made.id)).status == "cancelled"
    await idle(demo)


@pytest.mark.parametrize("language", ["bash", "python"])
def test_the_commands_in_the_docs_run(open_demo: DemoServer, language: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    blocks = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    assert blocks
    for block in blocks:
        code = block.replace("http://127.0.0.1:8000", open_demo.server.url)
        if language == "bash":
            if shutil.which("curl") is None:
                pytest.skip("curl is not installed")
            command = ["bash", "-e", "-c", code.replace("curl ", "curl -sS --fail ")]
        else:
            command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        for sign in ("12",) if language == "python" else ("[DONE]", '"text":'):
            assert sign in done.stdout
