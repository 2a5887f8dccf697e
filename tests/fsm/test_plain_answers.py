"""A request that wants nothing but text is given what it would be if each of its tokens were looked at closely."""

import random

from novainfer.fsm.messages.events import Submit
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.schedule.answer import next_output
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.text import Vocabulary

EOS, STOP, HIDDEN = 9, 3, 8
PIECES = [b"a", b"bc", b" ", b"stop", b"\xc3", b"\xa9", b"\xf0\x9f", b"", b"<s>", b"<eos>"]


def request(params, vocabulary, length):
    submit = Submit(request_id=0, stream_id=0, choice=0, token_ids=[0, 1], params=params, seed=0)
    return Request(submit, vocabulary, [EOS], length)


def outputs(params, tokens, length, *, is_close, degraded_at=100):
    """What is given for each of `tokens`, up to the end, and how many were not looked at closely."""
    vocabulary = Vocabulary.build(PIECES, frozenset([HIDDEN, EOS]))
    asked, found, num_plain = request(params, vocabulary, length), [], 0
    for at, token_id in enumerate(tokens):
        asked.is_degraded = at >= degraded_at
        if is_close:
            asked.plain_until = 0
            vocabulary.plain.clear()
        num_plain += asked.plain_until > 0
        found.append(next_output(asked, token_id, None, vocabulary, [EOS]))
        if found[-1].end is not None:
            break
    return found, num_plain


def test_plain_text_is_given_as_if_each_token_were_looked_at_closely():
    chance = random.Random(5)
    all_plain = 0
    for _ in range(300):
        params = SamplingParams(
            max_tokens=None,
            stop=chance.choice([None, None, "cb"]),
            stop_token_ids=chance.choice([[], [STOP]]),
            ignore_eos=chance.random() < 0.3,
            min_tokens=chance.choice([0, 0, 4]),
            skip_special_tokens=chance.random() < 0.7,
        )
        tokens = chance.choices(range(len(PIECES) + 1), weights=[4, 4, 4, 1, 2, 2, 1, 1, 1, 1, 1], k=12)
        length = chance.choice([8, 100])
        degraded_at = chance.choice([0, 6, 100])
        found, num_plain = outputs(params, tokens, length, is_close=False, degraded_at=degraded_at)
        assert found == outputs(params, tokens, length, is_close=True, degraded_at=degraded_at)[0]
        all_plain += num_plain
    assert all_plain > 500


def test_stop_strings_and_marks_are_looked_for_in_every_token():
    for params in (SamplingParams(stop="x"), SamplingParams(mark_token_ids=[1]), SamplingParams(logprobs=0)):
        assert outputs(params, [0, 1, 2], 100, is_close=False)[1] == 0
