import pytest

from novainfer.fsm.core.machine import After, Send
from novainfer.fsm.messages.events import Incident, Quiet
from novainfer.fsm.messages.mode import EAGER, INT8, PLAIN, SDPA, Mode
from novainfer.fsm.schedule.ladder import (
    BACKOFF_MAX,
    Broken,
    Freed,
    Held,
    Ladder,
    Pressure,
    Rung,
    Switched,
    SwitchFailed,
)
from novainfer.fsm.simulation.world.shape import ALL_MODES, BEST, GPU_MODES, LEAN, SAFE

SHORT = Pressure("no memory")
BROKEN = Broken("a bad kernel")
HELD = Held("steps fail")


def timer(effects):
    """The quiet timer among `effects`, and its delay."""
    (after,) = [e for e in effects if isinstance(e, After)]
    return after.event, after.delay_s


@pytest.fixture
def ladder() -> Ladder:
    return Ladder(ALL_MODES, quiet_s=30.0)


def test_smaller_steps_are_a_rung_that_computes_as_the_full_one(ladder):
    (send,) = ladder.handle(HELD)
    assert send.event == Incident(kind="ladder", message="steps fail", action="FULL -> SMALLER_BATCH")
    assert (ladder.mode, ladder.is_down, ladder.rung) == (BEST, False, "SMALLER_BATCH")
    ladder.handle(Freed())
    assert ladder.state is Rung.FULL


@pytest.mark.parametrize(("event", "rung", "mode"), [(SHORT, "INT8", LEAN), (BROKEN, "PLAIN_KERNELS", SAFE)])
@pytest.mark.parametrize("is_held", [False, True])
def test_each_trouble_leads_to_the_rung_that_helps_and_quiet_leads_back(ladder, event, rung, mode, is_held):
    if is_held:
        ladder.handle(HELD)
    before = ladder.state
    assert ladder.helps(type(event))
    quiet, delay_s = timer(ladder.handle(event))
    assert (ladder.rung, ladder.mode, ladder.is_down, delay_s) == (rung, mode, True, 30.0)
    assert not ladder.helps(type(event))
    ladder.handle(quiet)
    assert ladder.state is before


@pytest.mark.parametrize("order", [(BROKEN, SHORT), (SHORT, BROKEN)])
def test_trouble_of_the_other_sort_changes_the_other_axis_and_then_nothing_helps(ladder, order):
    for event in order:
        ladder.handle(event)
    assert (ladder.rung, ladder.mode) == ("PLAIN_KERNELS+INT8", Mode(PLAIN, INT8))
    for event in order:
        assert not ladder.helps(type(event))
        timer(ladder.handle(event))
        assert ladder.mode == Mode(PLAIN, INT8)


def test_the_rungs_are_what_the_device_offers_best_first():
    assert Ladder(ALL_MODES).rungs == ("FULL", "SMALLER_BATCH", "PLAIN_KERNELS", "INT8", "PLAIN_KERNELS+INT8")
    assert Ladder((BEST, LEAN)).rungs == ("FULL", "SMALLER_BATCH", "INT8")
    assert Ladder((SAFE,)).rungs == ("FULL", "SMALLER_BATCH")


def test_the_rungs_of_a_gpu_have_names_of_their_own():
    kernels = ("NO_GRAPHS", "OTHER_ATTENTION", "PLAIN_KERNELS")
    lower = ("INT8", *(f"{name}+INT8" for name in kernels))
    assert Ladder(GPU_MODES).rungs == ("FULL", "SMALLER_BATCH", *kernels, *lower)
    assert Ladder((Mode(EAGER), Mode(SDPA), SAFE)).rungs == ("FULL", "SMALLER_BATCH", *kernels[1:])


def test_memory_that_is_short_has_graphs_let_go_before_weights_are_rounded():
    ladder = Ladder(GPU_MODES, quiet_s=30.0)
    for rung in ("NO_GRAPHS", "NO_GRAPHS+INT8"):
        assert ladder.helps(Pressure)
        quiet, _ = timer(ladder.handle(SHORT))
        assert ladder.rung == rung
    assert not ladder.helps(Pressure)
    ladder.handle(quiet)
    ladder.handle(BROKEN)
    ladder.handle(SHORT)
    assert ladder.rung == "NO_GRAPHS+INT8", "there are no graphs to let go of"


def test_without_a_mode_without_graphs_memory_that_is_short_leads_to_a_lower_precision():
    ladder = Ladder(GPU_MODES)
    ladder.handle(SHORT)
    ladder.handle(SwitchFailed(Mode(EAGER), "no"))
    ladder.handle(SHORT)
    assert ladder.mode == LEAN


def test_kernels_that_fail_are_left_one_after_the_other_and_the_precision_stays():
    ladder = Ladder(GPU_MODES)
    seen = []
    while ladder.helps(Broken):
        ladder.handle(BROKEN)
        seen.append(ladder.mode)
    assert seen == [Mode(EAGER), Mode(SDPA), SAFE]


@pytest.mark.parametrize(
    ("mode", "is_same"),
    [(BEST, True), (Mode(EAGER), True), (Mode(SDPA), False), (SAFE, False), (LEAN, False), (Mode(EAGER, INT8), False)],
)
def test_a_graph_computes_what_its_kernels_compute_and_no_other_mode_does(mode, is_same):
    assert mode.computes_as(BEST) is BEST.computes_as(mode) is is_same
    assert mode.computes_as(mode)


def test_a_mode_that_is_not_offered_is_no_rung():
    ladder = Ladder((BEST, SAFE, LEAN))
    ladder.handle(BROKEN)
    assert ladder.mode == SAFE
    assert not ladder.helps(Pressure)  # there is a lower precision, but on the kernels that fail


def test_an_engine_that_was_started_quantised_is_exact_so_and_has_plainer_kernels_below():
    ladder = Ladder((LEAN, Mode(PLAIN, INT8)))
    assert (ladder.mode, ladder.is_down, ladder.rung) == (LEAN, False, "FULL")
    assert ladder.rungs == ("FULL", "SMALLER_BATCH", "PLAIN_KERNELS")
    assert not ladder.helps(Pressure)
    quiet, _ = timer(ladder.handle(BROKEN))
    assert (ladder.mode, ladder.is_down, ladder.rung) == (Mode(PLAIN, INT8), True, "PLAIN_KERNELS")
    ladder.handle(quiet)
    assert (ladder.mode, ladder.is_down) == (LEAN, False)


def test_steps_that_may_be_large_again_while_it_is_elsewhere_are_remembered(ladder):
    ladder.handle(HELD)
    quiet, _ = timer(ladder.handle(SHORT))
    ladder.handle(Freed())
    ladder.handle(quiet)
    assert ladder.state is Rung.FULL


def test_trouble_sets_the_timer_anew(ladder):
    old, _ = timer(ladder.handle(SHORT))
    new, _ = timer(ladder.handle(SHORT))
    assert new == old  # one timer, which begins again
    ladder.handle(new)
    assert ladder.state is Rung.FULL


def test_trouble_soon_after_the_way_up_doubles_the_time_to_the_next_up_to_a_bound(ladder):
    seen = []
    for _ in range(6):
        quiet, delay_s = timer(ladder.handle(SHORT))
        seen.append(delay_s / 30.0)
        ladder.handle(quiet)
    assert seen == [1, 2, 4, 8, BACKOFF_MAX, BACKOFF_MAX]


def test_one_way_up_that_comes_to_nothing_doubles_the_time_once_through_however_many_rungs(ladder):
    quiet, _ = timer(ladder.handle(BROKEN))
    ladder.handle(quiet)
    ladder.handle(BROKEN)
    _, delay_s = timer(ladder.handle(SHORT))
    assert (ladder.rung, delay_s) == ("PLAIN_KERNELS+INT8", 60.0)


def test_a_quiet_time_on_the_way_up_makes_the_next_trouble_a_first_one(ladder):
    for _ in range(3):
        quiet, _ = timer(ladder.handle(SHORT))
        settled, _ = timer(ladder.handle(quiet))
    assert ladder.handle(settled) == []
    _, delay_s = timer(ladder.handle(SHORT))
    assert delay_s == 30.0


def test_a_device_with_one_mode_stays_in_it():
    ladder = Ladder((BEST,))
    for event in (SHORT, BROKEN):
        assert not ladder.helps(type(event))
        assert ladder.handle(event) == []
    assert ladder.state is Rung.FULL


def test_a_rung_that_the_device_cannot_switch_to_is_left_out_from_then_on(ladder):
    ladder.handle(HELD)
    ladder.handle(BROKEN)
    ladder.handle(SwitchFailed(SAFE, "no torch"))
    assert ladder.state is Rung.SMALLER_BATCH
    assert not ladder.helps(Broken)
    assert ladder.helps(Pressure)


def test_a_mode_that_cannot_be_left_is_stayed_in_until_the_next_quiet_time():
    ladder = Ladder((BEST, LEAN), quiet_s=30.0)
    quiet, _ = timer(ladder.handle(SHORT))
    ladder.handle(Switched(LEAN))
    ladder.handle(quiet)
    assert ladder.state is Rung.FULL
    again, _ = timer(ladder.handle(SwitchFailed(BEST, "no room for the weights")))
    assert ladder.rung == "INT8"
    ladder.handle(again)
    assert ladder.state is Rung.FULL


def test_a_switch_that_failed_for_a_rung_left_meanwhile_changes_nothing(ladder):
    quiet, _ = timer(ladder.handle(BROKEN))
    ladder.handle(quiet)
    assert ladder.handle(SwitchFailed(SAFE, "late")) == []
    assert ladder.state is Rung.FULL


def test_at_the_top_a_timer_is_late(ladder):
    assert ladder.handle(Quiet()) == []


def test_every_change_is_told_and_nothing_else(ladder):
    said = [
        (effect.event.action, effect.event.message)
        for event in (SHORT, SHORT, HELD, BROKEN)
        for effect in ladder.handle(event)
        if isinstance(effect, Send)
    ]
    assert said == [("FULL -> INT8", "no memory"), ("INT8 -> PLAIN_KERNELS+INT8", "a bad kernel")]
