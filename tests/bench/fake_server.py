"""A server of completions without a model: `fake_server.py PORT [fail | broken | dies=N | worker]`.

With `fail` it does not start; with `broken` its answers end without their last event; with `dies=N` it ends at the Nth
one; with `worker` it starts a process that would outlive it, and names it to those who ask for its health.
"""

import itertools
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

POSTS = itertools.count(1)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        told = {"/health": WORKER, "/v1/models": {"data": [{"id": "fake"}]}}[self.path]
        self.send_response(200)
        body = json.dumps(told).encode()
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        if f"dies={next(POSTS)}" in sys.argv:
            os._exit(1)
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        events = [{"choices": [{"text": "x", "token_ids": [7]}]}] * asked["max_tokens"]
        lines = [json.dumps(event) for event in events] + ([] if "broken" in sys.argv else ["[DONE]"])
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for line in lines:
            piece = f"data: {line}\n\n".encode()
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    if "fail" in sys.argv:
        sys.exit("this server has no model")
    WORKER = subprocess.Popen(["sleep", "60"]).pid if "worker" in sys.argv else None
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
