"""Completions: prompts in every form that OpenAI's endpoint takes."""

from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from novainfer import Delta, TokenLogprob
from novainfer.server.openai.chunks import ChunkOptions, CompletionChunks
from novainfer.server.openai.replies import Offsets, Tally, completion_logprobs
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine
from tests.server.test_bad_input import error_of
from tests.server.test_chat import events


async def complete(client: httpx.AsyncClient, prompt: Any, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": prompt, **body})


async def test_a_string_gives_one_choice_of_16_tokens_at_most(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    reply = (await complete(client, "Say hello")).json()
    assert reply["object"] == "text_completion"
    assert [choice["text"] for choice in reply["choices"]] == ["Hello, world!"]
    assert reply["id"].startswith("cmpl-")
    assert engine.seen[-1][1].max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [{"prompt_token_ids": [1, 2, 3]}]),
        ([[1, 2], [3]], [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]),
    ],
)
async def test_lists_and_token_ids(client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, seen: Any) -> None:
    reply = (await complete(client, prompt, n=2)).json()
    assert [given for given, _, _ in engine.seen] == seen
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * len(seen)))
    assert reply["usage"]["completion_tokens"] == 10 * len(seen)


@pytest.mark.parametrize("stream", [False, True])
async def test_without_special_tokens_a_text_has_none(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    without = {"add_special_tokens": False, "echo": True, "stream": stream}
    reply = await complete(client, ["ab", "c"], **without)
    assert [given for given, _, _ in engine.seen] == [{"prompt_token_ids": [97, 98]}, {"prompt_token_ids": [99]}]
    chunks = [reply.json()] if not stream else events(reply.text)[:-1]
    texts = ["".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == i) for i in (0, 1)]
    assert texts == ["abHello, world!", "cHello, world!"], "the prompt is given back as it came"
    assert "x-nova-ignored-fields" not in reply.headers
    await complete(client, "ab", add_special_tokens=True)
    assert engine.seen[-1][0] == "ab"
    rendered = await client.post("/v1/completions/render", json={"prompt": "ab", **without})
    assert rendered.json()[0]["token_ids"] == [97, 98]


async def test_several_prompts_stream_as_one_answer(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True}
    *chunks, usage, done = events((await complete(client, ["a", "bb"], stream=True, n=2, stream_options=options)).text)
    assert done == "[DONE]"
    for index in range(4):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "Hello, world!"
        assert [choice["finish_reason"] for choice in mine] == [None] * 4 + ["stop"]
    assert usage["usage"]["prompt_tokens"] == 3
    assert usage["usage"]["completion_tokens"] == 20


async def test_echo_puts_the_prompt_first(client: httpx.AsyncClient) -> None:
    assert (await complete(client, "Say: ", echo=True)).json()["choices"][0]["text"] == "Say: Hello, world!"
    *chunks, _ = events((await complete(client, ["A: ", "B: "], echo=True, stream=True)).text)
    texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in (0, 1)]
    assert texts == ["A: Hello, world!", "B: Hello, world!"]


async def test_logprobs_are_parallel_lists(client: httpx.AsyncClient) -> None:
    logprobs = (await complete(client, "x", logprobs=2)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hello", ",", " wor", "ld", "!"]
    assert logprobs["text_offset"] == [0, 5, 6, 10, 12]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["top_logprobs"][0] == {"Hello": -0.5, "bytes:\\xff": -9999.0}
    *chunks, _ = events((await complete(client, "x", logprobs=0, stream=True)).text)
    assert [chunk["choices"][0]["logprobs"]["text_offset"][0] for chunk in chunks] == [0, 5, 6, 10, 12]
    assert chunks[0]["choices"][0]["logprobs"]["top_logprobs"] == [{"Hello": -0.5}]


@given(st.text(max_size=12), st.lists(st.integers(0, 40), max_size=12), st.lists(st.integers(0, 12), max_size=4))
@example("a🙂b", [2, 3, 4], [2])
def test_a_character_that_is_spread_over_tokens_is_counted_once(text: str, cuts: list[int], deltas: list[int]) -> None:
    data, places = text.encode(), sorted(min(cut, len(text.encode())) for cut in cuts)
    tokens = [data[a:b] for a, b in pairwise([0, *places, len(data)])]
    begins = [0, *places]
    starts = [at for at, char in enumerate(text) for _ in char.encode()] + [len(text)]  # of each byte's character
    wanted = [7 + starts[begin] for begin in begins]
    logprobs = [TokenLogprob(0, token, -0.5, []) for token in tokens]
    assert completion_logprobs(logprobs, Offsets(7)).text_offset == wanted

    encoder = CompletionChunks("id", 0, "m", Tally(1, 1), ChunkOptions(), echoes=["x" * 7], n=1)
    found: list[int] = []
    for a, b in pairwise([0, *sorted(deltas), len(tokens)]):
        if told := encoder.delta(Delta(request_id="r", index=0, text="", logprobs=logprobs[a:b])):
            [chunk] = events(told.decode())
            found += chunk["choices"][0]["logprobs"]["text_offset"]
    assert found == wanted


ECHOED = {
    "tokens": ["Say", "bytes:\\x20\\xc3", "bytes:\\xa9"],
    "token_logprobs": [None, -0.25, -0.75],
    "top_logprobs": [None, {"bytes:\\x20\\xc3": -0.25, "x": -0.125}, {"bytes:\\xa9": -0.75, "x": -0.125}],
}


async def test_an_echoed_prompt_has_log_probabilities_where_its_answer_has(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """As evaluation harnesses need them: null first, and the token itself always among the likeliest."""
    asked = {"echo": True, "logprobs": 1}
    [choice] = (await complete(client, "Say é", **asked)).json()["choices"]
    assert choice["text"] == "Say éHello, world!"
    found = choice["logprobs"]
    assert {name: told[:3] for name, told in found.items() if name in ECHOED} == ECHOED
    assert found["tokens"][3:] == ["Hello", ",", " wor", "ld", "!"]
    assert found["token_logprobs"][3:] == [-0.5] * 5
    assert found["text_offset"][0] == 0
    assert found["text_offset"][3:] == [5, 10, 11, 15, 17]
    assert engine.seen[-1][1].prompt_logprobs == 1
    assert "prompt_logprobs" not in choice

    *chunks, _ = events((await complete(client, "Say é", stream=True, n=2, **asked)).text)
    for index in range(2):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["text"] for choice in mine] == ["Say é", "Hello", ",", " wor", "ld", "!"]
        assert {name: mine[0]["logprobs"][name] for name in ECHOED} == ECHOED
        assert [choice["logprobs"]["text_offset"][0] for choice in mine[1:]] == [5, 10, 11, 15, 17]


async def test_a_prompt_may_be_given_back_alone(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    asked = {"echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": True}
    whole = (await complete(client, ["ab", "c"], **{**asked, "max_tokens": 1})).json()
    reply = (await complete(client, ["ab", "c"], **asked)).json()
    assert engine.seen[-1][1].max_tokens == 1, "what a step computes of a prompt ends with a token"
    assert [choice["text"] for choice in reply["choices"]] == ["ab", "c"]
    for choice, more in zip(reply["choices"], whole["choices"], strict=True):
        assert (choice["finish_reason"], choice["token_ids"]) == ("length", [])
        num_tokens = len(choice["logprobs"]["tokens"])
        assert 0 < num_tokens < len(more["logprobs"]["tokens"])
        assert {key: values[:num_tokens] for key, values in more["logprobs"].items()} == choice["logprobs"]
    usage = reply["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, usage["prompt_tokens"])
    for more in ({"stream": True}, {"echo": False}):
        response = await complete(client, "ab", **{**asked, **more})
        assert (response.status_code, error_of(response)["param"]) == (400, "max_tokens")


async def test_token_ids_are_echoed_as_their_text(client: httpx.AsyncClient) -> None:
    reply = (await complete(client, [[83, 97, 121], [195, 169]], echo=True)).json()
    assert [choice["text"] for choice in reply["choices"]] == ["SayHello, world!", "éHello, world!"]


async def test_prompt_logprobs_are_told_by_token_id(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    expected = [
        None,
        {"7": {"logprob": -0.125, "decoded_token": "x"}, "2": {"logprob": -0.25, "decoded_token": "bytes:\\x20\\xc3"}},
        {"7": {"logprob": -0.125, "decoded_token": "x"}, "3": {"logprob": -0.75, "decoded_token": "bytes:\\xa9"}},
    ]
    [choice] = (await complete(client, "x", prompt_logprobs=1)).json()["choices"]
    assert choice["prompt_logprobs"] == expected
    assert choice["logprobs"] is None
    response = await client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 1}
    )
    assert response.json()["prompt_logprobs"] == expected
    [choice] = (await complete(client, "x", prompt_logprobs=0, echo=True, logprobs=1)).json()["choices"]
    assert [len(one or ()) for one in choice["prompt_logprobs"]] == [0, 1, 1]
    assert choice["logprobs"]["top_logprobs"][:3] == ECHOED["top_logprobs"]
    assert engine.seen[-1][1].prompt_logprobs == 1
    response = await complete(client, "x", prompt_logprobs=1, stream=True)
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt_logprobs"


async def test_one_bad_prompt_ends_the_others(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await complete(client, ["short", "x" * 65])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert not engine.active


class Ranked(FakeEngine):
    """An engine whose choice i is as likely as `RANKS[i]` says, and says which one it is."""

    RANKS = (-3.0, -0.5, -2.0, -1.0)

    def _delta(self, request_id: str, index: int, *args: Any) -> Delta:
        delta = super()._delta(request_id, index, *args)
        assert delta.logprobs is not None
        (told,) = delta.logprobs
        delta.logprobs = [TokenLogprob(told.token_id, told.token, self.RANKS[index], told.top)]
        delta.seed = index
        return delta


async def test_best_of_gives_the_likeliest_choices_of_each_prompt_and_counts_the_tokens_of_all(serve: Serve) -> None:
    server = await serve(Ranked())
    async with httpx.AsyncClient(base_url=server.url) as client:
        reply = (await complete(client, ["a", "b"], n=2, best_of=4)).json()
        assert [choice["seed"] for choice in reply["choices"]] == [1, 3, 1, 3]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert [choice["logprobs"] for choice in reply["choices"]] == [None] * 4
        assert reply["usage"]["completion_tokens"] == 2 * 4 * 5
        reply = (await complete(client, ["A: ", "B: "], best_of=3, logprobs=1, echo=False)).json()
        assert [choice["logprobs"]["token_logprobs"][0] for choice in reply["choices"]] == [-0.5, -0.5]
        reply = (await complete(client, ["A: ", "B: "], best_of=2, echo=True)).json()
        assert [choice["text"][:3] for choice in reply["choices"]] == ["A: ", "B: "]
        response = await complete(client, "a", best_of=2, stream=True)
        assert response.status_code == 400
        assert error_of(response)["param"] == "best_of"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 3, 0, 2), (3, 2, 1, 0)])
def test_a_prompt_was_cached_as_far_as_its_first_choice_found_it_whichever_ends_last(order: tuple[int, ...]) -> None:
    tally = Tally(2, 2)
    cached = {0: 0, 1: 15, 2: 8, 3: 15}  # the second choice of each finds what the first has computed
    for index in order:
        tally.add(Delta(request_id="r", index=index, num_prompt_tokens=16, num_cached_tokens=cached[index]))
    usage = tally.usage()
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (32, 8)
