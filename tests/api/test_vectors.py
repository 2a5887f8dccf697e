"""Embeddings through the engine: over a fake device, and over the demo model in both kinds of worker."""

from __future__ import annotations

import asyncio
import json
from math import hypot
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from novainfer import (
    LLM,
    ContextLengthExceeded,
    Delta,
    Engine,
    EngineConfig,
    InvalidParameter,
    ModelLoadError,
    PoolingParams,
    SamplingParams,
    Tenant,
    UnsupportedParameter,
)
from novainfer.actors.device.fake import HIDDEN_SIZE, FakeDevice, hidden_state
from novainfer.actors.device.pooling_defaults import pooling_defaults
from novainfer.fsm.messages.pooling import ModelPooling, Pooling
from tests.api.helpers import ask, blocks_back, fake_engine, greedy

TEXT = "The capital of France"


def mean_of(text: str) -> list[float]:
    """What the fake device's hidden states give, worked out by hand."""
    states = [hidden_state(byte) for byte in text.encode()]
    return [sum(numbers) / len(states) for numbers in zip(*states, strict=True)]


async def test_a_vector_is_made_as_asked() -> None:
    async with fake_engine(prefill_chunk_tokens=16) as engine:
        assert engine.model_info.hidden_size == HIDDEN_SIZE
        last = await engine.embed("abc", PoolingParams(normalize=False))
        assert last.embedding == list(hidden_state(ord("c")))
        assert last.prompt_token_ids == [97, 98, 99]
        text = TEXT * 5
        mean = await engine.embed(text, PoolingParams(pooling="mean", normalize=False))
        assert mean.embedding == pytest.approx(mean_of(text))
        cut = await engine.embed(text, PoolingParams(pooling="mean", dimensions=2))
        assert cut.embedding == pytest.approx([number / hypot(*mean_of(text)[:2]) for number in mean_of(text)[:2]])
        most = engine.model_info.max_model_len
        whole = await engine.embed(text * 40, PoolingParams(truncate_prompt_tokens=-1))
        assert len(whole.prompt_token_ids) == most < len(text * 40)
        kept = await engine.embed(text, PoolingParams(truncate_prompt_tokens=3, pooling="mean", normalize=False))
        assert kept.embedding == pytest.approx(mean_of(text[-3:]))
        assert (await engine.embed([99], PoolingParams(normalize=False))).embedding == last.embedding
        await blocks_back(engine)


async def test_a_tenant_finds_its_own_prefixes_only() -> None:
    async with fake_engine() as engine:
        asked = [await engine.embed(TEXT * 5, tenant=Tenant(name)) for name in ("alice", "bob", "alice")]
        assert [output.num_cached_tokens > 0 for output in asked] == [False, False, True]
        await blocks_back(engine)


async def test_vectors_and_answers_share_steps() -> None:
    shared: list[bool] = []
    device = FakeDevice(on_step=lambda plan: shared.append(bool(plan.sample_seqs and plan.pool_seqs)))
    async with fake_engine(device) as engine:
        answers = [ask(engine, "abcdef", greedy(40)) for _ in range(4)]
        vectors = [engine.embed(f"{TEXT} {i}", PoolingParams(pooling="mean", normalize=False)) for i in range(8)]
        found = await asyncio.gather(*answers, *vectors)
        for i, output in enumerate(found[4:]):
            assert output.embedding == pytest.approx(mean_of(f"{TEXT} {i}"))  # type: ignore[union-attr]
        assert len({tuple(answer.token_ids()) for answer in found[:4]}) == 1  # type: ignore[union-attr]
        statistics = engine.statistics()
        assert statistics.requests_finished["FINISHED_STOPPED"] == 8
        await blocks_back(engine)
    assert any(shared)


async def test_a_reader_that_leaves_cancels_it() -> None:
    async with fake_engine(prefill_chunk_tokens=1) as engine:
        task = asyncio.ensure_future(engine.embed(TEXT * 50))
        while not engine.statistics().num_running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await blocks_back(engine)
        assert engine.statistics().requests_finished["FINISHED_STOPPED"] == 0


async def test_generate_gives_the_vector_as_its_one_delta() -> None:
    async with fake_engine() as engine:
        deltas: list[Delta] = [d async for d in engine.generate("abc", SamplingParams(pooling=Pooling()))]
        assert [delta.finish_reason for delta in deltas] == ["stop"]
        assert deltas[0].embedding == (await engine.embed("abc")).data


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"pooling": "cls"}, "pooling"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 1.5}, "dimensions"),
        ({"normalize": "yes"}, "normalize"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_be_used_is_named(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        PoolingParams(**given)
    assert caught.value.param == param
    assert param in caught.value.message


async def test_what_the_model_has_no_room_for_is_named() -> None:
    async with fake_engine(max_model_len=16) as engine:
        with pytest.raises(InvalidParameter, match=f"dimensions must be between 1 and {HIDDEN_SIZE}, not 5"):
            await engine.embed("abc", PoolingParams(dimensions=5))
        with pytest.raises(InvalidParameter, match="params must be PoolingParams"):
            await engine.embed("abc", SamplingParams())  # type: ignore[arg-type]


# ---- what a model's folder says --------------------------------------------------------------------------------------

NORMALIZE = {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
QWEN3 = {"word_embedding_dimension": 4, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}


def folder_with(path: Path, pooling: dict[str, Any], *modules: dict[str, Any]) -> Path:
    named = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        *modules,
    ]
    (path / "modules.json").write_text(json.dumps(named))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


@pytest.mark.parametrize(
    ("pooling", "modules", "expected"),
    [
        ({**QWEN3, "pooling_mode_lasttoken": True}, [NORMALIZE], ModelPooling(kind="last", normalize=True)),
        ({"pooling_mode_mean_tokens": True}, [], ModelPooling(kind="mean", normalize=False)),
        ({"pooling_mode": "lasttoken"}, [], ModelPooling(kind="last", normalize=False)),
        ({"pooling_mode": "mean", "include_prompt": True}, [NORMALIZE], ModelPooling(kind="mean", normalize=True)),
    ],
)
def test_a_folder_says_how(
    tmp_path: Path, pooling: dict[str, Any], modules: list[dict[str, Any]], expected: ModelPooling
) -> None:
    assert pooling_defaults(folder_with(tmp_path, pooling, *modules)) == expected


@pytest.mark.parametrize("name", ["modules.json", "1_Pooling/config.json"])
def test_a_file_that_is_nested_too_deep_is_named(tmp_path: Path, name: str) -> None:
    folder = folder_with(tmp_path, {"pooling_mode": "mean"})
    (folder / name).write_text('{"pooling_mode": ' + "[" * 900 + "]" * 900 + "}")
    with pytest.raises(ModelLoadError, match=f"{name} cannot be read: it is nested more than 64 levels deep"):
        pooling_defaults(folder)


def test_a_folder_that_says_nothing_takes_the_last_token(tmp_path: Path) -> None:
    assert pooling_defaults(tmp_path) == ModelPooling(kind="last", normalize=True)


@pytest.mark.parametrize(
    ("pooling", "modules", "words"),
    [
        ({"pooling_mode_cls_token": True}, [], "pools by cls_token, and this server by lasttoken or mean only"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, [], "pools by mean and max_tokens"),
        ({}, [], "pools by no way"),
        ({"pooling_mode": "mean"}, [{"type": "sentence_transformers.models.Dense"}], "a module of type 'Dense'"),
    ],
)
def test_what_is_not_computed_here_is_said_to_those_who_ask_for_it(
    tmp_path: Path, pooling: dict[str, Any], modules: list[dict[str, Any]], words: str
) -> None:
    assert words in pooling_defaults(folder_with(tmp_path, pooling, *modules)).refusal


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (None, ModelPooling()),
        (0, ModelPooling()),
        (1, ModelPooling(kind="mean")),
        (3, ModelPooling(kind="last")),
    ],
)
def test_a_gguf_file_says_how(tmp_path: Path, number: int | None, expected: ModelPooling) -> None:
    assert pooling_defaults(gguf_with(tmp_path / "model.gguf", number)) == expected


def test_a_gguf_file_that_pools_otherwise_is_a_refusal(tmp_path: Path) -> None:
    refusal = pooling_defaults(gguf_with(tmp_path / "model.gguf", 2)).refusal
    assert "qwen3.pooling_type is 2, and this server pools by 1 (mean) or 3 (last) only" in refusal
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"bad\.gguf"):
        pooling_defaults(tmp_path / "bad.gguf")


def gguf_with(path: Path, number: int | None) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3")
    if number is not None:
        writer.add_uint32("qwen3.pooling_type", number)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {})
    (folder / "1_Pooling" / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"1_Pooling.config.json must hold a JSON object"):
        pooling_defaults(folder)
    (folder / "modules.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"modules.json cannot be read"):
        pooling_defaults(folder)


# ---- the demo model --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_llm_embeds_lists_in_order_and_errors_in_their_places() -> None:
    with LLM(max_num_seqs=8, dtype="float32", max_model_len=256) as llm:
        texts = [f"The number {i} is" for i in range(20)]
        outputs = llm.embed(texts, PoolingParams(pooling="mean"), use_tqdm=False)
        assert all(hypot(*output.embedding) == pytest.approx(1.0) for output in outputs)
        assert len(outputs[0].embedding) == llm.model_info.hidden_size == 192
        (alone,) = llm.embed(texts[7], PoolingParams(pooling="mean"), use_tqdm=False)
        assert alone.embedding == pytest.approx(outputs[7].embedding, abs=1e-6)
        assert alone.embedding != pytest.approx(outputs[8].embedding, abs=1e-3)
        good, bad = llm.embed(["Hello", list(range(300))], use_tqdm=False)
        assert good.error is None
        assert isinstance(bad.error, ContextLengthExceeded)
        with pytest.raises(ContextLengthExceeded):
            llm.embed({"prompt_token_ids": list(range(300))}, use_tqdm=False)
        whole = llm.embed({"prompt_token_ids": [5] * 256}, use_tqdm=False)
        assert len(whole[0].prompt_token_ids) == 256


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"worker": "process"}, {"async_scheduling": True, "prefill_chunk_tokens": 16}])
async def test_a_vector_is_the_same_in_every_worker_and_beside_answers(config: dict[str, Any]) -> None:
    """And in chunks, which are planned ahead; and where an answer has left its prefix in the cache."""
    text = "What is 7 + 5? " * 8
    async with Engine(EngineConfig(dtype="float32", num_threads=1)) as engine:
        expected = [(await engine.embed(text, PoolingParams(pooling=kind))).embedding for kind in ("last", "mean")]
    async with Engine(EngineConfig(dtype="float32", num_threads=1, **config)) as engine:
        await ask(engine, text, greedy(4))
        answers = [asyncio.ensure_future(ask(engine, "Once upon a time", greedy(60))) for _ in range(3)]
        last, mean = await asyncio.gather(engine.embed(text), engine.embed(text, PoolingParams(pooling="mean")))
        assert last.embedding == pytest.approx(expected[0], abs=1e-5)
        assert mean.embedding == pytest.approx(expected[1], abs=1e-5)
        assert last.num_cached_tokens > 0
        assert mean.num_cached_tokens == 0
        for answer in answers:
            assert len((await answer).token_ids()) > 0
        await blocks_back(engine)


@pytest.mark.slow
async def test_a_setting_is_worth_more_than_the_folder_and_a_request_more_than_that(tmp_path: Path) -> None:
    async with Engine(EngineConfig(dtype="float32", pooling="mean")) as engine:
        by_setting = (await engine.embed(TEXT)).embedding
        assert by_setting == (await engine.embed(TEXT, PoolingParams(pooling="mean"))).embedding
        assert by_setting != (await engine.embed(TEXT, PoolingParams(pooling="last"))).embedding


def test_a_way_that_is_not_computed_is_refused_unless_the_request_says_another() -> None:
    class Info:
        hidden_size = 4
        pooling = ModelPooling(refusal="its folder pools by cls_token")

    with pytest.raises(UnsupportedParameter, match=r"pooling must be last or mean here.*cls_token") as caught:
        PoolingParams().sampling_params(Info)  # type: ignore[arg-type]
    assert caught.value.param == "pooling"
    assert PoolingParams(pooling="last").sampling_params(Info).pooling == Pooling()  # type: ignore[arg-type]
