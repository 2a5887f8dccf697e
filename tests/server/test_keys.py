"""Keys in a file: what is kept of them, by whom it is changed, and who is told what is wrong with it."""

from __future__ import annotations

import sqlite3
import stat
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from novainfer import InvalidParameter
from novainfer.server.cli import main as command_line
from novainfer.server.keys.record import KeyRecord, digest, new_key
from novainfer.server.keys.store import KeyStore

HASH = digest(b"some-key")
both_kinds = pytest.mark.parametrize("name", ["keys.yaml", "keys.db"])


def record(name: str = "alice", key: str = "some-key", **fields: Any) -> KeyRecord:
    return KeyRecord(name=name, hash=digest(key.encode()), **fields)


def run(*arguments: object, standard_input: str = "") -> tuple[int, str, str]:
    """Exit code, standard output and error of `novainfer keys`."""
    runner = CliRunner()
    result = runner.invoke(command_line.novainfer, ["keys", *map(str, arguments)], input=standard_input)
    return result.exit_code, result.stdout, result.stderr


@both_kinds
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    store = KeyStore.at(tmp_path / name)
    alice = record(
        requests_per_min=1, tokens_per_min=2, tokens_per_day=3, max_concurrent=4, weight=2.5, models=("a", "b")
    )
    admin = record("ops", "other-key", is_admin=True, priority=-3, created="2026-11-23")
    store.add(alice)
    store.add(admin)
    assert store.read() == [alice, admin]
    store.remove("alice")
    assert store.read() == [admin]
    store.remove("ops")
    assert store.read() == []
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


@both_kinds
def test_a_name_and_a_key_stand_once(tmp_path: Path, name: str) -> None:
    store = KeyStore.at(tmp_path / name)
    store.add(record())
    with pytest.raises(InvalidParameter, match="name 'alice' stands twice"):
        store.add(record(key="other"))
    with pytest.raises(InvalidParameter, match="two names have the key of 'bob'"):
        store.add(record("bob"))
    with pytest.raises(InvalidParameter, match="no key of the name 'carol'"):
        store.remove("carol")
    assert store.read() == [record()]


@both_kinds
def test_writers_at_the_same_time_lose_nothing(tmp_path: Path, name: str) -> None:
    def add(number: int) -> None:
        KeyStore.at(tmp_path / name).add(record(f"key{number}", f"key-{number}"))

    threads = [threading.Thread(target=add, args=[number]) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found.name for found in KeyStore.at(tmp_path / name).read()) == sorted(f"key{n}" for n in range(12))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys: [", "cannot be read"),
        ("[]", "Expected `object`, got `array`"),
        ("keys: 3", r"Expected `array`, got `int` - at `\$.keys`"),
        ("keys: [{name: alice}]", r"missing required field `hash` - at `\$.keys\[0\]`"),
        (f"keys: [{{name: alice, hash: '{HASH}', limit: 3}}]", "contains unknown field `limit`"),
        (f"keys: [{{name: alice, hash: '{HASH}', requests_per_min: 0}}]", r"requests_per_min must be from 1 .*\[0\]"),
        (f"keys: [{{name: alice, hash: '{HASH}', requests_per_min: 1.5}}]", "Expected `int | null`, got `float`"),
        (f"keys: [{{name: alice, hash: '{HASH}', weight: .nan}}]", "weight must be from 0.001 to 1000"),
        (f"keys: [{{name: 'a b', hash: '{HASH}'}}]", "name must be 1 to 64 letters"),
        (f"keys: [{{name: a, hash: '{HASH}'}}, {{name: a, hash: '{digest(b'x')}'}}]", "name 'a' stands twice"),
        ("keys: [{name: alice, hash: some-plain-key}]", "hash must be sha256: and 64 hexadecimal digits"),
        ("keys: !!python/object/apply:os.getcwd []", "cannot be read"),
    ],
)
def test_a_file_with_a_fault_is_one_sentence_that_names_it_and_no_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(InvalidParameter, match=said) as caught:
        KeyStore.at(path).read()
    assert caught.value.param == "keys_file"
    assert "\n" not in caught.value.message
    assert "some-plain-key" not in caught.value.message


def test_a_database_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "keys.sqlite3"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(InvalidParameter, match="file is not a database"):
        KeyStore.at(path).read()
    with closing(sqlite3.connect(other := tmp_path / "other.db")) as database, database:
        database.execute("CREATE TABLE people (name TEXT)")
    with pytest.raises(InvalidParameter, match="no such table: keys"):
        KeyStore.at(other).read()


def test_what_is_no_file_of_keys_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="is not there: `novainfer keys add` makes one"):
        KeyStore.at(tmp_path / "keys.yaml").read()
    with pytest.raises(InvalidParameter, match=r"must end in one of \.yaml"):
        KeyStore.at(tmp_path / "keys.txt")
    with pytest.raises(InvalidParameter, match="keys_file"):
        KeyStore.at(tmp_path / "none" / "keys.yaml").add(record())


# ---- the command -----------------------------------------------------------------------------------------------------


@both_kinds
def test_a_key_is_printed_once_and_kept_as_a_digest(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    code, key, said = run("add", "alice", "--keys-file", path, "--tokens-per-min", 1000, "--model", "demo")
    key = key.strip()
    assert (code, len(key)) == (0, len(new_key()))
    assert "keeps a digest" in said
    assert key.encode() not in path.read_bytes()
    [found] = KeyStore.at(path).read()
    assert (found.name, found.hash, found.tokens_per_min) == ("alice", digest(key.encode()), 1000)
    assert found.models == ("demo",)
    code, listed, _ = run("list", "--keys-file", path)
    assert code == 0
    assert "alice" in listed
    assert "1000" in listed
    assert found.hash not in listed
    [fields] = [msgspec.json.decode(line) for line in run("list", "--keys-file", path, "--json")[1].splitlines()]
    assert (fields["name"], "hash" in fields) == ("alice", False)
    assert run("revoke", "alice", "--keys-file", path)[0] == 0
    assert KeyStore.at(path).read() == []


def test_a_key_that_exists_is_taken_from_standard_input(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = "sk-of-another-server-0123456789"
    code, out, said = run("add", "alice", "--keys-file", path, "--stdin", standard_input=f"{key}\n")
    assert (code, out) == (0, "")
    assert key not in said
    assert KeyStore.at(path).read()[0].hash == digest(key.encode())
    code, _, said = run("add", "bob", "--keys-file", path, "--stdin", standard_input="short\n")
    assert code != 0
    assert "at least 20 printable" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["add", "alice", "--requests-per-min", "0"], "--requests-per-min must be from 1 to"),
        (["add", "alice", "--weight", "1001"], "--weight must be from 0.001 to 1000"),
        (["add", "a b"], "name"),
        (["revoke", "nobody"], "there is no key of the name 'nobody'"),
    ],
)
def test_what_is_wrong_is_said_in_the_words_of_the_command(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: []")
    assert command_line.main(["keys", *arguments, "--keys-file", str(path)]) == 2
    assert said in capsys.readouterr().err
