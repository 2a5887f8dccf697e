"""Answers with speculation are those without: tokens, log probabilities, text and how they end."""

import asyncio
import os
import shutil
import signal

import pytest
import torch

from novainfer import Engine, EngineConfig, InvalidParameter, ModelLoadError, SamplingParams
from novainfer.kernels.demo import model_path

LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PROMPT = "one two three one two three one two three one two"
ASKED = [
    SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=60, temperature=0.8, seed=11, ignore_eos=True),  # vLLM #6038: seeds that are ignored
    SamplingParams(max_tokens=60, temperature=1.0, top_p=0.9, top_k=20, seed=12, ignore_eos=True),
    SamplingParams(  # vLLM #22987: penalties that drift within an accepted run
        max_tokens=60, temperature=0.7, seed=13, ignore_eos=True, repetition_penalty=1.2, presence_penalty=0.4
    ),
    SamplingParams(max_tokens=60, temperature=0.0, frequency_penalty=0.7, ignore_eos=True, min_tokens=20),
    SamplingParams(max_tokens=60, temperature=0.0, stop=["e t", "wo th"]),  # vLLM #47616: completed within a run
    SamplingParams(max_tokens=60, temperature=0.9, seed=14, n=3),
]


async def answers(**fields):
    async with Engine(EngineConfig(max_num_seqs=16, seed=0, **fields)) as engine:

        async def one(params):
            found = {}
            async for delta in engine.generate(PROMPT, params):
                so_far = found.setdefault(delta.index, {"tokens": [], "text": "", "logprobs": []})
                so_far["tokens"] += delta.token_ids
                so_far["text"] += delta.text
                so_far["logprobs"] += delta.logprobs or []
                so_far["end"] = delta.finish_reason, delta.stop_reason, delta.num_generated_tokens
            return found

        found = await asyncio.gather(*map(one, ASKED))
        return found, engine.statistics()


@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_what_steps_cost_reaches_the_one_who_decides(worker):
    config = {"method": "ngram", "num_speculative_tokens": 2}
    async with Engine(EngineConfig(max_model_len=64, speculative_config=config, worker=worker)) as engine:
        assert engine._runtime._speculation._cost.is_measured


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_answers_are_the_same(worker):
    plain, before = await answers()
    guessed, after = await answers(speculative_config=LOOKUP, worker=worker)
    assert guessed == plain
    assert before.speculation is None
    assert after.speculation.num_accepted_tokens_total > 0
    assert after.generation_tokens_total == before.generation_tokens_total


async def test_json_text_is_as_good_as_an_object():
    config = EngineConfig(speculative_config='{"method": "ngram", "num_speculative_tokens": 2}')
    assert config.speculative_config.num_speculative_tokens == 2


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be between 1 and"),
        ({"method": "eagle", "num_speculative_tokens": 2}, "eagle"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        ('{"method": "ngram"', "JSON"),
    ],
)
def test_a_config_that_is_wrong_is_told_with_its_field(wrong, says):
    with pytest.raises(InvalidParameter, match=says) as told:
        EngineConfig(speculative_config=wrong)
    assert told.value.param == "speculative_config"


# ---- a draft model -------------------------------------------------------------------------------------------------


def random_model(folder, vocab_size):
    """A model whose drafts are all but always wrong, with the demo model's tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=1279,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    return str(random_model(tmp_path_factory.mktemp("wrong"), 1280))


@pytest.fixture(scope="module")
def plain():
    return asyncio.run(answers())


def drafting(model):
    return {"method": "draft_model", "model": model, "num_speculative_tokens": 3}


async def test_answers_are_the_same_whatever_pays(plain):
    """Steps with drafts and without take turns, as they were measured here."""
    assert (await answers(speculative_config=drafting("demo")))[0] == plain[0]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("whose", ["its own", "another's"])
async def test_answers_are_the_same_with_a_draft_model(plain, wrong, whose, worker):
    """The demo model drafts for itself, or a random one for it."""
    config = drafting("demo" if whose == "its own" else wrong)
    guessed, after = await answers(speculative_config=config, worker=worker)
    assert guessed == plain[0]
    said = after.speculation
    assert said.num_draft_tokens_total > 0
    if whose == "its own":
        assert said.num_accepted_tokens_total > 0
    else:
        assert said.num_accepted_tokens_total < 0.2 * said.num_draft_tokens_total
    assert after.generation_tokens_total == plain[1].generation_tokens_total


QUESTIONS = [
    *("What is 37 + 58?", "What is 9 times 7?", "What is the capital of Norway?", "Spell apple", "Count from 7 to 19"),
    *("Which is larger, 42 or 17?", "JSON with name Anna, age 12 and pet cat", "Who are you?", "What can you do?"),
]


@pytest.mark.usefixtures("eager")
async def test_most_drafts_of_the_demo_models_own_draft_are_right():
    """Each is of the demo model's kinds of questions; of a draft that reads something else, hardly any would be."""
    found = []
    for config in (None, drafting("demo-draft")):
        async with Engine(EngineConfig(max_num_seqs=4, seed=0, speculative_config=config)) as engine:
            texts = []
            for temperature in (0.0, 1.0):
                params = SamplingParams(max_tokens=64, temperature=temperature, seed=3, logprobs=1)
                for question in QUESTIONS:
                    deltas = [d async for d in engine.generate([{"role": "user", "content": question}], params)]
                    texts.append([(t, p) for d in deltas for t, p in zip(d.token_ids, d.logprobs or (), strict=True)])
            found.append((texts, engine.statistics().speculation))
    (plain, _), (drafted, said) = found
    assert drafted == plain
    assert said.num_accepted_tokens_total > 0.7 * said.num_draft_tokens_total > 0


@pytest.mark.usefixtures("eager")
async def test_what_was_verified_for_a_request_is_told_with_its_end():
    async with Engine(EngineConfig(max_num_seqs=4, seed=0, speculative_config=drafting("demo-draft"))) as engine:
        lasts = []
        for question in QUESTIONS[:3]:
            params = SamplingParams(max_tokens=40, temperature=0.0, n=2)
            deltas = [d async for d in engine.generate([{"role": "user", "content": question}], params)]
            lasts += [d for d in deltas if d.finish_reason is not None]
            assert all(d.num_draft_tokens == 0 for d in deltas if d.finish_reason is None)
        records = engine.requests()
        said = engine.statistics().speculation
    assert len(lasts) == 6
    assert all(0 < d.num_accepted_tokens <= d.num_draft_tokens for d in lasts)
    assert sum(d.num_draft_tokens for d in lasts) == said.num_draft_tokens_total
    assert sum(d.num_accepted_tokens for d in lasts) == said.num_accepted_tokens_total
    assert sum(r.draft_tokens for r in records) == said.num_draft_tokens_total
    assert sum(c.accepted_draft_tokens for r in records for c in r.choices) == said.num_accepted_tokens_total


@pytest.mark.usefixtures("eager")
async def test_all_drafts_of_a_greedy_model_for_itself_are_right():
    async with Engine(EngineConfig(max_num_seqs=4, seed=0, speculative_config=drafting("demo"))) as engine:
        for _ in range(3):
            async for _ in engine.generate(PROMPT, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)):
                pass
        said = engine.statistics().speculation
    assert said.num_accepted_tokens_total == said.num_draft_tokens_total > 0


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("warm_spare", [False, True])
async def test_a_worker_that_dies_comes_back_with_its_draft_model(plain, warm_spare):
    fields = {"speculative_config": drafting("demo"), "worker": "process", "warm_spare": warm_spare}
    async with Engine(EngineConfig(max_num_seqs=16, seed=0, **fields)) as engine:
        params, found, first = ASKED[0], [], engine._runtime._link.pid
        async for delta in engine.generate(PROMPT, params):
            if not found:
                os.kill(first, signal.SIGKILL)
            found += delta.token_ids
        assert engine._runtime._link.pid not in (0, first)
        before = engine.statistics().speculation.num_accepted_tokens_total
        async for _ in engine.generate(PROMPT + " three", params):
            pass
        after = engine.statistics().speculation.num_accepted_tokens_total
    assert found == plain[0][0][0]["tokens"]
    assert after > before


@pytest.mark.usefixtures("eager")
async def test_an_error_of_the_draft_model_ends_no_request(plain, monkeypatch):
    config = EngineConfig(max_num_seqs=16, seed=0, speculative_config=drafting("demo"))
    async with Engine(config) as engine:

        def fail(*_):
            raise RuntimeError("the draft model is out of order")

        monkeypatch.setattr("novainfer.kernels.runtime.proposer.Proposer.propose", fail)
        found = [delta async for delta in engine.generate(PROMPT, ASKED[0])]
        incidents = [incident for incident in engine.errors() if incident.kind == "draft_model"]
    assert [token for delta in found for token in delta.token_ids] == plain[0][0][0]["tokens"]
    assert found[-1].finish_reason == "length"
    assert incidents
    assert "the draft model is out of order" in incidents[0].message


async def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path):
    folder = random_model(tmp_path, 1300)
    engine = Engine(EngineConfig(speculative_config=drafting(str(folder))))
    with pytest.raises(ModelLoadError, match=r"a vocabulary of 1300 tokens.* one of 1280.*the same tokenizer"):
        await engine.start()


@pytest.mark.parametrize("what", ["nowhere", "a file", "no weights"])
async def test_a_draft_model_that_is_not_there_is_told_before_anything_starts(tmp_path, what):
    name, says = str(tmp_path), "speculative_config: .*model.safetensors"
    if what == "nowhere":
        name, says = (
            "just-a-word",
            "speculative_config: the draft model just-a-word is neither a folder here nor a hub id",
        )
    elif what == "a file":
        name, says = (
            str(model_path() / "config.json"),
            r"speculative_config: the draft model .* is a file; .* config\.json is needed",
        )
    else:
        shutil.copy(model_path() / "config.json", tmp_path / "config.json")
    with pytest.raises(ModelLoadError, match=says) as told:
        await Engine(EngineConfig(speculative_config=drafting(name))).start()
    assert told.value.param == "speculative_config"
