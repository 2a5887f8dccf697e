"""`novainfer bench grammar`, as short as can be: both ways give a table, and guesses the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from novainfer.bench import grammar, guessed_grammar
from novainfer.bench.cli.grammar import grammar as command

LOOKUP = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
SMALL: dict[str, Any] = {"batch": 2, "repeat": 1, "max_tokens": 24, "options": {"worker": "thread"}}


@pytest.mark.slow
def test_answers_in_a_schema_beside_free_ones() -> None:
    report, table = grammar.run("demo", **SMALL)
    (run,) = report["runs"]
    assert run["held"]["steps"] >= 24
    assert run["free"]["steps"] >= 24
    assert "ms a step, held" in table


@pytest.mark.slow
def test_guesses_in_a_schema_beside_none() -> None:
    report, table = guessed_grammar.run("demo", LOOKUP, **SMALL)
    assert report["is_equal"]
    assert report["drafted"] >= report["accepted"]
    assert table.split()[-1] == "yes"


def test_a_config_of_guesses_that_is_none_is_refused_by_its_field() -> None:
    found = CliRunner().invoke(command, ["--speculative-config", '{"method": "none"}'])
    assert found.exit_code == 2
    assert "--speculative-config" in found.output
    assert "method must be" in found.output
