"""`novainfer bench grammar`: what it costs to hold answers to a JSON schema, and what guesses bring to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import click

from novainfer.bench.cli.options import as_json_option, fields_of, progress, repeat_option, told
from novainfer.bench.report import emit


@click.command()
@click.option("--model", default="demo", show_default=True, help="A folder with a tokenizer, or a hub id.")
@repeat_option(5)
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Answers at once.")
@click.option("--max-tokens", type=click.IntRange(2), default=160, show_default=True, help="Tokens of each, at most.")
@click.option("--speculative-config", metavar="JSON", help="Guess in turns with not guessing, all in the schema.")
@click.option("--option", "options", multiple=True, metavar="FIELD=VALUE", help="A field of EngineConfig.")
@as_json_option
def grammar(
    model: str,
    repeat: int,
    batch: int,
    max_tokens: int,
    speculative_config: str | None,
    options: Sequence[str],
    as_json: bool,
) -> None:
    """Answers held to a JSON schema, in turns with free ones of the same lengths, or with and without guesses."""
    from novainfer.bench import grammar as beside_free
    from novainfer.bench import guessed_grammar
    from novainfer.fsm.messages.errors import InvalidParameter
    from novainfer.fsm.schedule.speculative_config import SpeculativeConfig

    way: Any = beside_free.run
    if speculative_config is not None:
        try:
            SpeculativeConfig.of(speculative_config)
        except InvalidParameter as error:
            raise click.BadParameter(error.message, param_hint="--speculative-config") from None
        way = partial(guessed_grammar.run, speculative_config=speculative_config)
    measure = lambda: way(  # noqa: E731
        model, batch=batch, repeat=repeat, max_tokens=max_tokens, options=fields_of(options), progress=progress
    )
    emit(*told(measure), as_json)
