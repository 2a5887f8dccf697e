"""`--model` of `novainfer serve`: one model as ever, or several as NAME=PATH."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from novainfer.server.cli.options import MODEL_SOURCES

_NAMED = re.compile(r"(?P<name>[^=/\\\s]+)=(?P<path>.+)")  # a path that holds `=` mostly begins with a folder


class NamedModels(click.types.StringParamType):
    """A model, or NAME=PATH. In a variable several stand side by side, where each has its name."""

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """A path may hold spaces: it is one model unless all its words are models with names."""
        words = rv.split()
        return words if len(words) > 1 and all(map(_NAMED.fullmatch, words)) else [rv]


def named_models(ctx: click.Context, options: dict[str, Any]) -> dict[str, str]:
    """The paths of several models, by name; none where there is one, which `options` says then as other commands do.

    Raises `UsageError` naming what is wrong.
    """
    given = options["model"] or ()
    if len(given) < 2:
        _take_one(options, given[0] if given else None)
        ctx.params.update(model=options["model"], served_model_name=options["served_model_name"])
        return {}
    for name, flag in MODEL_SOURCES.items():
        if name != "model" and options.get(name) and ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"several models are given by --model alone: leave {flag} out")
    if options["served_model_name"]:
        raise click.UsageError("each of several models has its name before its path: leave --served-model-name out")
    found: dict[str, str] = {}
    for text in given:
        match = _NAMED.fullmatch(text)
        if match is None:
            raise click.UsageError(f"where there are several models each is NAME=PATH, and not {text!r}")
        if match["name"] in found:
            raise click.UsageError(f"two models are called {match['name']!r}: each needs a name of its own")
        found[match["name"]] = match["path"]
    ctx.params["model"] = options["model"] = None
    return found


def _take_one(options: dict[str, Any], given: str | None) -> None:
    """One model, which may have its name with it; a path that exists is no name."""
    options["model"] = given
    match = _NAMED.fullmatch(given) if given is not None and not os.path.exists(given) else None
    if match is not None and not options["served_model_name"]:
        options["served_model_name"], options["model"] = match["name"], match["path"]
