"""What stands between this machine and a server: each finding with what to do about it.

A failure keeps a server with these settings from starting, or from answering right; a warning makes it slower, or is
likely to be a mistake; everything else is there to be read, and to be sent along with a question.
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import shutil
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from novainfer import EngineConfig, KvEventsConfig, NovaInferError, machine
from novainfer.server.http.listen import bind, check_certificate
from novainfer.server.keys.store import KeyStore
from novainfer.server.operate.recorder import usable_default
from novainfer.server.service import package_version
from novainfer.server.settings import ServerSettings

Level = Literal["ok", "warning", "failure"]

GIB = 1 << 30
PYTHONS = ((3, 11), (3, 14))  # from, below
DESCRIPTORS_MIN = 4096  # one for each connection: fewer are fewer than may wait in the queue
FREE_DISK_BYTES_MIN = GIB
CERTIFICATE_WARNING_DAYS = 14
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SOMAXCONN = Path("/proc/sys/net/core/somaxconn")
# Settings of OpenMP that slow an engine down or hang it: what is right, and what it should be.
OPENMP: dict[str, tuple[Callable[[str], bool], str]] = {
    "OMP_WAIT_POLICY": (lambda value: value.lower() == "passive", "passive: threads that spin starve the event loop"),
    "OMP_DYNAMIC": (lambda value: value.lower() in ("false", "0"), "unset: the number of threads must not change"),
    "GOMP_CPU_AFFINITY": (lambda value: False, "unset: threads of several processes would share the first cores"),
    "KMP_BLOCKTIME": (lambda value: value == "0", "0: threads that spin starve the event loop"),
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at: what was found, and what to do about it where something is to be done."""

    topic: str
    level: Level = "ok"
    text: str
    advice: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `novainfer doctor --json` prints; `is_fit`: a server with these settings would start and be right."""

    version: str
    is_fit: bool
    findings: list[Finding]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """For which server this machine is examined."""

    config: EngineConfig
    settings: ServerSettings
    models: tuple[str, ...] = ()  # their paths, where there are several: `config` is that of each but for its model
    unknown_variables: tuple[str, ...] = ()
    environ: Mapping[str, str] = msgspec.field(default_factory=lambda: dict(os.environ))

    @property
    def configs(self) -> tuple[EngineConfig, ...]:
        """One for each model."""
        replace = msgspec.structs.replace
        return tuple(replace(self.config, model=path) for path in self.models) or (self.config,)

    @property
    def memory_share(self) -> float:
        """What each model that is loaded has of the memory."""
        return self.config.memory_share / min(len(self.configs), self.settings.max_loaded_models or len(self.configs))


Check = Callable[[Asked], Iterator[Finding]]


def examine(asked: Asked, on_finding: Callable[[Finding], Any] = lambda finding: None) -> Report:
    """Look at everything; `on_finding` hears of each finding when it is there."""
    findings: list[Finding] = []
    for topic, check in CHECKS.items():
        try:
            for finding in check(asked):
                findings.append(finding)
                on_finding(finding)
        except Exception as error:  # a look that fails must not keep the others from being taken
            message = error.message if isinstance(error, NovaInferError) else f"{type(error).__name__}: {error}"
            finding = Finding(topic=topic, level="failure", text=f"could not be looked at: {message}")
            findings.append(finding)
            on_finding(finding)
    is_fit = all(finding.level != "failure" for finding in findings)
    return Report(version=package_version(), is_fit=is_fit, findings=findings)


def _program(asked: Asked) -> Iterator[Finding]:
    python = platform.python_version()
    text = f"NovaInfer {package_version()}, Python {python}, {platform.system()} {platform.release()}"
    if not PYTHONS[0] <= sys.version_info < PYTHONS[1]:
        yield Finding(topic="program", level="warning", text=text, advice="use Python 3.11 to 3.13, which are tested")
    else:
        yield Finding(topic="program", text=text)
    for name in asked.unknown_variables:
        advice = f"correct its name, or unset it: `novainfer serve --help` lists what there is ({name})"
        yield Finding(topic="program", level="warning", text=f"{name} in the environment is no setting", advice=advice)
    yield from _extras(asked)


def _extras(asked: Asked) -> Iterator[Finding]:
    settings, events = asked.settings, asked.config.kv_events_config
    wanted = {
        "otel": (
            "opentelemetry.exporter.otlp.proto.http",
            settings.otlp_traces_endpoint is not None,
            "--otlp-traces-endpoint",
        ),
        "events": ("zmq", isinstance(events, KvEventsConfig) and events.is_on, "--kv-events-config"),
        "tls": ("cryptography", settings.self_signed, "--self-signed"),
    }
    for extra, (module, is_wanted, name) in wanted.items():
        if is_wanted and not _is_there(module):
            advice = f"pip install 'novainfer[{extra}]', or leave {name} out"
            text = f"{name} needs what novainfer[{extra}] brings"
            yield Finding(topic="program", level="failure", text=text, advice=advice)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # what it is a part of is not there
        return False


def _cpu(asked: Asked) -> Iterator[Finding]:
    cpu = machine.cpu()
    granted = f", of which a quota grants {cpu.granted}" if cpu.granted is not None else ""
    yield Finding(topic="cpu", text=f"{cpu.model} ({cpu.machine}), {cpu.num_usable} of {cpu.num_cpus} CPUs{granted}")
    if not cpu.levels:
        text = "no instruction set that the native kernels know: torch computes, several times slower"
        advice = "use a CPU with AVX2 (x86-64) or any aarch64, on Linux"
        yield Finding(topic="cpu", level="warning", text=text, advice=advice)
    elif cpu.best_level not in (None, cpu.levels[0]):
        text = f"native kernels for {cpu.levels[0]}, though this CPU has {cpu.best_level}"
        yield Finding(topic="cpu", level="warning", text=text, advice="unset NOVAINFER_ISA, which says so")
    else:
        yield Finding(topic="cpu", text=f"native kernels for {cpu.levels[0]}")


def _threads(asked: Asked) -> Iterator[Finding]:
    for name, (is_right, wanted) in OPENMP.items():
        value = asked.environ.get(name)
        if value is not None and not is_right(value):
            text = f"{name}={value} in the environment"
            yield Finding(topic="threads", level="warning", text=text, advice=f"{name} should be {wanted}")
    cpu = machine.cpu()
    most = min(cpu.num_usable, cpu.granted or cpu.num_usable)
    named = {name: asked.environ.get(name, "") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    given = next((int(value) for value in named.values() if value.isdigit()), None)
    wanted_threads = asked.config.num_threads or given
    if wanted_threads is not None and wanted_threads > most:
        text = f"{wanted_threads} threads are asked for, and {most} CPUs may be used"
        advice = "leave --num-threads and OMP_NUM_THREADS out: threads that wait for a CPU hold all others up"
        yield Finding(topic="threads", level="warning", text=text, advice=advice)
    else:
        yield Finding(
            topic="threads", text=f"{wanted_threads or 'as many threads as torch finds cores'}, OpenMP passive"
        )


def _compiler(asked: Asked) -> Iterator[Finding]:
    prebuilt, folder = machine.native_folders()
    name, said = machine.compiler()
    made = sorted(folder.glob("*.so")) if folder.is_dir() else []
    if prebuilt:
        yield Finding(topic="compiler", text=f"none is needed: the wheel has {len(prebuilt)} native libraries")
    elif said is not None:
        yield Finding(topic="compiler", text=f"{said}; libraries go to {folder}")
    elif made:
        yield Finding(topic="compiler", text=f"{name} is not there; {made[-1]} was compiled before")
    else:
        advice = "install g++ (Debian: apt install g++), set CXX, or install a wheel, which brings native libraries"
        text = f"{name} is not there, and no native library: torch computes, several times slower"
        yield Finding(topic="compiler", level="warning", text=text, advice=advice)


def _torch(asked: Asked) -> Iterator[Finding]:
    version, gpus = machine.torch_version(), machine.gpus()
    if version is None:
        advice = "pip install torch --index-url https://download.pytorch.org/whl/cpu (or the CUDA build)"
        yield Finding(topic="torch", level="failure", text="torch is not installed", advice=advice)
        return
    has_cuda = "+cpu" not in version
    for gpu in gpus:
        text = f"{gpu.name}, {gpu.free_mib} of {gpu.memory_mib} MiB free, driver {gpu.driver}"
        yield Finding(topic="gpu", text=text)
    if gpus and not has_cuda:
        advice = "install torch's CUDA build to use the GPU, with --device cuda"
        yield Finding(topic="torch", level="warning", text=f"torch {version} cannot use the GPU", advice=advice)
    else:
        yield Finding(topic="torch", text=f"torch {version}")
    if asked.config.device == "cuda" and not gpus:
        advice = "leave --device cuda out, or install NVIDIA's driver (in a container: run it with --gpus all)"
        text = "--device cuda is asked for, and nvidia-smi finds no GPU"
        yield Finding(topic="gpu", level="failure", text=text, advice=advice)
    elif not gpus:
        yield Finding(topic="gpu", text="none")


def _kernels(asked: Asked) -> Iterator[Finding]:
    try:
        first = asked.configs[0]
        dtype = first.dtype if first.dtype != "auto" else machine.needs_of(first).dtype
    except NovaInferError:
        dtype = "bfloat16"  # of a model that cannot be looked at, as was told above
    try:
        trial = asyncio.run(machine.try_kernels(asked.config, dtype))
    except NovaInferError as error:
        advice = "see the lines above; --native 0 computes by torch alone"
        text = f"the demo model does not run in {dtype}: {error.message}"
        yield Finding(topic="kernels", level="failure", text=text, advice=advice)
        return
    by_kind: dict[str, list[str]] = {}
    for operation, kind in trial.kernels.items():
        by_kind.setdefault(kind, []).append(operation)
    used = "; ".join(f"{kind}: {', '.join(operations)}" for kind, operations in by_kind.items())
    yield Finding(topic="kernels", text=f"{trial.dtype}, {trial.num_threads} threads: {used}")
    speed = f"{trial.tokens_per_s:.0f} tokens/s of the demo model, which started in {trial.start_s:.1f} s"
    yield Finding(topic="kernels", text=speed)
    for kernel, why in trial.failed_kernels.items():
        advice = "report it with this output: others compute in its place, right and slower"
        yield Finding(topic="kernels", level="warning", text=f"{kernel} failed its self-test: {why}", advice=advice)


def _memory(asked: Asked) -> Iterator[Finding]:
    found = machine.memory()
    limit = f", the container's limit is {_gib(found.limit_bytes)}" if found.limit_bytes is not None else ""
    yield Finding(topic="memory", text=f"{_gib(found.free_bytes)} free of {_gib(found.total_bytes)}{limit}")
    if asked.models:
        text = f"{len(asked.models)} models, and {asked.memory_share:.0%} of the memory for each that is loaded"
        yield Finding(topic="memory", text=text)
    for config in asked.configs:
        yield _room(config, int(found.free_bytes * asked.memory_share), asked.memory_share)
    pages = HUGE_PAGES.read_text().partition("[")[2].partition("]")[0] if HUGE_PAGES.is_file() else ""
    if pages == "never" and asked.config.device == "cpu":
        advice = f"echo madvise > {HUGE_PAGES}: weights and KV cache are read a fifth faster through huge pages"
        yield Finding(topic="memory", level="warning", text="transparent huge pages are off", advice=advice)


def _room(config: EngineConfig, free_bytes: int, share: float) -> Finding:
    """Whether a model fits with one context, into `free_bytes` of the host or into its share of a GPU."""
    try:
        needs = machine.needs_of(config)
    except NovaInferError as error:
        return Finding(topic="memory", level="failure", text=f"could not be looked at: {error.message}")
    text = f"{needs.name} ({needs.architecture}, {needs.dtype}): about {_gib(needs.weight_bytes)} of weights"
    if config.device == "cuda":
        free = sum(gpu.free_mib for gpu in machine.gpus()[:1]) << 20
        room = int(free * config.gpu_memory_utilization * share) - needs.weight_bytes
    else:
        room = int((free_bytes - needs.weight_bytes) * config.kv_cache_memory_utilization)
    tokens = max(room, 0) // needs.kv_bytes_per_token
    least = needs.max_model_len * needs.kv_bytes_per_token
    if tokens < needs.max_model_len:
        advice = (
            f"give it {_gib(needs.weight_bytes + least)}, or make less do: --max-model-len {max(tokens, 0)} or below, "
            "--quantization int8 or int4, --kv-cache-dtype int8"
        )
        text += f", and a cache of {tokens} tokens, though one context is {needs.max_model_len}"
        return Finding(topic="memory", level="failure", text=text, advice=advice)
    text += f", and room for a cache of {tokens} tokens: {tokens // needs.max_model_len} full contexts of "
    return Finding(topic="memory", text=f"{text}{needs.max_model_len}")


def _files(asked: Asked) -> Iterator[Finding]:
    yield from _journal(asked.settings.journal)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "any number" if hard == resource.RLIM_INFINITY else str(hard)
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_MIN:
        advice = f"raise it to {DESCRIPTORS_MIN} or more (ulimit -Hn, LimitNOFILE=, or the container's ulimits)"
        text = f"{hard} files may be open: each connection is one"
        yield Finding(topic="files", level="warning", text=text, advice=advice)
    else:
        yield Finding(topic="files", text=f"{most} files may be open (now {soft}; the server raises it itself)")
    folder = Path(asked.config.recorder_dir) if asked.config.recorder_dir is not None else usable_default()
    if not asked.config.recorder:
        return
    if folder is None:
        advice = "give --recorder-dir a folder that can be written, so that what goes wrong can be looked at"
        yield Finding(topic="files", level="warning", text="recordings have no folder", advice=advice)
        return
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        advice = "give --recorder-dir a folder that can be written"
        yield Finding(topic="files", level="failure", text=f"{folder} cannot be written", advice=advice)
    elif free < FREE_DISK_BYTES_MIN:
        advice = "make room: recordings of what goes wrong would be cut off"
        yield Finding(topic="files", level="warning", text=f"{_gib(free)} are free at {place}", advice=advice)
    else:
        yield Finding(topic="files", text=f"recordings go to {folder}, where {_gib(free)} are free")


def _journal(path: Path | None) -> Iterator[Finding]:
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        text, advice = f"the journal {path} cannot be written", "give --journal a file in a folder that can be written"
        yield Finding(topic="files", level="failure", text=text, advice=advice)
    elif (free := shutil.disk_usage(folder).free) < FREE_DISK_BYTES_MIN:
        advice = "make room: answers that cannot be written into the journal end with the server"
        yield Finding(topic="files", level="warning", text=f"{_gib(free)} are free at {folder}", advice=advice)
    else:
        yield Finding(topic="files", text=f"the journal is {path}, where {_gib(free)} are free")


def _api_processes(asked: Asked) -> Iterator[Finding]:
    number, cpu = asked.settings.api_processes, machine.cpu()
    if not number:
        return
    most = min(cpu.num_usable, cpu.granted or cpu.num_usable)
    text = f"{number} API processes beside the engine's, with {most} CPUs for all"
    if number >= most:
        advice = f"fewer than {most}, so that the engine's process has a CPU of its own"
        yield Finding(topic="network", level="warning", text=text, advice=advice)
    else:
        yield Finding(topic="network", text=text)


def _network(asked: Asked) -> Iterator[Finding]:
    settings = asked.settings
    yield from _api_processes(asked)
    for field in ("port", "metrics_port"):
        if (port := getattr(settings, field)) is None:
            continue
        try:
            bind(settings, port, field=field).close()
        except NovaInferError as error:
            flag = f"--{field.replace('_', '-')}"
            advice = f"choose another with {flag}, or stop what listens there (ss -ltnp names it)"
            yield Finding(topic="network", level="failure", text=error.message, advice=advice)
        else:
            yield Finding(topic="network", text=f"{field} {port} of {settings.host} can be had")
    if settings.keys_file is not None:
        try:
            num_keys = len(KeyStore.at(settings.keys_file).read())
            yield Finding(topic="files", text=f"{settings.keys_file} has {num_keys} keys")
        except NovaInferError as error:
            advice = "mend it, or have `novainfer keys` write one"
            yield Finding(topic="files", level="failure", text=error.message, advice=advice)
    elif settings.host not in ("127.0.0.1", "localhost", "::1") and not settings.api_keys:
        advice = "give it an --api-key or a --keys-file, or keep it behind something that asks for one"
        text = f"{settings.host} is open to the network, and no key is asked for"
        yield Finding(topic="network", level="warning", text=text, advice=advice)
    if SOMAXCONN.is_file() and (most := int(SOMAXCONN.read_text())) < settings.backlog:
        advice = f"sysctl net.core.somaxconn={settings.backlog}: bursts of connections are refused beyond it"
        text = f"the kernel lets {most} connections wait, and --backlog asks for {settings.backlog}"
        yield Finding(topic="network", level="warning", text=text, advice=advice)
    if settings.ssl_certfile is not None and settings.ssl_keyfile is not None:
        yield from _certificate(settings.ssl_certfile, settings.ssl_keyfile)


def _certificate(certfile: Path, keyfile: Path) -> Iterator[Finding]:
    try:
        check_certificate(certfile, keyfile)
    except NovaInferError as error:
        advice = "give the certificate with its chain, and the key that belongs to it, both in PEM"
        yield Finding(topic="tls", level="failure", text=error.message, advice=advice)
        return
    ends = ssl.cert_time_to_seconds(ssl._ssl._test_decode_cert(str(certfile))["notAfter"])  # type: ignore[attr-defined]
    days = (ends - time.time()) / 86400
    text = f"{certfile} holds for {days:.0f} days"
    if days < CERTIFICATE_WARNING_DAYS:
        advice = "renew it, and send the server SIGHUP: new connections get the new one"
        yield Finding(topic="tls", level="warning" if days > 0 else "failure", text=text, advice=advice)
    else:
        yield Finding(topic="tls", text=text)


def _node(asked: Asked) -> Iterator[Finding]:
    found = machine.node()
    yield Finding(topic="node", text=found or "none; only clients in JavaScript need it")


CHECKS: dict[str, Check] = {
    "program": _program,
    "cpu": _cpu,
    "threads": _threads,
    "compiler": _compiler,
    "torch": _torch,
    "memory": _memory,
    "kernels": _kernels,
    "files": _files,
    "network": _network,
    "node": _node,
}


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):.0f} MiB"
