"""A certificate that is renewed: new connections get it, those that are open go on, and a bad file changes nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
from pathlib import Path

import httpx
import pytest

from novainfer.server.http.tls import write_self_signed
from novainfer.server.serve import Server, _stop_on_signals
from tests.server.conftest import Serve, eventually
from tests.server.fakes import FakeEngine
from tests.server.test_chat import events
from tests.server.test_endings import BODY


async def presented(server: Server) -> bytes:
    """The certificate that a new connection gets."""
    insecure = ssl.create_default_context()
    insecure.check_hostname, insecure.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=insecure)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return found


def der(certfile: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certfile.read_text())


@pytest.mark.parametrize("http2", [True, False])
async def test_new_connections_get_the_new_certificate_and_streams_go_on(
    serve: Serve, tmp_path: Path, http2: bool
) -> None:
    engine = FakeEngine(is_paced=True)
    certfile, keyfile = write_self_signed(tmp_path, "127.0.0.1")
    server = await serve(engine, ssl_certfile=certfile, ssl_keyfile=keyfile)
    old = der(certfile)
    assert await presented(server) == old
    trusting = ssl.create_default_context(cafile=str(certfile))
    async with httpx.AsyncClient(base_url=server.url, http2=http2, verify=trusting) as client:
        answer = asyncio.create_task(client.post("/v1/chat/completions", content=BODY))
        await engine.wait_until(lambda: engine.active)
        engine.release(1)
        write_self_signed(tmp_path, "127.0.0.1")
        server.reload_certificate()
        assert await presented(server) == der(certfile) != old
        engine.release(10)
        assert events((await answer).text)[-1] == "[DONE]"
        assert (await client.get("/health")).status_code == 200  # on the connection that was there before
    async with httpx.AsyncClient(
        base_url=server.url, http2=http2, verify=ssl.create_default_context(cafile=str(certfile))
    ) as client:
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("damage", ["cert", "key", "other key", "no key", "empty"])
async def test_what_cannot_be_used_is_told_and_changes_nothing(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    certfile, keyfile = write_self_signed(tmp_path, "127.0.0.1")
    server = await serve(FakeEngine(), ssl_certfile=certfile, ssl_keyfile=keyfile)
    old = der(certfile)
    (tmp_path / "other").mkdir()
    other_cert, other_key = write_self_signed(tmp_path / "other", "127.0.0.1")
    match damage:
        case "cert":
            certfile.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
        case "key":
            keyfile.write_text("no key at all")
        case "other key":  # half-written: one of the two is new
            certfile.write_bytes(other_cert.read_bytes())
        case "no key":
            keyfile.unlink()
        case "empty":
            certfile.write_text("")
            keyfile.write_bytes(other_key.read_bytes())
    server.reload_certificate()
    (record,) = [record for record in caplog.records if record.name == "novainfer.server"]
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith(f"ssl_certfile {certfile} cannot be used: ")
    assert record.getMessage().endswith("connections get the certificate that was read before")
    assert "novainfer-" not in record.getMessage()  # the copies are no business of anybody's
    assert await presented(server) == old
    certfile.write_bytes(other_cert.read_bytes())
    keyfile.write_bytes(other_key.read_bytes())
    server.reload_certificate()
    assert await presented(server) == der(other_cert)


async def test_sighup_reads_the_certificate_again(serve: Serve, tmp_path: Path) -> None:
    certfile, keyfile = write_self_signed(tmp_path, "127.0.0.1")
    server = await serve(FakeEngine(), ssl_certfile=certfile, ssl_keyfile=keyfile)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    loop = asyncio.get_running_loop()
    try:
        _stop_on_signals(server)
        write_self_signed(tmp_path, "127.0.0.1")
        os.kill(os.getpid(), signal.SIGHUP)
        wanted = der(certfile)
        async with asyncio.timeout(10):
            while await presented(server) != wanted:  # noqa: ASYNC110 - it connects anew each time
                await asyncio.sleep(0)
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


async def test_a_file_of_keys_and_a_certificate_are_both_read_again(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "novainfer.server")
    certfile, keyfile = write_self_signed(tmp_path, "127.0.0.1")
    (tmp_path / "keys.yaml").write_text("keys: []\n")
    files = {"ssl_certfile": certfile, "ssl_keyfile": keyfile, "keys_file": tmp_path / "keys.yaml"}
    server = await serve(FakeEngine(), **files)
    write_self_signed(tmp_path, "127.0.0.1")
    server.reload()
    assert await presented(server) == der(certfile)
    await eventually(lambda: "keys.yaml was read again" in caplog.text)


async def test_without_a_certificate_there_is_nothing_to_read(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "novainfer.server")
    server = await serve(FakeEngine())
    server.reload_certificate()
    await eventually(lambda: "no certificate to be read again" in caplog.text)
