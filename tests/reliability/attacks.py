"""Attacks on a server as users start it, with a normal client beside each; the table of docs/reliability.md.

python -m tests.reliability.attacks [--only NAME ...] [--sample] [--tls] [--api-processes N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.reliability import attacks_http1, attacks_http2, attacks_load
from tests.reliability.attack import TIMEOUT_S, Attack, Report, attack, serving

ATTACKS: tuple[Attack, ...] = (*attacks_http2.ATTACKS, *attacks_http1.ATTACKS, *attacks_load.ATTACKS)
SAMPLE = tuple(one for one in ATTACKS if one.sample)


async def run(
    attacks: Iterable[Attack], *, sample: bool = False, log: bool = False, flags: tuple[str, ...] = ()
) -> list[Report]:
    """Try them, one after the other; those that want the same server share one, which has `flags` besides."""
    reports = []

    def place(one: Attack) -> str:
        return repr((one.flags, one.limits))

    for _, group in groupby(sorted(attacks, key=place), key=place):
        together = list(group)
        async with serving((*together[0].flags, *flags), together[0].limits) as target:
            for one in together:
                if sample:
                    report = await attack(target, one, one.sample, rounds_max=1)
                else:
                    report = await attack(target, one, one.number)
                reports.append(report)
                if log:
                    print(json.dumps(report.row()), file=sys.stderr, flush=True)
    return reports


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as docs/reliability.md has them."""
    lines = [
        "| attack | how often | what came of it | neighbour alone p50 / p99 | beside it | answers (refused) "
        "| most, meanwhile | left |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        neighbour, left = row["neighbour"], row["left"]
        alone, beside = (
            f"{neighbour[name]['p50_ms']:g} / {neighbour[name]['p99_ms']:g} ms" for name in ("alone", "beside")
        )
        rest = ", ".join(f"{value} {name}" for name, value in left.items() if value and name != "mib")
        most = "{connections} connections, {tasks} tasks, {mib:+g} MiB".format(**row["most"])
        lines.append(
            f"| {row['name']}: {row['what']} | {row['rounds']} × {row['number']:,} | {row['seen']} | {alone} "
            f"| {beside} | {neighbour['served']} ({neighbour['refused']}) | {most} "
            f"| {rest or 'nothing'}, {row['first_round_mib']:+g}, {left['mib']:+g} MiB |"
        )
    return "\n".join(lines)


def be_attacker(name: str, port: int, number: int) -> None:
    """A round of the attack for each line of stdin; what it saw, as a line of stdout."""
    (one,) = [attack for attack in ATTACKS if attack.name == name]

    async def round_() -> str:
        async with asyncio.timeout(TIMEOUT_S):
            return await one.run(port, number)

    print("ready", flush=True)
    for _ in sys.stdin:
        print(asyncio.run(round_()), flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Attacks, with a normal client beside each.")
    parser.add_argument("--only", action="append", help="those whose name contains it, or one of several")
    parser.add_argument("--tls", action="store_true", help="over TLS")
    parser.add_argument("--api-processes", default="0", help="of the server")
    parser.add_argument("--sample", action="store_true", help="what `make test` runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--attack", help="be the attacker of this name; for this module's own use")
    parser.add_argument("--port", type=int)
    parser.add_argument("--number", type=int)
    args = parser.parse_args()
    if args.attack:
        be_attacker(args.attack, args.port, args.number)
        return
    began_s = time.monotonic()
    chosen = SAMPLE if args.sample else ATTACKS
    if args.only:
        chosen = tuple(one for one in chosen if any(part in one.name for part in args.only))
    flags = ("--api-processes", args.api_processes, *(["--self-signed"] if args.tls else []))
    rows = [report.row() for report in asyncio.run(run(chosen, sample=args.sample, log=True, flags=flags))]
    print(table(rows))
    result = {"wall_s": round(time.monotonic() - began_s, 1), "attacks": rows}
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
