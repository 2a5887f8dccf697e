"""JSON schemas as they are compiled, against another reader of them: what the grammar takes is what validates.

Schemas are drawn of bounded depth and width, with what would make an instance of any of them: of its own schema, or of
another one, in the order in which the grammar wants properties.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from llguidance import LLTokenizer

from novainfer.actors.grammar.compiler import Compiler, MaskRow, Masks
from novainfer.fsm.messages.structured import StructuredOutputsParams

TOKENIZER = (Path(str(files("novainfer.kernels"))) / "demo" / "model" / "tokenizer.json").read_text()
VOCAB, EOS = 1300, 1277
TOKENS_MAX = 400  # of a walk: most schemas end long before
LETTERS = 'ab "\\é😀\n'
Schema = dict[str, Any]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(TOKENIZER, VOCAB, [EOS])


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TOKENIZER, n_vocab=VOCAB, eos_token=[EOS])


def schemas(depth: int = 3) -> st.SearchStrategy[Schema]:
    leaves = st.one_of(
        st.tuples(st.integers(-40, 40), st.integers(0, 60)).map(
            lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
        ),
        st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
            lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}
        ),
        st.lists(st.sampled_from([0, 1, True, False, None, "a", "b", 'q"']), min_size=1, max_size=3).map(
            lambda found: {"enum": found}
        ),
        st.sampled_from(["x", 7, None, True]).map(lambda value: {"const": value}),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    )
    if not depth:
        return leaves
    inner = schemas(depth - 1)
    return st.one_of(leaves, arrays(inner), objects(inner), st.lists(inner, min_size=1, max_size=2).map(any_of))


def arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda found: {"type": "array", "items": found[0], "minItems": found[1], "maxItems": found[1] + found[2]}
    )


def objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    properties = st.dictionaries(st.sampled_from(["a", "b", 'c"', "dé"]), st.tuples(inner, st.booleans()), max_size=3)
    return properties.map(
        lambda found: {
            "type": "object",
            "properties": {name: kind for name, (kind, _) in found.items()},
            "required": [name for name, (_, is_required) in found.items() if is_required],
            "additionalProperties": False,
        }
    )


def any_of(kinds: list[Schema]) -> Schema:
    return {"anyOf": kinds}


def instance(schema: Schema, rng: Random) -> Any:
    """One that validates."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return instance(rng.choice(schema["anyOf"]), rng)
    kind = schema["type"]
    if kind == "integer":
        return rng.randint(schema["minimum"], schema["maximum"])
    if kind == "string":
        return "".join(rng.choices(LETTERS, k=rng.randint(schema["minLength"], schema["maxLength"])))
    if kind == "array":
        return [instance(schema["items"], rng) for _ in range(rng.randint(schema["minItems"], schema["maxItems"]))]
    if kind == "object":
        given, required = schema["properties"], schema["required"]
        return {name: instance(kind, rng) for name, kind in given.items() if name in required or rng.random() < 0.5}
    return rng.choice([True, False]) if kind == "boolean" else None


def is_taken(compiler: Compiler, tokenizer: LLTokenizer, schema: Schema, value: Any) -> bool:
    """Whether it may be written, token by token, and be the end; masks say the same as the matcher at each of them."""
    compiled = compiler.compile(StructuredOutputsParams(json=schema))
    matcher, words = compiled.matcher(), compiled.words
    masks = Masks(1)
    for token_id in [*tokenizer.tokenize_str(json.dumps(value, ensure_ascii=False)), EOS]:
        if not words[0, token_id // 32] >> token_id % 32 & 1:
            assert matcher.validate_tokens([token_id]) == 0
            return False
        words = np.zeros_like(words)
        (error,) = masks.advance([MaskRow(matcher, [token_id], [], 0)], words)
        assert error is None
    return bool(matcher.is_stopped())


@seed(1)
@settings(max_examples=120, deadline=None, database=None)
@given(schemas(), schemas(), st.integers(0, 2**32))
def test_an_instance_is_taken_where_it_validates_and_nowhere_else(
    compiler: Compiler, tokenizer: LLTokenizer, schema: Schema, other: Schema, chance: int
) -> None:
    rng = Random(chance)
    own = instance(schema, rng)
    assert Draft202012Validator(schema).is_valid(own)
    assert is_taken(compiler, tokenizer, schema, own)
    foreign = instance(other, rng)
    if not Draft202012Validator(schema).is_valid(foreign):
        assert not is_taken(compiler, tokenizer, schema, foreign)


@seed(2)
@settings(max_examples=60, deadline=None, database=None)
@given(schemas(), st.integers(0, 2**32))
def test_whatever_is_written_by_the_masks_validates(
    compiler: Compiler, tokenizer: LLTokenizer, schema: Schema, chance: int
) -> None:
    token_ids = list(walk(compiler, schema, Random(chance)))
    if len(token_ids) < TOKENS_MAX:
        Draft202012Validator(schema).validate(json.loads(tokenizer.decode_str(token_ids)))


def walk(compiler: Compiler, schema: Schema, rng: Random) -> Iterator[int]:
    """Tokens by chance, of those that are allowed, up to the end."""
    compiled = compiler.compile(StructuredOutputsParams(json=schema))
    matcher, words, masks = compiled.matcher(), compiled.words, Masks(1)
    for _ in range(TOKENS_MAX):
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8)[0], bitorder="little")).tolist()
        assert allowed, "a schema that has instances never comes to where nothing may follow"
        token_id = EOS if EOS in allowed else rng.choice(allowed)
        if token_id == EOS:
            return
        yield token_id
        words = np.zeros_like(words)
        (error,) = masks.advance([MaskRow(matcher, [token_id], [], 0)], words)
        assert error is None
