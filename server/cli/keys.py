"""`novainfer keys`: who may use a server, and how much of it."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from novainfer.server.keys.record import KeyRecord, digest, new_key
from novainfer.server.keys.store import KeyStore

Command = TypeVar("Command", bound=Callable[..., Any])

KEYS_FILE_VARIABLE = "NOVAINFER_KEYS_FILE"
IMPORTED_CHARS_MIN = 20  # what is kept of a key would tell a shorter one to a program that tries them all

file_option = click.option(
    "--keys-file",
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar=KEYS_FILE_VARIABLE,
    required=True,
    help=f"The file of keys: .yaml, .yml, .db, .sqlite or .sqlite3.  [env: {KEYS_FILE_VARIABLE}]",
)


@click.group()
def keys() -> None:
    """Add, list and revoke the keys of a file that `novainfer serve --keys-file` reads.

    The file holds digests of the keys, and never a key. A server that runs finds a change with the next request.
    """


@keys.command()
@click.argument("name")
@file_option
@click.option("--requests-per-min", type=int, help="Requests that it may begin in a minute.")
@click.option("--tokens-per-min", type=int, help="Tokens of prompts and answers in a minute.")
@click.option("--tokens-per-day", type=int, help="Tokens of prompts and answers in a day, from midnight UTC.")
@click.option("--max-concurrent", type=int, help="Live choices at a time.")
@click.option("--weight", type=float, default=1.0, show_default=True, help="Its share beside other keys.")
@click.option("--priority", type=int, default=0, show_default=True, help="Of its requests; the lowest goes first.")
@click.option(
    "--model", "models", multiple=True, help="A model that it may use; may be given several times.  [default: all]"
)
@click.option("--admin", "is_admin", is_flag=True, help="It sees and cancels all requests, and may inject faults.")
@click.option("--stdin", "is_imported", is_flag=True, help="Take a key that exists from standard input.")
def add(name: str, keys_file: Path, models: tuple[str, ...], is_imported: bool, **fields: Any) -> None:
    """Add the key NAME, and print it: it is shown this once."""
    key = _imported() if is_imported else new_key()
    created = datetime.datetime.now(datetime.UTC).date().isoformat()
    record = KeyRecord(name=name, hash=digest(key.encode("ascii")), created=created, models=models or None, **fields)
    KeyStore.at(keys_file).add(record)
    if is_imported:
        click.echo(f"{keys_file} has the key {name} now", err=True)
        return
    click.echo(f"The key {name}; {keys_file} keeps a digest of it, and cannot show it again:", err=True)
    click.echo(key)


def _imported() -> str:
    key = sys.stdin.readline().strip()
    if not key.isascii() or not key.isprintable() or " " in key or len(key) < IMPORTED_CHARS_MIN:
        what = f"at least {IMPORTED_CHARS_MIN} printable ASCII characters without spaces"
        raise click.UsageError(f"--stdin: the key must be {what}")
    return key


@keys.command(name="list")
@file_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each key.")
def list_keys(keys_file: Path, as_json: bool) -> None:
    """List the keys with their limits; of the keys themselves, nothing."""
    found = KeyStore.at(keys_file).read()
    if as_json:
        for record in found:
            fields = msgspec.to_builtins(record)
            del fields["hash"]
            click.echo(msgspec.json.encode(fields))
        return
    if not found:
        click.echo(f"{keys_file} has no keys", err=True)
        return
    rows = [_HEADER, *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@keys.command()
@click.argument("name")
@file_option
def revoke(name: str, keys_file: Path) -> None:
    """Take the key NAME away: its next request gets a 401; those that run end as they would."""
    KeyStore.at(keys_file).remove(name)
    click.echo(f"{keys_file} has no key {name} any more", err=True)


_HEADER = ("name", "created", "requests/min", "tokens/min", "tokens/day", "at a time", "weight", "priority", "models")


def _row(record: KeyRecord) -> tuple[str, ...]:
    limits = (record.requests_per_min, record.tokens_per_min, record.tokens_per_day, record.max_concurrent)
    models = "all" if record.models is None else ", ".join(record.models)
    return (
        record.name + (" (admin)" if record.is_admin else ""),
        record.created or "-",
        *("-" if limit is None else str(limit) for limit in limits),
        f"{record.weight:g}",
        str(record.priority),
        models,
    )
