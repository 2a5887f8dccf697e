"""Prompt lookup: drafts from the sequence itself, what followed when its last tokens stood in it before.

As vLLM's "ngram" proposer it tries the last `prompt_lookup_max` tokens first and `prompt_lookup_min` last; the two
differ in which earlier place is taken: here the most recent one (the earliest in vLLM), because text that repeats with
changes repeats its last version. A place so recent that fewer tokens follow it than are wanted is a repetition, and is
taken to go on: drafts are copied from drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

# Earlier places of the last `prompt_lookup_min` tokens that are looked at, the most recent first: in text where they
# stand thousands of times (spaces, digits), one of the last few is nearly always as long a match as any.
LOOKS_MAX = 32


class PromptLookup:
    """The index of one sequence that only grows; a look costs a microsecond for each new token and place looked at.

    It can be thrown away at any time: the next look builds it again.
    """

    __slots__ = ("_earlier", "_latest", "_max", "_min")

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        """At least `prompt_lookup_min` (1 or more) tokens must match; no more than `prompt_lookup_max` are compared."""
        self._min = prompt_lookup_min
        self._max = prompt_lookup_max
        # Places are indexes of the token that followed; 0 is none.
        self._latest: dict[tuple[int, ...], int] = {}  # the last `_min` tokens before a place -> the most recent place
        self._earlier: list[int] = []  # [place] the one before it with the same tokens

    def propose(self, token_ids: Sequence[int], num_tokens: int, end: int | None = None) -> list[int]:
        """The drafts that follow `token_ids`, which begin with those of the last call; `num_tokens`, or none.

        Places before `end` are looked for (None: all), and indexed first where they are not yet.
        """
        self._index(token_ids, len(token_ids) if end is None else end)
        least, most, size = self._min, self._max, len(token_ids)
        place = self._latest.get(tuple(token_ids[size - least :]), 0) if size >= least else 0
        best = longest = 0
        for _ in range(LOOKS_MAX):
            if not place:
                break
            length = least
            while length < min(most, place) and token_ids[place - length - 1] == token_ids[size - length - 1]:
                length += 1
            if length > longest:
                best, longest = place, length
            if longest == most:
                break
            place = self._earlier[place]
        if not best:
            return []
        drafts = list(token_ids[best : best + num_tokens])
        period = len(drafts)
        while len(drafts) < num_tokens:
            drafts.append(drafts[-period])
        return drafts

    def _index(self, token_ids: Sequence[int], end: int) -> None:
        earlier, latest, least = self._earlier, self._latest, self._min
        for place in range(len(earlier), end):
            if place < least:
                earlier.append(0)
                continue
            key = tuple(token_ids[place - least : place])
            earlier.append(latest.get(key, 0))
            latest[key] = place
