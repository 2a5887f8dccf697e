"""What routers are told over ZeroMQ: vLLM's three frames, by a thread that no step waits for."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq

from novainfer import EngineConfig, InvalidParameter, KvEventsConfig
from novainfer.actors.device.process import ProcessLink
from novainfer.actors.routers import publisher as publishing
from novainfer.actors.routers.publisher import END_OF_REPLAY, KvEventPublisher
from novainfer.actors.routers.wire import batch
from novainfer.actors.runtime import Runtime
from novainfer.fsm.device.worker import RestartPolicy
from novainfer.fsm.kv.blocks import block_name, space_name
from novainfer.fsm.messages.events import IndexChanged, StoredBlock
from novainfer.fsm.messages.tenant import Tenant
from novainfer.models import Models
from tests.actors.devices import spec
from tests.actors.helpers import LIMITS, WAIT_S, eventually, params, read_all, running

ANYWHERE = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
SIZE = 4
ROUTED = msgspec.structs.replace(LIMITS, block_size=SIZE, tells_routers=True)


def config(**more: Any) -> KvEventsConfig:
    return KvEventsConfig(enable_kv_cache_events=True, **{**ANYWHERE, **more})


class Router:
    """One subscriber, and the mirror that it keeps: block hashes, with what they were told with."""

    def __init__(self, publisher: KvEventPublisher, *, topic: str = "", hwm: int = 0) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.set_hwm(hwm)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.replays = self._context.socket(zmq.DEALER)
        self.replays.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1e3))
        self.socket.connect(reachable(publisher.config.endpoint))
        if publisher.config.replay_endpoint is not None:
            self.replays.connect(reachable(publisher.config.replay_endpoint))
        self.mirror: dict[bytes, dict[str, Any]] = {}
        self.numbers: list[int] = []
        self.num_cleared = 0
        self._be_heard(publisher)

    def _be_heard(self, publisher: KvEventPublisher) -> None:
        """Wait until the publisher knows of this subscriber: from then on nothing is missed."""
        self.socket.setsockopt(zmq.RCVTIMEO, 20)
        number = -1
        publisher.put(NOTHING)
        while number != publisher._next - 1:
            try:
                number = self.next()[1]
                self.socket.setsockopt(zmq.RCVTIMEO, 200)
            except zmq.Again:  # it is not known yet, or the last one found the queue full
                publisher.put(NOTHING)
        self.socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1e3))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def next(self) -> tuple[bytes, int, Any]:
        """One message: its topic, its number and what it says."""
        topic, number, payload = self.socket.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    def replay(self, first: int) -> list[tuple[int, Any]]:
        """What is kept from a number on."""
        self.replays.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            nothing, _, number, payload = self.replays.recv_multipart()
            assert nothing == b""
            if number == END_OF_REPLAY:
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))

    def take(self, number: int, said: Any) -> None:
        """Keep the mirror as a router would."""
        at_s, events, rank = said
        assert rank == 0
        assert at_s > 1.7e9
        self.numbers.append(number)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.mirror.clear()
                self.num_cleared += 1
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    del self.mirror[name]
            else:
                self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        assert event["type"] == "BlockStored"
        assert (event["medium"], event["lora_id"], event["lora_name"], event["group_idx"]) == ("GPU", None, None, 0)
        parent, size = event["parent_block_hash"], event["block_size"]
        names, keys = event["block_hashes"], event.get("extra_keys") or [None] * len(event["block_hashes"])
        assert len(event["token_ids"]) == size * len(names) == size * len(keys)
        for at, (name, key) in enumerate(zip(names, keys, strict=True)):
            ids = event["token_ids"][at * size : (at + 1) * size]
            self.mirror[name] = {"parent": parent, "ids": ids, "key": key}
            parent = name

    async def take_until_last(self, publisher: KvEventPublisher) -> None:
        """All that was published so far."""
        while not self.numbers or self.numbers[-1] != publisher._next - 1:
            _, number, said = await asyncio.to_thread(self.next)
            self.take(number, said)


def reachable(endpoint: str) -> str:
    return endpoint.replace("*", "127.0.0.1")


def index_of(runtime: Runtime) -> set[bytes]:
    assert runtime._scheduler is not None
    return set(runtime._scheduler.planner.cache.pool._index)  # type: ignore[attr-defined]


@asynccontextmanager
async def routed(**more: Any) -> AsyncIterator[tuple[Runtime, KvEventPublisher, Router]]:
    """A system, and a router that has heard all of it."""
    publisher = KvEventPublisher(config())
    async with running(publisher=publisher, limits=ROUTED, **more) as runtime:
        router = Router(publisher)
        for number, said in router.replay(0):
            router.take(number, said)
        try:
            yield runtime, publisher, router
        finally:
            router.close()


@pytest.fixture
def publisher() -> Iterator[KvEventPublisher]:
    found = KvEventPublisher(config(topic="kv@pod@model"))
    found.start()
    yield found
    found.stop()


NOTHING = IndexChanged([], [])


def changed(*names: bytes) -> IndexChanged:
    return IndexChanged([], list(names))


# ---- the frames --------------------------------------------------------------------------------------------------


def test_blocks_that_follow_each_other_are_one_event() -> None:
    stored = [
        StoredBlock(b"a", b"", [1, 2], "salt"),
        StoredBlock(b"b", b"a", [3, 4]),
        StoredBlock(b"d", b"c", [7, 8]),
        StoredBlock(b"e", b"", [1, 2]),
    ]
    said = msgspec.msgpack.decode(batch(IndexChanged(stored, [b"x"], is_cleared=True), 5.0))
    nothing = {"lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0, "block_size": 2}
    assert said == [
        5.0,
        [
            {"type": "AllBlocksCleared"},
            {"type": "BlockRemoved", "block_hashes": [b"x"], "medium": "GPU", "group_idx": 0},
            {
                "type": "BlockStored",
                "block_hashes": [b"a", b"b"],
                "parent_block_hash": None,
                **nothing,
                "token_ids": [1, 2, 3, 4],
                "extra_keys": [["salt"], None],
            },
            {"type": "BlockStored", "block_hashes": [b"d"], "parent_block_hash": b"c", "token_ids": [7, 8], **nothing},
            {"type": "BlockStored", "block_hashes": [b"e"], "parent_block_hash": None, "token_ids": [1, 2], **nothing},
        ],
        0,
    ]
    assert stored[0].token_ids == [1, 2]


def test_topic_number_and_batch_are_three_frames(publisher: KvEventPublisher) -> None:
    router = Router(publisher, topic="kv@")
    first = publisher._next
    publisher.put(changed(b"a"))
    publisher.put(changed(b"b"))
    for number, name in enumerate([b"a", b"b"], first):
        topic, found, said = router.next()
        assert (topic, found, said[1][0]["block_hashes"]) == (b"kv@pod@model", number, [name])
    router.close()


def test_what_was_missed_can_be_had_again_from_a_number_on(publisher: KvEventPublisher) -> None:
    router = Router(publisher)
    first = publisher._next
    for name in (b"a", b"b", b"c"):
        publisher.put(changed(name))
        router.next()
    assert [number for number, _ in router.replay(first + 1)] == [first + 1, first + 2]
    assert [number for number, _ in router.replay(first + 3)] == []
    router.replays.send_multipart([b"no number"])
    router.replays.send_multipart([b"", b"short"])
    assert [said[1][0]["block_hashes"] for _, said in router.replay(first)] == [[b"a"], [b"b"], [b"c"]]
    router.close()


def test_only_the_last_batches_are_kept() -> None:
    publisher = KvEventPublisher(config(buffer_steps=2))
    publisher.start()
    router = Router(publisher)
    for name in (b"a", b"b", b"c"):
        publisher.put(changed(name))
        router.next()
    assert [number for number, _ in router.replay(0)] == [publisher._next - 2, publisher._next - 1]
    router.close()
    publisher.stop()


def test_what_finds_the_queue_full_is_a_gap_in_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    publisher = KvEventPublisher(config(max_queue_size=2))
    for name in (b"a", b"b", b"c", b"d"):  # nobody sends yet
        publisher.put(changed(name))
    assert publisher.num_dropped == 2
    assert len(caplog.records) == 1
    publisher.start()
    router = Router(publisher)
    found = [number for number, _ in router.replay(0)]
    assert found[:2] == [0, 1]
    assert found[2] > 3
    router.close()
    publisher.stop()


def test_a_subscriber_that_reads_nothing_holds_up_nobody() -> None:
    publisher = KvEventPublisher(config(hwm=4, buffer_steps=4))
    publisher.start()
    deaf = Router(publisher, hwm=4)
    router = Router(publisher)
    first = publisher._next
    names = [number.to_bytes(4, "big") * 5000 for number in range(2000)]  # 20 KB each: more than sockets hold
    for name in names:
        publisher.put(changed(name))
    while not router.replay(first + len(names) - 1):  # until all are sent, to whoever takes them
        pass
    heard = []
    while deaf.socket.poll(300):
        heard.append(deaf.next()[1])
    assert 0 < len(heard) < len(names)
    assert heard == sorted(heard)  # and what is missing is a gap in them
    for one in (deaf, router):
        one.close()
    publisher.stop()


def test_a_thread_that_fails_says_so_and_nothing_else_ends(
    publisher: KvEventPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.put(changed([object()]))  # type: ignore[arg-type]
    assert publisher._thread is not None
    publisher._thread.join(WAIT_S)
    assert "not published any more" in caplog.text
    publisher.put(changed(b"a"))
    assert not publisher._queue


# ---- an engine and its router ------------------------------------------------------------------------------------


async def test_a_routers_mirror_is_the_index() -> None:
    async with routed() as (runtime, publisher, router):
        assert (router.num_cleared, router.mirror) == (1, {})
        prompt = list(range(3, 14))
        token_ids = prompt + (await read_all(runtime.add("r", prompt, params(6), 0))).token_ids
        await router.take_until_last(publisher)
        assert set(router.mirror) == index_of(runtime)
        parent = b""
        for at in range(len(token_ids) // SIZE):
            ids = token_ids[at * SIZE : (at + 1) * SIZE]
            parent, before = block_name(parent, ids), parent or None
            assert router.mirror.pop(parent) == {"parent": before, "ids": ids, "key": None}
        assert not router.mirror


async def test_whose_blocks_they_are_is_told_with_the_first() -> None:
    async with routed() as (runtime, publisher, router):
        ids = list(range(3, 12))
        tenant = Tenant("a customer")
        for name, salt, whose in (("a", "pepper", None), ("b", None, tenant), ("c", "pepper", tenant)):
            more = {"tenant": whose} if whose is not None else {}
            await read_all(runtime.add(name, ids, params(1, cache_salt=salt), 0, **more))
        await router.take_until_last(publisher)
        keys = sorted(block["key"][0] for block in router.mirror.values() if block["parent"] is None)
        spaces = [space_name("a customer", salt).hex() for salt in ("", "pepper")]
        assert keys == sorted(["pepper", *spaces])
        assert len(router.mirror) == 2 * len(keys)
        assert all(block["key"] is None for block in router.mirror.values() if block["parent"] is not None)


async def test_a_lost_worker_has_no_block_any_more() -> None:
    async with routed(link=partial(ProcessLink, spec()), restarts=RestartPolicy(3, is_process=True)) as (
        runtime,
        publisher,
        router,
    ):
        await read_all(runtime.add("r", list(range(3, 14)), params(6), 0))
        await router.take_until_last(publisher)
        assert router.mirror
        assert runtime._link.pid is not None
        os.kill(runtime._link.pid, signal.SIGKILL)
        await eventually(lambda: not index_of(runtime))
        await router.take_until_last(publisher)
        assert (router.num_cleared, router.mirror) == (2, {})
        await read_all(runtime.add("again", list(range(3, 14)), params(6), 0))
        await router.take_until_last(publisher)
        assert set(router.mirror) == index_of(runtime) != set()


async def test_what_an_engine_held_is_gone_with_it() -> None:
    publisher = KvEventPublisher(config())
    async with running(publisher=publisher, limits=ROUTED) as runtime:
        router = Router(publisher)
        await read_all(runtime.add("r", list(range(3, 14)), params(6), 0))
    await router.take_until_last(publisher)
    assert (router.num_cleared, router.mirror) == (1, {})
    router.close()


async def test_nothing_is_told_where_nobody_asked() -> None:
    async with running() as runtime:
        await read_all(runtime.add("r", list(range(3, 40)), params(6), 0))
        assert index_of(runtime)
        assert "novainfer-kv-events" not in [thread.name for thread in threading.enumerate()]


# ---- the setting -------------------------------------------------------------------------------------------------


def test_the_setting_is_what_vllm_takes() -> None:
    text = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}'
    found = EngineConfig(kv_events_config=text).kv_events_config
    assert found == KvEventsConfig(enable_kv_cache_events=True, publisher="zmq", topic="kv")
    assert found.is_on
    for off in ({}, {"enable_kv_cache_events": False}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert not KvEventsConfig.of(off).is_on


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "it must be a JSON object"),
        ({"endpoints": "x"}, "endpoints"),
        ({"publisher": "kafka"}, "kafka"),
        ({"endpoint": "5557"}, "endpoint must be an address like 'tcp://*:5557'"),
        ({"endpoint": "tcp://*:5557x"}, "endpoint must be an address like 'tcp://*:5557'"),
        ({"replay_endpoint": "tcp://127.0.0.1:65536"}, "replay_endpoint must be an address like 'tcp://*:5557'"),
        ({"endpoint": "tcp://host"}, "endpoint must be an address like 'tcp://*:5557'"),
        ({"replay_endpoint": "tcp://*:5557"}, "two addresses"),
        ({"rank": -1}, "rank must be between 0 and 4095"),
        ({"hwm": 0}, "hwm must be between 1 and"),
        ({"buffer_steps": 1 << 40}, "buffer_steps must be between 1 and"),
    ],
)
def test_what_cannot_be_is_told_by_name(given: Any, said: str) -> None:
    with pytest.raises(InvalidParameter, match=r"^kv_events_config: ") as error:
        EngineConfig(kv_events_config=given)
    assert said in error.value.message
    assert error.value.param == "kv_events_config"


def test_several_models_have_a_rank_and_addresses_each() -> None:
    text = '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:5600", "topic": "kv@pod@{model}"}'
    configs = {name: EngineConfig(model="/m", kv_events_config=text) for name in ("a", "b", "c")}
    found = Models(configs, lambda config: pytest.fail("none is made")).kv_event_sources()
    assert [(rank, at.rank, at.endpoint, at.replay_endpoint, at.topic) for rank, at in found.items()] == [
        (0, 0, "tcp://*:5557", "tcp://*:5600", "kv@pod@a"),
        (1, 1, "tcp://*:5558", "tcp://*:5601", "kv@pod@b"),
        (2, 2, "tcp://*:5559", "tcp://*:5602", "kv@pod@c"),
    ]
    ipc = config(endpoint="ipc:///run/kv", replay_endpoint=None).for_engine(2)
    assert ipc.endpoint == "ipc:///run/kv.2"
    assert config(rank=4).for_engine(2) == config(rank=6), "ports that are chosen freely stay so"
    with pytest.raises(InvalidParameter, match="tcp://\\*:65535 leaves no port for the model in place 1"):
        config(endpoint="tcp://*:65535").for_engine(1)
    with pytest.raises(InvalidParameter, match="needs a port"):
        config(endpoint="tcp://*:*").for_engine(1)


def test_addresses_of_several_models_that_meet_are_told_before_one_of_them_is_loaded() -> None:
    """As docs/routers.md has them for one model: the second one's endpoint is where the first one is asked again."""
    text = '{"enable_kv_cache_events": true, "rank": 4, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
    configs = {name: EngineConfig(model="/m", kv_events_config=text) for name in ("a", "b")}
    said = r"kv_events_config: 'tcp://\*:5558' would be the endpoint of 'b' and the replay_endpoint of 'a'"
    with pytest.raises(InvalidParameter, match=said) as error:
        Models(configs, lambda config: pytest.fail("none is made"))
    assert error.value.param == "kv_events_config"
    off = {name: EngineConfig(kv_events_config=text.replace("true", "false")) for name in configs}
    for others in (off, {"a": configs["a"]}):
        Models(others, lambda config: pytest.fail("none is made"))


def test_a_batch_says_which_engine_it_is_of_and_its_topic_which_model() -> None:
    publisher = KvEventPublisher(config(topic="kv@{model}").for_engine(3).for_model("large"))
    publisher.start()
    router = Router(publisher, topic="kv@large")
    publisher.put(changed(b"a"))
    topic, _, (_, _, rank) = router.next()
    assert (topic, rank) == (b"kv@large", 3)
    router.close()
    publisher.stop()


def test_an_index_that_is_off_is_not_told_of() -> None:
    with pytest.raises(InvalidParameter, match="enable_prefix_caching is off"):
        EngineConfig(kv_events_config=config(), enable_prefix_caching=False)


def test_an_address_that_is_taken_is_told(publisher: KvEventPublisher) -> None:
    with pytest.raises(InvalidParameter, match="cannot be used: Address already in use"):
        KvEventPublisher(config(endpoint=publisher.config.endpoint)).start()


def test_a_publisher_can_connect_to_who_listens() -> None:
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1e3))
    sub.setsockopt_string(zmq.SUBSCRIBE, "")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    publisher = KvEventPublisher(config(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None))
    publisher.start()
    reached = False
    sub.setsockopt(zmq.RCVTIMEO, 50)
    while not reached:
        publisher.put(changed(b"a"))
        try:
            reached = len(sub.recv_multipart()) == 3
        except zmq.Again:
            continue
    publisher.stop()
    context.destroy(linger=0)


def test_it_listens_on_the_loopback_only_where_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    loopback = "tcp://127.0.0.1:0"
    publisher = KvEventPublisher(config(endpoint=loopback, bind=True, replay_endpoint=loopback))
    publisher.start()
    assert publisher.config.endpoint.startswith("tcp://127.0.0.1:")
    assert "listens at tcp://127.0.0.1:" in caplog.text
    router = Router(publisher)
    publisher.put(changed(b"a"))
    assert router.next()[1] == publisher._next - 1
    assert router.replay(publisher._next - 1)
    router.close()
    publisher.stop()


def test_that_it_connects_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    publisher = KvEventPublisher(config(endpoint="tcp://127.0.0.1:5557", replay_endpoint=None))
    publisher.start()
    publisher.stop()
    assert 'connects to (with "bind": true it would listen there) tcp://127.0.0.1:5557' in caplog.text


def test_what_waits_and_what_is_kept_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "QUEUE_BYTES_MAX", 25_000)
    monkeypatch.setattr(publishing, "KEPT_BYTES_MAX", 30_000)
    publisher = KvEventPublisher(config())
    for number in range(5):  # nobody sends yet
        publisher.put(changed(bytes([number]) * 10_000))
    assert (len(publisher._queue), publisher.num_dropped) == (2, 3)
    publisher.start()
    router = Router(publisher)
    for number in range(5):
        publisher.put(changed(bytes([number]) * 10_000))
        router.next()  # it is sent, so the queue has room again
    assert publisher.num_dropped == 3
    assert publisher._put_bytes == publisher._taken_bytes
    kept = [number for number, _ in router.replay(0)]
    assert kept == list(range(publisher._next - len(kept), publisher._next))
    assert 2 <= len(kept) < 5
    router.close()
    publisher.stop()


def test_messages_for_a_subscriber_are_fewer_where_steps_are_large() -> None:
    assert KvEventPublisher(config()).hwm < KvEventPublisher(config(), 64).hwm <= config().hwm
    assert KvEventPublisher(config(hwm=5)).hwm == 5


def test_without_pyzmq_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(InvalidParameter, match=r"pip install 'novainfer\[events\]'"):
        KvEventPublisher(config()).start()
    assert publishing.NO_ZMQ.startswith("kv_events_config needs")
