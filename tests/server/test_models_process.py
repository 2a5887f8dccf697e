"""Several models as users run them: a worker process each, one model that cannot be loaded, and a drain of all."""

import asyncio
import os
import re
import signal
import sys

import httpx
import psutil
import pytest

pytestmark = pytest.mark.slow  # it starts processes that load torch

TIMEOUT_S = 120.0
LONG = 600  # tokens
ADMIN = {"authorization": "Bearer admin-key"}


async def test_models_have_a_process_each_come_and_go_and_end_together(tmp_path):
    models = ("--model", "one=demo", "--model", f"broken={tmp_path}/none", "--model", "two=demo")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "novainfer.server", "--port", "0", "--shutdown-timeout", "100", "--admin-key"),
        *("admin-key", "--max-loaded-models", "2", *models),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "NOVAINFER_NATIVE": "0"},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            line = (await process.stdout.readline()).decode()
            found = re.search(r"serves 3 models at (http://127\.0\.0\.1:\d+) ", line)
            assert found is not None, line
            async with httpx.AsyncClient(base_url=found[1], timeout=TIMEOUT_S) as client:
                await _try(client, process)
            _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode == 0
    assert b"Traceback" not in err


async def _try(client: httpx.AsyncClient, process: asyncio.subprocess.Process) -> None:
    refused = await client.post("/v1/completions", json=_ask("broken"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
    assert refused.json()["error"]["message"].endswith("the log says why")
    told = await client.post("/v1/completions", json=_ask("broken"), headers=ADMIN)
    assert "none" in told.json()["error"]["message"]  # the folder's name
    texts = []
    for name in ("one", "two"):
        reply = await client.post("/v1/completions", json=_ask(name))
        assert (reply.status_code, reply.json()["model"]) == (200, name)
        texts.append(reply.json()["choices"][0]["text"])
    assert texts[0] == texts[1] != ""
    pids = {name: await _worker(client, name) for name in ("one", "two")}
    assert len(set(pids.values())) == 2
    states = {
        one["id"]: (one["state"], one.get("error"))
        for one in (await client.get("/readyz", headers=ADMIN)).json()["models"]
    }
    assert states["one"] == states["two"] == ("IDLE", None)
    assert states["broken"][0] in ("FAILED", "ABSENT")  # its pause is a second
    assert "none" in states["broken"][1]

    again = await client.post("/models/load", json={"model": "broken"}, headers=ADMIN)  # and there is no place for it
    assert (again.status_code, again.json()["error"]["code"]) == (503, "model_unavailable")
    assert {name: await _worker(client, name) for name in ("one", "two")} == pids

    await client.post("/models/unload", json={"model": "one"}, headers=ADMIN)
    while psutil.pid_exists(pids["one"]) and psutil.Process(pids["one"]).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert psutil.pid_exists(pids["two"])

    answers = []
    for name in ("one", "two"):
        answers.append(asyncio.create_task(client.post("/v1/completions", json=_ask(name, LONG))))
        while await _num_live(client) < len(answers):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    for answer in answers:
        assert (await answer).json()["usage"]["completion_tokens"] == LONG


def _ask(model: str, max_tokens: int = 8) -> dict[str, object]:
    body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    return {"model": model, **body}


async def _num_live(client: httpx.AsyncClient) -> int:
    return sum(one["num_live"] for one in (await client.get("/readyz", headers=ADMIN)).json()["models"])


async def _worker(client: httpx.AsyncClient, name: str) -> int:
    actors = (await client.get("/v1/actors", params={"model": name}, headers=ADMIN)).json()["data"]
    return next(actor["pid"] for actor in actors if actor["name"].startswith("worker"))
