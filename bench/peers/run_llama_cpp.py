"""llama.cpp's server as a system under test: `python -m … MODEL.gguf OPTIONS`, asked over HTTP/1.1 on the loopback.

Best settings on a CPU: a slot for each request, one KV cache for all of them, a thread for each core. Its streamed
answers are read by a thread each; what that costs is its client's, and too little to show beside a step.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from .child import Memory, Timeline, resident, serve

READY_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 1200.0


class LlamaServer:
    """One server, in a process of its own; `options["program"]` is where llama-server lies."""

    name = "llama.cpp"

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._port = _free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the server)
        threads = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
        command = [options["program"], "--model", model, "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--parallel", str(options["max_num_seqs"]), "--ctx-size", str(options["max_num_tokens"])]
        command += ["--kv-unified", "--threads", threads, "--threads-batch", threads, "--no-webui"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.version: str = self._get("/props").get("build_info", "unknown")
        self.facts = {"slots": options["max_num_seqs"], "ctx_size": options["max_num_tokens"], "threads": int(threads)}

    def _wait_until_ready(self) -> None:
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < READY_TIMEOUT_S:
            if self._process.poll() is not None:
                self._log.seek(0)
                words = self._log.read().decode("utf-8", "replace").strip().splitlines()
                raise RuntimeError(f"llama-server ended with {self._process.returncode}: {' / '.join(words[-3:])}")
            try:
                if self._get("/health").get("status") == "ok":
                    return
            except (OSError, ValueError):
                pass
            time.sleep(0.05)
        raise RuntimeError(f"llama-server was not ready within {READY_TIMEOUT_S:.0f} s")

    def _get(self, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request("GET", path)
            found: dict[str, Any] = json.loads(connection.getresponse().read())
            return found
        finally:
            connection.close()

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Timeline]:
        """All at once, greedy, EOS ignored."""
        return self.answer_mixed(prompts, [max_tokens] * len(prompts), [0.0] * len(prompts))

    def answer_mixed(self, prompts: list[list[int]], lengths: list[int], arrivals_s: list[float]) -> list[Timeline]:
        """Each request when its time has come."""
        lines = [Timeline(num_prompt_tokens=len(prompt)) for prompt in prompts]
        began_s = time.perf_counter()
        threads = [
            threading.Thread(target=self._one, args=(*row, began_s))
            for row in zip(lines, prompts, lengths, arrivals_s, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for line in lines:
            if line.error is not None:
                raise RuntimeError(line.error)
        return lines

    def _one(self, line: Timeline, prompt: list[int], length: int, arrival_s: float, began_s: float) -> None:
        body = {"prompt": prompt, "n_predict": length, "temperature": 0.0, "ignore_eos": True, "stream": True}
        time.sleep(max(0.0, arrival_s - (time.perf_counter() - began_s)))
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_TIMEOUT_S)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {answer.read(300)!r}")
            for text in answer:
                if text.startswith(b"data: "):
                    event = json.loads(text[6:])
                    count = len(event.get("tokens", ()))
                    if event.get("stop"):  # it knows of tokens whose half characters were held back
                        count = event["tokens_predicted"] - line.num_output_tokens
                    if count > 0:
                        line.times_s.append(time.perf_counter() - began_s - arrival_s)
                        line.counts.append(count)
            if line.num_output_tokens != length:
                raise RuntimeError(f"{line.num_output_tokens} tokens came of {length}")
        except Exception as error:
            line.error = f"llama-server: {error}"
        finally:
            connection.close()

    def memory(self) -> Memory:
        """Of the server."""
        return resident(self._process.pid)

    def cpu_s(self) -> float:
        """Of the server, where /proc tells it."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system time

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
        self._log.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    """The server ends with this process's last task."""
    made: list[LlamaServer] = []

    def make() -> LlamaServer:
        made.append(LlamaServer(sys.argv[1], json.loads(sys.argv[2])))
        return made[0]

    try:
        serve(make, import_s=0.0)
    finally:
        for server in made:
            server.close()


if __name__ == "__main__":
    main()
