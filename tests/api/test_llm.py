"""The blocking LLM, over the demo model: order, forms, bad prompts, Ctrl-C, closing."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tqdm import tqdm

from novainfer import LLM, Chat, EngineClosed, EngineDraining, InvalidParameter, ModelLoadError, SamplingParams
from novainfer.fsm.messages.errors import ContextLengthExceeded
from tests.api.helpers import CHAT, greedy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=16, dtype="float32") as model:
        yield model


def ids_of(llm: LLM, text: str) -> list[int]:
    (output,) = llm.generate(text, greedy(1), use_tqdm=False)
    return output.prompt_token_ids


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"The number {i} is" for i in range(40)]
    # The first ones take longest.
    params = [greedy(41 - i, ignore_eos=True) for i in range(40)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(41, 1, -1))
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    alone = [llm.generate(prompts[i], params[i], use_tqdm=False)[0] for i in (0, 17, 39)]
    assert [a.outputs[0].token_ids for a in alone] == [outputs[i].outputs[0].token_ids for i in (0, 17, 39)]


def test_every_form_of_prompt_is_taken(llm: LLM) -> None:
    ids = ids_of(llm, "Hello")
    forms: list[Any] = ["Hello", ids, {"prompt": "Hello"}, {"prompt_token_ids": ids}]
    alone = [llm.generate(form, greedy(6), use_tqdm=False) for form in forms]
    assert [len(outputs) for outputs in alone] == [1] * 4
    together = llm.generate(forms, greedy(6), use_tqdm=False)
    texts = {output.outputs[0].text for outputs in [*alone, together] for output in outputs}
    assert len(texts) == 1
    assert [output.prompt for output in together] == ["Hello", None, "Hello", None]
    assert all(output.prompt_token_ids == ids for output in together)
    assert llm.generate([], greedy(6)) == []
    assert llm.generate(("Hello", "Hello"), greedy(6), use_tqdm=False)[1].outputs[0].text in texts


def test_prompts_may_come_from_a_generator(llm: LLM) -> None:
    outputs = llm.generate((f"Word {i}" for i in range(3)), greedy(2), use_tqdm=False)  # type: ignore[arg-type]
    assert [output.prompt for output in outputs] == ["Word 0", "Word 1", "Word 2"]


def test_chats_go_through_the_template(llm: LLM) -> None:
    (one,) = llm.chat(CHAT, greedy(12), use_tqdm=False)
    two, three = llm.chat([CHAT, CHAT], greedy(12), use_tqdm=False)
    assert one.outputs[0].text == two.outputs[0].text == three.outputs[0].text
    (same,) = llm.generate(Chat(messages=CHAT), greedy(12), use_tqdm=False)
    assert same.outputs[0].text == one.outputs[0].text
    assert one.prompt is None


def test_several_choices_each_have_their_own_text(llm: LLM) -> None:
    (output,) = llm.generate("Once", SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12), use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({choice.text for choice in output.outputs}) > 1
    assert output.seed == 5


def test_without_parameters_it_takes_the_defaults(llm: LLM) -> None:
    (output,) = llm.generate("Hello", use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16
    (again,) = llm.generate("Hello", SamplingParams(seed=output.seed), use_tqdm=False)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids


def test_logprobs_belong_to_the_tokens(llm: LLM) -> None:
    (output,) = llm.generate("Hello", greedy(5, logprobs=2), use_tqdm=False)
    (choice,) = output.outputs
    assert choice.logprobs is not None
    assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
    assert all(len(entry.top) == 2 and entry.top[0][0] == entry.token_id for entry in choice.logprobs)
    assert all(entry.top[0][2] >= entry.top[1][2] for entry in choice.logprobs)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("", InvalidParameter),
        ([], InvalidParameter),
        ({}, InvalidParameter),
        ([10**9], InvalidParameter),
        ("\ud800", InvalidParameter),
        ([5] * 5000, ContextLengthExceeded),
        (None, InvalidParameter),
    ],
    ids=lambda value: str(value)[:20].encode("ascii", "backslashreplace").decode(),
)
def test_one_bad_prompt_among_many_has_its_error_and_the_others_their_answers(
    llm: LLM, bad: Any, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    first, wrong, *others = llm.generate(["Hello", bad, *["World"] * 40], greedy(9, ignore_eos=True), use_tqdm=False)
    assert isinstance(wrong.error, error)
    assert wrong.outputs == []
    for output in (first, *others):
        assert output.error is None
        assert len(output.outputs[0].token_ids) == 9
    assert "1 of 42 prompts got an error, the first: " in caplog.text
    assert llm.generate("Hello", greedy(3), use_tqdm=False)[0].outputs[0].token_ids
    statistics = llm._engine.statistics()
    assert (statistics.num_running, statistics.num_waiting, statistics.kv_blocks_owned) == (0, 0, 0)


@pytest.mark.parametrize("bad", [None, 5, b"bytes"], ids=repr)
def test_what_is_no_prompt_at_all_is_refused(llm: LLM, bad: Any) -> None:
    with pytest.raises(InvalidParameter, match="the prompt must be a string, a list of token ids, or messages"):
        llm.generate(bad, greedy(1), use_tqdm=False)


def test_a_bad_conversation_among_many_has_its_error_and_one_alone_raises(llm: LLM) -> None:
    good, bad = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "x " * 5000}]
    answered, wrong = llm.chat([good, bad], greedy(3), use_tqdm=False)
    assert answered.outputs[0].token_ids
    assert isinstance(wrong.error, ContextLengthExceeded)
    with pytest.raises(ContextLengthExceeded):
        llm.chat(bad, greedy(3), use_tqdm=False)


@pytest.mark.parametrize("bad", [None, 5, "hello", {"role": "user"}], ids=repr)
def test_what_is_no_conversation_is_refused(llm: LLM, bad: Any) -> None:
    with pytest.raises(InvalidParameter, match="messages must be a list of messages"):
        llm.chat(bad)


@pytest.mark.parametrize("bad", [5, "greedy", {"max_tokens": 3}, [None], ["greedy"]], ids=repr)
def test_what_are_no_parameters_is_refused_by_name(llm: LLM, bad: Any) -> None:
    with pytest.raises(InvalidParameter, match="sampling_params") as caught:
        llm.generate(["Hello"], bad)
    assert str(caught.value.param).startswith("sampling_params")


def test_arguments_may_be_spelled_as_vllm_does(llm: LLM) -> None:
    (first,) = llm.generate("Hello", greedy(3, seed=1), use_tqdm=False)
    (second,) = llm.generate(prompts="Hello", sampling_params=greedy(3, seed=1), use_tqdm=False)
    assert first.outputs == second.outputs
    assert llm.chat(messages=[{"role": "user", "content": "hi"}], sampling_params=[greedy(1)], use_tqdm=False)


def test_the_tokenizer_is_that_of_the_model(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (output,) = llm.generate("Hello there", greedy(8), use_tqdm=False)
    assert tokenizer.encode("Hello there") == output.prompt_token_ids
    assert tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True) == output.outputs[0].text


def test_the_cumulative_log_probability_is_the_sum_over_the_tokens(llm: LLM) -> None:
    (output,) = llm.generate("Hello", greedy(5, logprobs=0), use_tqdm=False)
    (choice,) = output.outputs
    assert choice.logprobs is not None
    assert choice.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in choice.logprobs))
    assert llm.generate("Hello", greedy(5), use_tqdm=False)[0].outputs[0].cumulative_logprob is None


def test_parameters_are_one_or_one_for_each(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="one for each of 3 prompts, not 2"):
        llm.generate(["a", "b", "c"], [greedy(), greedy()], use_tqdm=False)


def test_the_progress_bar_can_be_off_and_leaves_no_thread(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 10)  # tqdm's own, which another test may have switched off
    llm.generate(["Hello"] * 3, greedy(3), use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    before = threading.active_count()
    llm.generate(["Hello"] * 3, greedy(3))
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "3/3" in shown.err
    assert threading.active_count() == before


async def test_it_works_inside_a_running_loop_as_in_jupyter(llm: LLM) -> None:
    assert asyncio.get_running_loop().is_running()
    (output,) = llm.generate("Hello", greedy(3), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


def test_several_threads_may_share_it(llm: LLM) -> None:
    expected = llm.generate("Hello", greedy(10), use_tqdm=False)[0].outputs[0].token_ids
    found: list[list[int]] = []

    def work() -> None:
        found.append(llm.generate("Hello", greedy(10), use_tqdm=False)[0].outputs[0].token_ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """As in a terminal, also where the tests run in the background and the shell has Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_ends_the_batch_and_the_llm_goes_on(llm: LLM) -> None:
    main = threading.get_ident()
    steps_before = llm._engine.statistics().steps

    def interrupt() -> None:
        if llm._engine.statistics().steps > steps_before + 3:
            signal.pthread_kill(main, signal.SIGINT)
        else:
            llm._loop.call_soon(interrupt)

    llm._loop.call_soon_threadsafe(interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Hello"] * 16, greedy(1500, ignore_eos=True), use_tqdm=False)
    (output,) = llm.generate("Hello", greedy(3), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    statistics = llm._engine.statistics()
    assert statistics.requests_finished["FINISHED_ABORTED"] >= 16
    assert statistics.num_running == 0


def test_closing_while_another_thread_waits_ends_its_wait() -> None:
    model = LLM(max_num_seqs=2)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            model.generate("Hello", greedy(2000, ignore_eos=True), use_tqdm=False)
        except EngineDraining as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    running = threading.Event()

    def look() -> None:
        if model._engine.statistics().num_running:
            running.set()
        else:
            model._loop.call_soon(look)

    model._loop.call_soon_threadsafe(look)
    assert running.wait(20)
    model.close()
    thread.join(20)
    assert len(errors) == 1


def test_closing_is_final_and_twice_is_once() -> None:
    model = LLM(max_num_seqs=2)
    model.generate("Hello", greedy(2), use_tqdm=False)
    model.close()
    model.close()
    with pytest.raises(EngineClosed, match="this LLM is closed"):
        model.generate("Hello", greedy(2), use_tqdm=False)
    with pytest.raises(EngineClosed, match="this LLM is closed"):
        model.chat(CHAT)
    model.close()


def test_one_that_is_forgotten_closes_itself() -> None:
    def use() -> None:
        LLM(max_num_seqs=2).generate("Hello", greedy(2), use_tqdm=False)

    before = set(threading.enumerate())
    use()
    gc.collect()
    assert set(threading.enumerate()) == before


def test_one_that_is_forgotten_in_its_own_thread_closes_itself_too() -> None:
    """The garbage collector runs in any thread, also in the LLM's own."""
    before = set(threading.enumerate())
    model = LLM(max_num_seqs=2)
    thread, finalizer = model._thread, model._finalizer
    model._loop.call_soon_threadsafe(finalizer)
    thread.join(20)
    assert set(threading.enumerate()) == before


def test_a_script_that_never_closes_ends_by_itself() -> None:
    code = """
import os; os.environ["OMP_WAIT_POLICY"] = "passive"
from novainfer import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM()
    print(len(llm.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("setting", "value"), [("max_num_seqs", 0), ("dtype", "float8"), ("max_num_seqs", "many"), ("max_seqs", 3)]
)
def test_a_bad_setting_is_one_error_and_no_thread(setting: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=setting):
        LLM(**{setting: value})


def test_a_model_that_is_not_there_is_one_error_and_no_thread() -> None:
    with pytest.raises(ModelLoadError, match="neither a folder here nor a hub id"):
        LLM("/no/such/model")
