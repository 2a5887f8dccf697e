"""Draw the machines from their tables: `python -m novainfer.fsm.diagram docs/machines.md` writes the page again."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from novainfer.fsm.core.machine import Machine, Row, each_row
from novainfer.fsm.machines import FRONT, MACHINES, OF_MODELS, READERS, states

HEAD = """# The machines

Written by `make docs` from the tables in `fsm/`; a test fails when this page and the tables differ.

Each machine takes one event at a time. The pictures show what may follow a state, by the events that lead there
(those that leave a machine where it is are only in the tables). An event that is *ignored* may come and changes
nothing; one that *cannot come* raises, and changes nothing either. Between them the tables have a row for every event
in every state. Where a state waits for one answer, a guard tells it from others: the first row is for the event *of
this step* (job, epoch, …), and the next one for *any other*.
"""


def page() -> str:
    """The whole page, in Markdown."""
    return HEAD + "".join(map(_section, (*MACHINES, *OF_MODELS, *READERS, *FRONT)))


def _section(machine: type[Machine]) -> str:
    module = inspect.getmodule(machine)
    assert module is not None
    assert module.__doc__ is not None
    summary = module.__doc__.splitlines()[0]
    name = module.__name__.partition(".")[2].replace(".", "/")
    picture = f"```mermaid\n{diagram(machine)}```"
    return f"\n## {machine.__name__}\n\n`{name}.py`. {summary}\n\n{picture}\n\n{_rows(machine)}"


def diagram(machine: type[Machine]) -> str:
    """A mermaid stateDiagram-v2: one arrow for each pair of states, with the events that lead from one to the other."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, event, row in each_row(machine.TABLE):
        for follows in sorted(row.follows):
            if follows != state:
                events = arrows.setdefault((str(state), follows), [])
                events += [event.__name__] if event.__name__ not in events else []
    order = {str(state): at for at, state in enumerate(states(machine))}
    lines = ["stateDiagram-v2", f"    [*] --> {states(machine)[0]}"]
    for (source, target), events in sorted(arrows.items(), key=lambda item: [order[s] for s in item[0]]):
        lines.append(f"    {source} --> {target}: {', '.join(sorted(events))}")
    return "\n".join(lines) + "\n"


def _rows(machine: type[Machine]) -> str:
    """A table of all rows; states that an event treats alike share a line."""
    order = states(machine)
    lines: dict[tuple[str, Row], list[StrEnum]] = {}
    for state, event, row in each_row(machine.TABLE):
        follows = frozenset(["the same"]) if row.follows == {state} and len(order) > 1 else row.follows
        shown = Row(row.action, follows, row.why, row.impossible)
        lines.setdefault((f"{event.__name__}, *{row.of}*" if row.of else event.__name__, shown), []).append(state)
    text = "| event | in state | action | then |\n| --- | --- | --- | --- |\n"
    ranks = {str(state): rank for rank, state in enumerate(order)}
    for (name, row), where in lines.items():
        if row.action:
            what, then = f"`{row.action}`", _names(sorted(row.follows, key=lambda s: ranks.get(s, -1)))
        else:
            what, then = ("*cannot come*" if row.impossible else "*ignored*"), row.why
        text += f"| {name} | {_names(sorted(map(str, where), key=ranks.__getitem__))} | {what} | {then} |\n"
    return text


def _names(names: Iterable[str]) -> str:
    return ", ".join(str(name) for name in names)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
