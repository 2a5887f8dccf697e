"""`novainfer replay`: what the flight recorder has written, run again through the state machines."""

from __future__ import annotations

import json
import re
import time
from base64 import b85encode
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from novainfer.fsm.recording.dumpfile import FILE_BYTES_MAX, MAGIC, SUFFIX, About, decode_dump, encode_dump
from novainfer.fsm.recording.log import Image
from novainfer.fsm.recording.replay import DamagedRecording, Replayed, replay, slim
from novainfer.server.service import package_version

EMBED_BYTES_MAX = 1 << 20  # a larger recording stands beside the test that runs it
LINE_CHARS = 100


class Unreadable(click.ClickException):
    """The file is no recording, or a damaged one."""

    exit_code = 2


@click.command(name="replay")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--to-test", type=click.Path(dir_okay=False, path_type=Path), help="Write the incident as a pytest file, and stop."
)
@click.option("--check", is_flag=True, help="Check the owner of each KV block after each message; slower.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def replay_command(file: Path, to_test: Path | None, check: bool, as_json: bool) -> None:
    """Run FILE, which the flight recorder has written, again: without model, device or GPU.

    The same state machines are told the same messages, and must take the same transitions, plan the same steps and
    give the same texts. Exit code 0: they did. 1: they did not, and the first difference is shown. 2: FILE cannot be
    read. FILE holds prompts and answers; nothing in it is executed.
    """
    try:
        image, about = decode_dump(_read(file))
        began_s = time.perf_counter()
        found = replay(image, check=check)
    except DamagedRecording as error:
        raise Unreadable(f"{file}: {_printable(str(error))}") from None
    except OSError as error:
        raise Unreadable(f"{file} cannot be read: {error.strerror}") from None
    _tell(file, about, found, time.perf_counter() - began_s)
    if to_test is not None:
        for path in _write_test(to_test, file, image, about, found):
            click.echo(f"wrote {path}")
    if as_json:
        click.echo(json.dumps(_as_json(file, about, found)))
    if not found.is_same:
        raise click.exceptions.Exit(1)


def _read(file: Path) -> bytes:
    """The file, when it begins as a recording does; a device or a pipe may have no end."""
    with file.open("rb") as source:
        data = source.read(len(MAGIC))
        if data == MAGIC:
            data += source.read(FILE_BYTES_MAX)
            if source.read(1):
                raise DamagedRecording(f"it is larger than a recording can be ({FILE_BYTES_MAX >> 20} MiB)")
    return data


def _printable(text: str) -> str:
    """`text` from outside, without what a terminal would obey."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _echo(text: str) -> None:
    click.echo("\n".join(map(_printable, text.split("\n"))))


def _tell(file: Path, about: About, found: Replayed, took_s: float) -> None:
    echo = _echo
    echo(f"{file.name}: recorded {_date(about)} by NovaInfer {about.version}, {_why(about)}")
    if about.version != package_version():
        echo(f"this is NovaInfer {package_version()}: another version may rightly do otherwise")
    echo(
        f"replayed {found.segments} segments, {found.events} events, {found.steps} steps and {found.tokens} tokens of "
        f"{found.streams} requests: {found.span_s:.3f} s, in {took_s:.2f} s"
    )
    echo("at the end: " + ", ".join(f"{name} {state}" for name, state in found.states.items()))
    if found.finished:
        echo("choices ended, since the start: " + ", ".join(f"{n} {state}" for state, n in found.finished.items()))
    _list("incidents:", found.incidents)
    _list("last transitions:", found.last)
    if found.violation is not None:
        echo(f"VIOLATION: {found.violation}")
    if found.difference is not None:
        echo(f"DIFFERENT: {found.difference}")
    elif found.is_gone:
        echo("DIFFERENT: an exception was recorded here that does not come any more")
    else:
        if found.reproduced is not None:
            echo(f"the exception came again: {found.reproduced}")
        echo("the same transitions were taken")


def _list(title: str, lines: list[str]) -> None:
    if lines:
        _echo("\n    ".join([title, *lines]))


def _date(about: About) -> str:
    try:
        return datetime.fromtimestamp(about.created, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return "at no time that there is"


def _why(about: About) -> str:
    return f"because of {about.reason}: {about.message}" if about.message else f"reason: {about.reason}"


def _as_json(file: Path, about: About, found: Replayed) -> dict[str, Any]:
    difference = found.difference
    return {
        "file": str(file),
        "version": about.version,
        "created": about.created,
        "reason": about.reason,
        "message": about.message,
        "segments": found.segments,
        "entries": found.entries,
        "events": found.events,
        "steps": found.steps,
        "tokens": found.tokens,
        "requests": found.streams,
        "span_s": found.span_s,
        "transitions": {" ".join(filter(None, key)): count for key, count in found.transitions.items()},
        "states": found.states,
        "finished": found.finished,
        "incidents": found.incidents,
        "last": found.last,
        "same": found.is_same,
        "reproduced": found.reproduced,
        "gone": found.is_gone,
        "violation": found.violation,
        "difference": None
        if difference is None
        else {
            "segment": difference.segment,
            "entry": difference.entry,
            "at_s": difference.at_s,
            "what": difference.what,
        },
    }


# ---- as a test ---------------------------------------------------------------------------------------------------


def _write_test(path: Path, file: Path, image: Image, about: About, found: Replayed) -> list[Path]:
    """Write the incident as a pytest file; a large recording goes beside it. Returns what was written."""
    data = encode_dump(slim(image), about)
    written = [path]
    if len(data) <= EMBED_BYTES_MAX:
        text = b85encode(data).decode()
        lines = [f'    "{text[at : at + LINE_CHARS]}"' for at in range(0, len(text), LINE_CHARS)]
        imports, source = "from base64 import b85decode\n", "b85decode(RECORDING)"
        tail = "\n\nRECORDING = (\n" + "\n".join(lines) + "\n)\n"
    else:
        beside = path.with_suffix(SUFFIX)
        imports, source, tail = (
            "from pathlib import Path\n",
            f'Path(__file__).with_name("{beside.name}").read_bytes()',
            "",
        )
        written.append(beside)
    content = _TEST.format(
        what=_in_docstring(_why(about)),
        date=_date(about),
        version=_in_docstring(about.version),
        file=_in_docstring(file.name),
        name=re.sub(r"\W+", "_", f"{about.reason} {_date(about).removesuffix(' UTC')}").lower(),
        events=found.events,
        steps=found.steps,
        requests=found.streams,
        fails="while that exception still comes (once it does not, what came after it is not compared), and "
        if found.reproduced or found.is_gone
        else "",
        imports=imports,
        source=source,
    )
    try:
        path.write_text(content + tail, encoding="utf-8")
        for beside in written[1:]:
            beside.write_bytes(data)
    except OSError as error:
        raise Unreadable(f"{path} cannot be written: {error.strerror}") from None
    return written


def _in_docstring(text: str) -> str:
    """`text` from outside, as part of a docstring."""
    return re.sub(r'[\\"]+', " ", _printable(text))


_TEST = '''"""An incident of {date}, recorded by NovaInfer {version}: {what}

Written by `novainfer replay {file} --to-test`. It tells the state machines again what they were told then: {events}
events, {steps} steps, {requests} requests; no model, no device. It fails {fails}when the machines take another way than
they did. The recording holds the prompts of that time.
"""

{imports}
from novainfer.testing import replay_recording


def test_{name}() -> None:
    replayed = replay_recording({source})
    assert replayed.difference is None, f"the machines take another way: {{replayed.difference}}"
    assert replayed.reproduced is None, f"the incident is still there: {{replayed.reproduced}}"
    assert replayed.violation is None, f"not everything has the owner it should have: {{replayed.violation}}"
'''
