"""What a number was measured on, and the programs that the benchmarks call in processes of their own.

They import the kernels, and torch with them; the benchmarks themselves do not.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import msgspec

from novainfer.bench.ideal import Roof
from novainfer.bench.report import table
from novainfer.bench.statistic import medians

PACKAGES = ("novainfer", "torch", "transformers")
GIB = 1024**3


def describe() -> dict[str, Any]:
    """CPU, cores, memory, versions, date, and how busy the machine is (load of the last minute)."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(_memory_bytes() / GIB, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cache_dir() -> Path:
    """Where checkpoints made for benchmarks are kept from one run to the next."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "novainfer" / "bench"


def make_checkpoint(like: str, folder: Path, seed: int = 0) -> None:
    """Write a random checkpoint of the named shape; raises ClickException with the program's own words."""
    _run("novainfer.bench.make_checkpoint", like, str(folder), "--seed", str(seed))


def find_checkpoint(like: str) -> Path:
    """The random checkpoint of the named shape in the cache, made when it is not there."""
    folder = cache_dir() / like
    if not (folder / "tokenizer_config.json").exists():  # the last file that is written
        click.echo(f"making a random checkpoint of {like}'s shape in {folder}", err=True)
        make_checkpoint(like, folder)
    return folder


def measure_raw() -> dict[str, Any]:
    """Read bandwidth and matrix-product peaks with all cores, as the kernels' program tells them."""
    out = _run("novainfer.bench.roofline", "--json")
    raw: dict[str, Any] = msgspec.json.decode(out.strip().splitlines()[-1])
    return raw


def measure_roof() -> Roof:
    """What bounds a bf16 model here; takes a few seconds."""
    return roof_of(measure_raw())


def roof_of(raw: dict[str, Any]) -> Roof:
    """The two numbers that the ideal times need.

    What is in bf16 can be multiplied in fp32: a CPU without instructions for bf16 has fp32's peak, not what it
    reaches by widening.
    """
    peak = max(raw["bfloat16_gflop_s"], raw["float32_gflop_s"])
    return Roof(bytes_per_s=raw["read_gb_s"] * 1e9, flops_per_s=peak * 1e9)


def roofline_report(repeat: int) -> tuple[dict[str, Any], str]:
    """The report of `bench roofline` and its table."""
    runs = [measure_raw() for _ in range(repeat)]
    found = medians(runs)
    report = {"benchmark": "roofline", "machine": describe(), "repeat": repeat, **found, "runs": runs}
    rows = [(key, value) for key, value in found.items() if isinstance(value, int | float)]
    return report, table(f"Roofline of {describe()['cpu']}, {repeat} x, medians", ("", "measured"), rows)


def _run(module: str, *arguments: str) -> str:
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise click.ClickException(f"{module} failed: {words[-1] if words else f'exit code {done.returncode}'}")
    return done.stdout
