"""The router's shell: engines of several models that come and go, and requests that need them."""

import asyncio
import threading

import pytest

from novainfer import EngineDraining, EngineOverloaded, ModelLoadError, ModelUnavailable, RequestTimeout
from novainfer.actors.router import ModelRouter
from novainfer.fsm.models.model import ModelState, Patience

SOON_S = 10.0


class Engine:
    """It comes up when `gate` is open, unless it `fails`."""

    def __init__(self, name: str, *, fails: bool) -> None:
        self.name = name
        self.fails = fails
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_ready = False
        self.is_closed = False
        self.drained_s: list[float] = []

    async def start(self) -> None:
        await self.gate.wait()
        if self.fails:
            raise ModelLoadError(f"{self.name}: config.json is missing")
        self.is_ready = True

    async def drain(self, timeout_s: float) -> None:
        self.drained_s.append(timeout_s)

    async def aclose(self) -> None:
        self.is_closed = True
        self.is_ready = False


class Shop:
    """Makes engines; `made` are all that there ever were."""

    def __init__(self) -> None:
        self.made: list[Engine] = []
        self.failing: set[str] = set()
        self.held: set[str] = set()
        self.unfit: set[str] = set()
        self.looked: list[str] = []
        self.look_gate = threading.Event()
        self.look_gate.set()

    def check(self, name: str) -> None:
        self.looked.append(name)
        assert self.look_gate.wait(SOON_S)
        if name in self.unfit:
            raise ModelLoadError(f"{name}: model.safetensors is cut off")

    def make(self, name: str) -> Engine:
        engine = Engine(name, fails=name in self.failing)
        if name in self.held:
            engine.gate.clear()
        self.made.append(engine)
        return engine

    @property
    def num_open(self) -> int:
        return sum(not engine.is_closed for engine in self.made)


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
async def router(shop: Shop):
    router = ModelRouter(["a", "b", "c"], shop.make, max_loaded=1, max_waiting=2, patience=Patience(), check=shop.check)
    router.open()
    yield router
    shop.look_gate.set()
    async with asyncio.timeout(SOON_S):
        await router.aclose()
    assert shop.num_open == 0


def state(router: ModelRouter[Engine], name: str) -> ModelState:
    return next(one.state for one in router.models() if one.name == name)


async def until(condition) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_model_is_loaded_once_for_all_that_wait_for_it(router, shop):
    leases = await asyncio.gather(*(router.acquire("a", SOON_S) for _ in range(2)))
    assert [lease.engine for lease in leases] == [shop.made[0]] * 2
    again = await router.acquire("a", SOON_S)
    assert again.engine is shop.made[0]
    assert router.models()[0].num_live == 3


async def test_the_model_that_is_not_used_makes_room_and_its_engine_is_closed_first(router, shop):
    (await router.acquire("a", SOON_S)).release()
    lease = await router.acquire("b", SOON_S)
    assert lease.name == "b"
    assert shop.made[0].is_closed
    assert state(router, "a") is ModelState.ABSENT


async def test_one_that_a_request_holds_stays_whoever_waits(router, shop):
    lease = await router.acquire("a", SOON_S)
    lease.hold()
    with pytest.raises(RequestTimeout, match="other models have all the room"):
        await router.acquire("b", 0.05)
    lease.release()
    with pytest.raises(RequestTimeout):
        await router.acquire("b", 0.05)
    assert not shop.made[0].is_closed
    lease.release()
    assert (await router.acquire("b", SOON_S)).name == "b"


async def test_a_load_that_fails_is_told_to_those_that_wait_and_harms_no_other(router, shop):
    shop.failing = {"a"}
    found = await asyncio.gather(*(router.acquire("a", SOON_S) for _ in range(2)), return_exceptions=True)
    assert all(isinstance(error, ModelUnavailable) and "config.json is missing" in str(error) for error in found)
    with pytest.raises(ModelUnavailable) as refused:
        await router.acquire("a", SOON_S)
    assert refused.value.retry_after_s == 1.0
    assert len(shop.made) == 1  # it was not tried again
    assert (await router.acquire("b", SOON_S)).engine.is_ready
    record = router.models()[0]
    assert (record.failures_total, record.failure) == (1, "a: config.json is missing")


async def test_one_whose_files_are_wrong_makes_no_other_go_and_its_engine_is_not_made(router, shop):
    lease = await router.acquire("a", SOON_S)
    lease.release()
    shop.unfit = {"b"}
    found = await asyncio.gather(*(router.acquire("b", SOON_S) for _ in range(2)), return_exceptions=True)
    assert all(isinstance(error, ModelUnavailable) and "is cut off" in str(error) for error in found)
    with pytest.raises(ModelUnavailable, match="is cut off"):
        await router.acquire("b", SOON_S)
    assert (await router.acquire("a", SOON_S)).engine is lease.engine
    assert (len(shop.made), shop.looked) == (1, ["a", "b"])  # once for all that waited, and not where it is loaded
    record = router.models()[1]
    assert (record.state, record.loads_total, record.failures_total) == (ModelState.FAILED, 0, 1)


async def test_a_look_at_files_that_takes_long_stops_nobody(router, shop):
    held = await router.acquire("a", SOON_S)
    shop.look_gate.clear()
    with pytest.raises(RequestTimeout, match="its files are still being looked at"):
        await router.acquire("b", 0.01)
    waiting = asyncio.create_task(router.acquire("b", SOON_S))
    await until(lambda: router.models()[1].num_waiting)
    assert (await router.acquire("a", SOON_S)).engine is held.engine
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert state(router, "b") is ModelState.CHECKING
    shop.look_gate.set()
    await until(lambda: state(router, "b") is ModelState.ABSENT)  # nobody waits for it any more
    assert (shop.looked, shop.made) == (["a", "b"], [held.engine])


async def test_the_end_waits_for_no_look_at_files(router, shop):
    shop.look_gate.clear()
    waiting = asyncio.create_task(router.acquire("a", SOON_S))
    await until(lambda: shop.looked)
    async with asyncio.timeout(SOON_S):
        await router.drain(SOON_S)
    with pytest.raises(EngineDraining):
        await waiting
    assert not shop.look_gate.is_set()
    assert shop.made == []


async def test_by_hand_it_is_tried_again_at_once(router, shop):
    shop.failing = {"a"}
    with pytest.raises(ModelUnavailable):
        await router.acquire("a", SOON_S)
    shop.failing = set()
    (await router.acquire("a", SOON_S, by_hand=True)).release()
    assert router.models()[0].failure == ""


async def test_what_breaks_as_it_is_made_tells_clients_no_more_than_its_kind(router, shop):
    def broken(name: str) -> Engine:
        raise ZeroDivisionError("a secret path")

    router._make = broken
    with pytest.raises(ModelUnavailable) as error:
        await router.acquire("a", SOON_S)
    assert "ZeroDivisionError" in str(error.value)
    assert "secret" not in str(error.value)


async def test_only_so_many_wait_for_one_model(router, shop):
    shop.held = {"a"}
    waiting = [asyncio.create_task(router.acquire("a", SOON_S)) for _ in range(2)]
    await until(lambda: shop.made)
    with pytest.raises(EngineOverloaded, match="2 requests wait"):
        await router.acquire("a", SOON_S)
    shop.made[0].gate.set()
    await asyncio.gather(*waiting)


async def test_who_is_cancelled_waits_no_more_and_leaves_nothing(router, shop):
    held = await router.acquire("a", SOON_S)
    waiting = asyncio.create_task(router.acquire("b", SOON_S))
    await until(lambda: state(router, "b") is ModelState.WAITING)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert state(router, "b") is ModelState.ABSENT
    held.release()


async def test_an_engine_that_dies_is_closed_and_loaded_again_when_it_is_asked_for(router, shop):
    lease = await router.acquire("a", SOON_S)
    shop.made[0].is_ready = False
    await until(lambda: state(router, "a") is ModelState.FAILED)
    assert shop.made[0].is_closed
    lease.release()  # of an engine that is gone
    assert (await router.acquire("a", SOON_S, by_hand=True)).engine is shop.made[1]


async def test_unloading_by_hand_waits_for_live_requests_for_as_long_as_was_said(router, shop):
    lease = await router.acquire("a", SOON_S)
    router.unload("a", SOON_S)
    assert state(router, "a") is ModelState.DRAINING
    lease.release()
    await until(lambda: state(router, "a") is ModelState.ABSENT)
    lease = await router.acquire("a", SOON_S)
    router.unload("a", 0.0)
    await until(lambda: state(router, "a") is ModelState.ABSENT)
    assert shop.made[1].drained_s == [0.0]  # which ends its requests with an error


async def test_a_load_is_broken_off_by_hand(router, shop):
    shop.held = {"a"}
    waiting = asyncio.create_task(router.acquire("a", SOON_S))
    await until(lambda: shop.made)
    router.unload("a", 0.0)
    with pytest.raises(ModelUnavailable, match="unloaded by hand"):
        await waiting
    await until(lambda: state(router, "a") is ModelState.ABSENT)
    assert shop.made[0].is_closed


async def test_a_drain_lets_live_requests_finish_and_refuses_all_others(router, shop):
    lease = await router.acquire("a", SOON_S)
    waiting = asyncio.create_task(router.acquire("b", SOON_S))
    await until(lambda: state(router, "b") is ModelState.WAITING)
    drain = asyncio.create_task(router.drain(SOON_S))
    with pytest.raises(EngineDraining):
        await waiting
    with pytest.raises(EngineDraining):
        await router.acquire("a", SOON_S)
    assert not drain.done()
    lease.release()
    await drain
    assert shop.made[0].is_closed


async def test_idle_models_go_by_themselves_where_that_is_asked_for(shop):
    router = ModelRouter(["a"], shop.make, max_loaded=1, max_waiting=2, patience=Patience(idle_s=0.02))
    router.open()
    (await router.acquire("a", SOON_S)).release()
    await until(lambda: state(router, "a") is ModelState.ABSENT)
    assert shop.num_open == 0
    await router.aclose()
