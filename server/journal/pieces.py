"""The deltas of an answer, cut into pieces of one token each: the same ones however they were merged on the way.

So what a client is sent depends on tokens alone, and not on how fast it, or anything here, has read them.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from novainfer import Delta, SamplingParams
from novainfer.fsm.messages.outputs import Mark
from novainfer.fsm.text import TextAssembler, Vocabulary, text_assembler
from novainfer.server.journal.records import Said


class Cutter:
    """Cuts the deltas of one choice, and knows the pieces of it that there are."""

    def __init__(self, index: int, params: SamplingParams, vocabulary: Vocabulary) -> None:
        self._index = index
        self._params = params
        self._text: TextAssembler = text_assembler(
            vocabulary,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            marked_ids=params.mark_token_ids,
        )
        self.pieces: list[Delta] = []
        self._num_pushed = 0  # tokens that the assembler has had: it is needed only where a delta has several

    def cut(self, delta: Delta) -> list[Delta]:
        """The pieces of `delta` that are new; it may begin with tokens that are known."""
        num_known = delta.num_generated_tokens - len(delta.token_ids)
        assert num_known <= len(self.pieces), "no token is left out"
        if len(delta.token_ids) == 1 and num_known == len(self.pieces):
            self.pieces.append(delta)
            return [delta]
        first = len(self.pieces)
        for at, token_id in enumerate(delta.token_ids, num_known):
            if at < first:
                assert self.pieces[at].token_ids == [token_id], "an answer that goes on is the one that it was"
                continue
            self._catch_up()
            is_last = delta.finish_reason is not None and at + 1 == delta.num_generated_tokens
            piece = msgspec.structs.replace(
                delta,
                token_ids=[token_id],
                num_generated_tokens=at + 1,
                logprobs=None if delta.logprobs is None else [delta.logprobs[at - num_known]],
                marks=_marks_of(delta.marks, at + 1),
            )
            if not is_last:
                piece.text = self._push(token_id)
                piece.finish_reason, piece.stop_reason = None, None
                piece.num_draft_tokens = piece.num_accepted_tokens = 0
            else:
                before = sum(len(one.text) for one in self.pieces[num_known:])
                piece.text = delta.text[before:]
            if at:
                piece.prompt_token_ids = piece.prompt_logprobs = None
            self.pieces.append(piece)
        return self.pieces[first:]

    def again(self, said: Said, request_id: str) -> Delta:
        """The piece that `said` was made of."""
        begun = said.begun
        piece = Delta(
            request_id=request_id,
            index=self._index,
            token_ids=[said.token_id],
            logprobs=None if said.logprob is None else [said.logprob],
            num_generated_tokens=len(self.pieces) + 1,
            is_degraded=said.is_degraded,
        )
        if begun is not None:
            piece.num_prompt_tokens, piece.num_cached_tokens = begun.num_prompt_tokens, begun.num_cached_tokens
            piece.seed, piece.prompt_token_ids = begun.seed, begun.prompt_token_ids
            piece.prompt_logprobs = begun.prompt_logprobs
        else:
            first = self.pieces[0]
            piece.num_prompt_tokens, piece.num_cached_tokens = first.num_prompt_tokens, first.num_cached_tokens
            piece.seed = first.seed
        if (ended := said.ended) is not None:
            piece.text, piece.marks = ended.text, ended.marks
            piece.finish_reason, piece.stop_reason = ended.finish_reason, ended.stop_reason
            piece.num_draft_tokens, piece.num_accepted_tokens = ended.num_draft_tokens, ended.num_accepted_tokens
        else:
            piece.text = self._push(said.token_id)
            piece.marks = self._text.take_marks()
        self.pieces.append(piece)
        return piece

    def _catch_up(self) -> None:
        for piece in self.pieces[self._num_pushed :]:
            self._push(piece.token_ids[0])

    def _push(self, token_id: int) -> str:
        self._num_pushed += 1
        return self._text.push(token_id, may_stop=self._num_pushed >= self._params.min_tokens)


def cutters(num_choices: int, params: SamplingParams, vocabulary: Vocabulary) -> list[Cutter]:
    """One for each choice."""
    return [Cutter(index, params, vocabulary) for index in range(num_choices)]


def pieces_again(said: Iterable[Said], own: list[Cutter], request_id: str) -> list[Delta]:
    """All pieces that there were, in their order."""
    return [own[one.index].again(one, request_id) for one in said]


def _marks_of(marks: list[Mark], num_tokens: int) -> list[Mark]:
    return [mark for mark in marks if mark.num_tokens == num_tokens]
