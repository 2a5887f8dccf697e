"""One run over everything that needs a GPU: what is right, then how fast it is, into one JSON file.

Each section is written as soon as it is done, so a run that is cut off leaves what it had. A rehearsal goes the same
way on a machine without a GPU, with tiny sizes and in Triton's interpreter: its numbers mean nothing, and it says so.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from novainfer.bench.gpu import attention as attention_bench
from novainfer.bench.gpu.clock import Clock
from novainfer.bench.gpu.correctness import CASES, compare_answers, run_tests
from novainfer.bench.gpu.products import PRODUCTS, measure_product
from novainfer.bench.gpu.roof import GpuRoof, measure_roof
from novainfer.bench.gpu.serving import measure_serving
from novainfer.bench.gpu.steps import STEPS, Steps, measure_steps, other_kernels
from novainfer.bench.machine import describe, make_checkpoint
from novainfer.bench.report import Target, table, targets_json, targets_table
from novainfer.kernels.ops.selection import build_registry

__all__ = ["SECTIONS", "GpuCheck"]

SERVED_LIKE = "qwen2.5-0.5b"
VARIED_LIKE, VARIED_BATCHES = "qwen2.5-1.5b", (1, 256)
# What is published of others, on the cards named: printed under what was measured on this one.
ANCHORS = {
    "attention": (
        "decode, FlashAttention-3 over pages, H100: 1.85 of 3.35 TB/s (flash-attention #1572)",
        "decode, one sequence of 1k, B200: 4.9 to 12 us a layer (FlashInfer's own table)",
        "causal prefill, d = 128, 4k, H100: FlashAttention-3 579, Triton 353 TFLOP/s (the FA3 paper's figures)",
    ),
    "steps": (
        "one request, a model of 1B, H100: vLLM and SGLang 50 %, one kernel for the whole model 78 % of the bandwidth "
        "(Hazy Research)",
    ),
    "serving": ("A800, 0.5B: nano-vllm with Triton 24,121 tokens/s, vLLM 0.10.2 17,711 (nano-vllm-triton #1)",),
}
READY_S_MAX = 15.0
VOCAB_SIZE = 151_936  # Qwen2.5's
TESTS = ("tests/kernels/cuda",)
TESTS_TIMEOUT_S = 420.0
SECTION_TIMEOUT_S = 1800.0  # a kernel that never ends is ended


class GpuCheck:
    """The sections, and what they found so far."""

    def __init__(
        self, folder: Path, *, checkout: Path, rehearse: bool = False, say: Callable[[str], None] = print
    ) -> None:
        """`folder` takes the JSON file; `checkout` holds the tests."""
        if not (rehearse or torch.cuda.is_available()):
            raise RuntimeError(
                f"there is no GPU here that this torch ({torch.__version__}) can use; --rehearse goes through all of "
                "this on the CPU with tiny sizes"
            )
        self.rehearse = rehearse
        self._device = torch.device("cpu" if rehearse else "cuda")
        self._checkout = checkout
        self._say = say
        self._models = Path()  # of random checkpoints; of one run
        self._clock = Clock(self._device, num_replays=1 if rehearse else 30)
        self._roof: GpuRoof | None = None
        self.report: dict[str, Any] = {
            "benchmark": "gpu-check",
            "rehearsal": rehearse,
            "machine": describe(),
            "gpu": _gpu(self._device),
            "sections": {},
        }
        name = re.sub(r"[^a-z0-9]+", "-", self.report["gpu"]["name"].lower()).strip("-")
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        self.file = folder / f"gpu-{name}-{date}.json"
        if self.file.exists():  # sections that were done before, today and on this card, stay beside those done now
            before = json.loads(self.file.read_text())
            self.report["sections"] = before["sections"]
            if "roof" in before:
                self.report["roof"] = before["roof"]
                self._roof = GpuRoof(**before["roof"])

    def run_apart(self, sections: Sequence[str]) -> bool:
        """As `run`, each section in a process of its own: a GPU that one of them has upset is well in the next one."""
        command = [sys.executable, "-m", "novainfer.server.cli.main", "bench", "gpu-check"]
        command += ["--out", str(self.file.parent), *(["--rehearse"] if self.rehearse else [])]
        for name in sections:
            self.report["sections"].pop(name, None)
            self._write()
            why = f"its process took longer than {SECTION_TIMEOUT_S:.0f} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(
                    [*command, "--only", name], cwd=self._checkout, timeout=SECTION_TIMEOUT_S, check=False
                )
                why = f"its process ended with exit code {done.returncode}"
            self.report = json.loads(self.file.read_text())
            if name not in self.report["sections"]:
                self.report["sections"][name] = {"ok": False, "error": why}
                self._say(f"== {name}: WRONG\n{why}")
                self._write()
        return self._is_well(sections)

    def run(self, sections: Sequence[str]) -> bool:
        """Do the sections; False where something is wrong. A section that fails does not stop the others."""
        with tempfile.TemporaryDirectory(prefix="novainfer-gpu-") as models:
            self._models = Path(models)
            for name in sections:
                self._run(name)
        self._say(targets_table(self.targets()))
        return self._is_well(sections)

    def _is_well(self, sections: Sequence[str]) -> bool:
        return all(self.report["sections"][name].get("ok", True) for name in sections)

    def _write(self) -> None:
        self.report["targets"] = targets_json(self.targets())
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.report, indent=1) + "\n")

    def _run(self, name: str) -> None:
        began_s = time.monotonic()
        try:
            found = SECTIONS[name](self)
        except Exception as error:
            found = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        found["took_s"] = round(time.monotonic() - began_s, 1)
        self.report["sections"][name] = found
        self._say(f"== {name} ({found['took_s']} s): {'ok' if found.get('ok', True) else 'WRONG'}")
        self._say(found.pop("text", "") or found.get("error", ""))
        found["anchors"] = list(ANCHORS.get(name, ()))
        for anchor in found["anchors"]:
            self._say(f"  published: {anchor}")
        self._write()

    @property
    def _sets(self) -> dict[str, int]:
        return {"sets_max": 1} if self.rehearse else {}

    @property
    def roof(self) -> GpuRoof:
        """Measured when it is first asked for; not again on this card and day."""
        if self._roof is None:
            self._roof = measure_roof(self._clock, scale=64 if self.rehearse else 1)
            self.report["roof"] = asdict(self._roof)
        return self._roof

    def model(self, like: str) -> Path:
        """A random checkpoint of this shape; a tiny one in a rehearsal."""
        like = "tiny" if self.rehearse else like
        folder = self._models / like
        if not folder.exists():
            make_checkpoint(like, folder, 0)
        return folder

    # ---- sections ------------------------------------------------------------------------------------------------

    def _tests(self) -> dict[str, Any]:
        if self.rehearse:
            return {"ok": True, "text": "the tests of the kernels run by themselves here"}
        return run_tests(self._checkout, TESTS, timeout_s=TESTS_TIMEOUT_S)

    def _answers(self) -> dict[str, Any]:
        cases = {"as it is served": CASES["as it is served"]} if self.rehearse else CASES
        found = compare_answers("demo", self._device.type, cases)
        rows = [(name, case.get("different", "-"), case.get("error", "")[:80]) for name, case in found.items()]
        text = table("Answers of the demo model in fp32 that are not the CPU's", ("", "different", ""), rows)
        return {"ok": all(case["ok"] for case in found.values()), "cases": found, "text": text}

    def _roofs(self) -> dict[str, Any]:
        self._roof = None  # anew, where it is asked for by its name
        roof = self.roof
        rows = [
            ("read, GB/s", roof.read_bytes_per_s / 1e9),
            ("copy, GB/s", roof.copy_bytes_per_s / 1e9),
            ("bf16 products, TFLOP/s", roof.bfloat16_flop_per_s / 1e12),
        ]
        return {"text": table("Roof", ("", "measured"), rows)}

    def _attention(self) -> dict[str, Any]:
        found: dict[str, list[dict[str, Any]]] = {}
        with torch.inference_mode():
            for kind, cases in (("decode", attention_bench.DECODES), ("prefill", attention_bench.PREFILLS)):
                for case in cases[:1] if self.rehearse else cases:
                    if self.rehearse:
                        case = replace(case, num_heads=4, num_kv_heads=2, context=32, query=min(case.query, 8))
                    for backend in self._backends(case):
                        record = attention_bench.measure_attention(backend, case, self._clock, **self._sets)
                        record["backend"] = backend.name
                        record["share_of_read"] = record["gb_per_s"] * 1e9 / self.roof.read_bytes_per_s
                        record["share_of_products"] = record["tflop_per_s"] * 1e12 / self.roof.bfloat16_flop_per_s
                        found.setdefault(kind, []).append(record)
        header = ("heads of, backend", "batch", "context", "rows", "kv", "us", "GB/s", "of read", "TFLOP/s")
        rows = [
            (
                f"{r['model']}, {r['backend']}",
                r["batch"],
                r["context"],
                r["query"],
                r["kv_dtype"],
                r["us"],
                r["gb_per_s"],
                r["share_of_read"],
                r["tflop_per_s"],
            )
            for records in found.values()
            for r in records
        ]
        return {"found": found, "text": table("Attention, one layer, bf16", header, rows)}

    def _backends(self, case: attention_bench.Case) -> Iterator[Any]:
        """Those that can compute it, ours first; the reference is not for speed."""
        registry = build_registry(torch.device("cuda"))
        for backend in registry.implementations("attention"):
            if backend.name == "reference":
                continue
            if backend.refuses(case.shape, torch.bfloat16, self._device) is None:
                yield backend

    def _products(self) -> dict[str, Any]:
        registry = build_registry(torch.device("cuda"))
        found: list[dict[str, Any]] = []
        with torch.inference_mode():
            for product in PRODUCTS:
                if self.rehearse:
                    product = replace(product, out_features=64, in_features=128, rows=min(product.rows, 3))
                for linear in registry.implementations("linear"):
                    if linear.name.startswith("reference"):
                        continue
                    if linear.refuses(product.out_features, product.in_features, torch.bfloat16, self._device) is None:
                        found.append(measure_product(linear, product, self._clock, **self._sets))
                if self.rehearse:
                    break
        torchs = {(r["product"], r["rows"]): r["us"] for r in found if r["linear"] == "torch"}
        for record in found:
            record["times_torch"] = torchs[record["product"], record["rows"]] / record["us"]
        header = ("product, linear", "rows", "us", "GB/s", "TFLOP/s", "times torch's speed")
        rows = [
            (f"{r['product']}, {r['linear']}", r["rows"], r["us"], r["gb_per_s"], r["tflop_per_s"], r["times_torch"])
            for r in found
        ]
        return {"found": found, "text": table("Matrix products, activations in bf16", header, rows)}

    def _sampling(self) -> dict[str, Any]:
        # Here and not at the top: it imports Triton, and interpreted or not it computes here, or says why not.
        from novainfer.bench.gpu.sampling import BATCHES, WAYS, measure_sampling, refuses

        if self.rehearse and (reason := refuses(self._device)) is not None:
            return {"found": [], "text": reason}
        batches, vocab_size = ((2,), 640) if self.rehearse else (BATCHES, VOCAB_SIZE)
        found = []
        with torch.inference_mode():
            for way in WAYS:
                for batch in batches:
                    record = measure_sampling(way, batch, vocab_size, self._clock)
                    record["share_of_read"] = record["gb_per_s"] * 1e9 / self.roof.read_bytes_per_s
                    found.append(record)
        header = ("way", "batch", "us", "GB/s of logits", "of read", "host us")
        rows = [(r["way"], r["batch"], r["us"], r["gb_per_s"], r["share_of_read"], r["host_us"]) for r in found]
        return {"found": found, "text": table(f"Drawing from {vocab_size} bf16 logits a row", header, rows)}

    def _steps(self) -> dict[str, Any]:
        wanted = [Steps("tiny", 2, 16, 1.0)] if self.rehearse else STEPS
        num_steps = 4 if self.rehearse else 100
        found: list[dict[str, Any]] = []
        wrong: list[str] = []  # what was computed by other kernels than those that the figures are to be of
        for steps in wanted:
            for name, options in self._variants_of_steps(steps).items():
                record = measure_steps(
                    self.model(steps.like), steps, self.roof, self._device, num_steps=num_steps, **options
                )
                found.append(record | {"variant": name})
                if not self.rehearse:
                    others = other_kernels(record["kernels"], graphs=not options.get("enforce_eager"))
                    others += [
                        f"{kernel} failed its self-test: {why}" for kernel, why in record["failed_kernels"].items()
                    ]
                    wrong += [f"{steps.like}, batch {steps.batch}, {name}: {kernel}" for kernel in others]
        header = ("model, variant", "batch", "context", "ms", "roof ms", "of roof", "idle", "tokens/s")
        rows = [
            (
                f"{r['like']}, {r['variant']}",
                r["batch"],
                r["context"],
                r["ms"],
                r["roof_ms"],
                r["share_of_roof"],
                r["idle_share"],
                r["tokens_per_s"],
            )
            for r in found
        ]
        text = "\n".join([table("Decode steps, bf16, two in flight", header, rows), *(f"WRONG: {at}" for at in wrong)])
        return {"ok": not wrong, "found": found, "other_kernels": wrong, "text": text}

    def _variants_of_steps(self, steps: Steps) -> dict[str, dict[str, Any]]:
        """Options of the load by what they are called: all of them for one model, where they cost or bring most."""
        found: dict[str, dict[str, Any]] = {"as served": {}}
        if not self.rehearse:
            found["no graphs"] = {"enforce_eager": True}
            if steps.like == VARIED_LIKE and steps.batch in VARIED_BATCHES:
                found["batch-invariant"] = {"batch_invariant": True}
                found |= {f"weights in {kind}": {"quantization": kind} for kind in ("int8", "fp8")}
                found["KV cache in int8"] = {"kv_cache_dtype": "int8"}
        return found

    def _serving(self) -> dict[str, Any]:
        small: dict[str, Any] = {}
        if self.rehearse:
            small = {"num_requests": 4, "tokens_max": 8, "repeat": 1, "peers": ()}
        found = measure_serving(self.model(SERVED_LIKE), self.roof, device=self._device.type, **small)
        rows = [*found["tokens_per_s"].items(), ("roof", found["roof_tokens_per_s"])]
        text = table("nano-vllm's workload, 0.5B shape, output tokens/s", ("", "tokens/s"), rows)
        return found | {"text": "\n".join([text, *(f"{name}: {why}" for name, why in found["skipped"].items())])}

    # ---- aims ----------------------------------------------------------------------------------------------------

    def targets(self) -> list[Target]:
        """What was aimed at beside what was measured; what was not measured says so."""
        sections = self.report["sections"]
        decodes = self._ours("decode")
        prefills = self._ours("prefill")
        full = [r["share_of_read"] for r in decodes if r["batch"] >= 64 and r["context"] >= 1024]
        alone = [r["us"] for r in decodes if r["batch"] == 1 and r["context"] == 1024]
        long = [r["tflop_per_s"] for r in prefills if r["query"] == r["context"] >= 4096]
        steps = [r for r in sections.get("steps", {}).get("found", []) if r["variant"] == "as served"]
        idle = [r["idle_share"] for r in steps if r["idle_share"] is not None]
        serving = sections.get("serving", {})
        rates = serving.get("tokens_per_s", {})
        others = [rate for name, rate in rates.items() if name != "novainfer"]
        ready = [facts.get("load_s") for name, facts in serving.get("facts", {}).items() if name == "novainfer"]
        return [
            Target(name="decode attention, batch >= 64: share of read bandwidth", wanted=0.85, measured=_worst(full)),
            Target(name="decode attention, batch 1, 1k: us a layer", wanted=8.0, measured=_most(alone), at_most=True),
            Target(name="causal prefill, 4k and more, d = 128: TFLOP/s", wanted=450.0, measured=_worst(long)),
            *(
                Target(
                    name=f"{r['like']}, batch {r['batch']}: ms a step",
                    wanted=r["wanted_ms"],
                    measured=r["ms"],
                    at_most=True,
                )
                for r in steps
                if r["wanted_ms"] is not None
            ),
            Target(name="GPU idle between decode steps", wanted=0.02, measured=_most(idle), at_most=True),
            Target(
                name="nano-vllm's workload: ratio to the best peer",
                wanted=1.0,
                measured=rates["novainfer"] / max(others) if others and "novainfer" in rates else None,
            ),
            Target(
                name="process start to ready after imports, s", wanted=READY_S_MAX, measured=_most(ready), at_most=True
            ),
        ]

    def _ours(self, kind: str) -> list[dict[str, Any]]:
        records = self.report["sections"].get("attention", {}).get("found", {}).get(kind, [])
        return [r for r in records if r["backend"].startswith("triton") and r["kv_dtype"] == "auto"]


def _worst(values: Sequence[float]) -> float | None:
    return min(values, default=None)


def _most(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def _gpu(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    with contextlib.suppress(ImportError):
        import triton

        versions["triton"] = triton.__version__
    if device.type != "cuda":
        return {"name": "rehearsal", "versions": versions}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "versions": versions,
    }


SECTIONS: dict[str, Callable[[GpuCheck], dict[str, Any]]] = {
    "tests": GpuCheck._tests,
    "answers": GpuCheck._answers,
    "roof": GpuCheck._roofs,
    "attention": GpuCheck._attention,
    "products": GpuCheck._products,
    "sampling": GpuCheck._sampling,
    "steps": GpuCheck._steps,
    "serving": GpuCheck._serving,
}
