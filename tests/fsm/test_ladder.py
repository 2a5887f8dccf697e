import pytest

from novainfer.fsm.events import Incident, Quiet
from novainfer.fsm.ladder import Ladder, Pressure, Rung, Switched, SwitchFailed
from novainfer.fsm.machine import After, Send

SHORT = Pressure("no memory")
ALL = ("full", "plain", "int8")


def serial(effects):
    """Of the quiet timer among `effects`."""
    (after,) = [e for e in effects if isinstance(e, After)]
    assert after.delay_s == 30.0
    return after.event


@pytest.fixture
def ladder() -> Ladder:
    return Ladder(ALL, quiet_s=30.0)


def test_under_pressure_it_goes_down_rung_by_rung_and_says_so(ladder):
    seen = []
    for _ in range(4):
        effects = ladder.handle(SHORT)
        seen.append((ladder.state, ladder.mode))
    assert seen == [
        (Rung.SMALLER_BATCH, "full"),
        (Rung.PLAIN_KERNELS, "plain"),
        (Rung.INT8, "int8"),
        (Rung.INT8, "int8"),
    ]
    assert not [e for e in effects if isinstance(e, Send)]  # at the bottom there is no news


def test_every_change_is_an_incident_that_names_both_rungs(ladder):
    (incident,) = [e.event for e in ladder.handle(SHORT) if isinstance(e, Send)]
    assert incident == Incident(kind="ladder", message="no memory", action="FULL -> SMALLER_BATCH")


def test_quiet_time_takes_it_up_again_one_rung_at_a_time(ladder):
    timer = [serial(ladder.handle(SHORT)) for _ in range(3)][-1]
    seen = []
    while ladder.state is not Rung.FULL:
        ladder.handle(Switched(ladder.mode))
        effects = ladder.handle(timer)
        seen.append(ladder.state)
        timer = serial(effects) if ladder.state is not Rung.FULL else None
    assert seen == [Rung.PLAIN_KERNELS, Rung.SMALLER_BATCH, Rung.FULL]


def test_a_timer_that_was_set_before_the_last_trouble_says_nothing(ladder):
    old = serial(ladder.handle(SHORT))
    ladder.handle(SHORT)
    assert ladder.handle(old) == []
    assert ladder.state is Rung.PLAIN_KERNELS


def test_trouble_at_the_bottom_puts_the_way_up_off():
    ladder = Ladder(quiet_s=30.0)
    old = serial(ladder.handle(SHORT))
    new = serial(ladder.handle(SHORT))
    assert ladder.handle(old) == []
    ladder.handle(new)
    assert ladder.state is Rung.FULL


def test_a_device_with_one_mode_has_two_rungs():
    ladder = Ladder(("full",))
    for _ in range(3):
        ladder.handle(SHORT)
    assert ladder.state is Rung.SMALLER_BATCH


def test_a_rung_that_the_device_cannot_switch_to_is_left_out_from_then_on(ladder):
    ladder.handle(SHORT)
    ladder.handle(SHORT)
    ladder.handle(SwitchFailed("plain", "no torch"))
    assert ladder.state is Rung.SMALLER_BATCH
    ladder.handle(SHORT)
    assert ladder.state is Rung.INT8


def test_a_mode_that_cannot_be_left_is_stayed_in_until_the_next_quiet_time():
    ladder = Ladder(("full", "int8"), quiet_s=30.0)
    ladder.handle(SHORT)
    timer = serial(ladder.handle(SHORT))
    ladder.handle(Switched("int8"))
    ladder.handle(timer)
    assert ladder.state is Rung.SMALLER_BATCH
    again = serial(ladder.handle(SwitchFailed("full", "no room for the weights")))
    assert ladder.state is Rung.INT8
    ladder.handle(again)
    assert ladder.state is Rung.SMALLER_BATCH


def test_a_switch_that_failed_for_a_rung_left_meanwhile_changes_nothing(ladder):
    ladder.handle(SHORT)
    timer = serial(ladder.handle(SHORT))
    ladder.handle(timer)
    assert ladder.state is Rung.SMALLER_BATCH
    assert ladder.handle(SwitchFailed("plain", "late")) == []
    assert ladder.state is Rung.SMALLER_BATCH


def test_at_the_top_a_timer_is_late(ladder):
    assert ladder.handle(Quiet(0)) == []
