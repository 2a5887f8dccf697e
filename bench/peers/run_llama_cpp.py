"""llama.cpp's server as a system under test: `python -m … MODEL.gguf OPTIONS`, asked over HTTP/1.1 on the loopback.

Its streamed answers are read by a thread each; what that costs is its client's, and too little to show beside a step.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from typing import Any

from .child import Memory, Timeline, serve, tree_memory
from .launch import Server, tree_cpu_s

READY_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 1200.0


class LlamaServer:
    """One server, in a process of its own; `command` starts it."""

    name = "llama.cpp"

    def __init__(self, command: list[str]) -> None:
        self._server = Server(command)
        try:
            self._server.wait_until_ready(READY_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        self.version: str = self._get("/props").get("build_info", "unknown")
        self.facts = {"flags": command[3:]}

    def _get(self, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=10)
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
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=ANSWER_TIMEOUT_S)
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
        return tree_memory(self._server.pid)

    def cpu_s(self) -> float:
        """Of the server, where /proc tells it."""
        return tree_cpu_s(self._server.pid)

    def close(self) -> None:
        """End the server."""
        self._server.close()


def main() -> None:
    """The server ends with this process's last task."""
    made: list[LlamaServer] = []

    def make() -> LlamaServer:
        made.append(LlamaServer(json.loads(sys.argv[2])["server"]))
        return made[0]

    try:
        serve(make, import_s=0.0)
    finally:
        for server in made:
            server.close()


if __name__ == "__main__":
    main()
