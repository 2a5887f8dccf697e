import ast
import inspect
from pathlib import Path

import pytest

import novainfer.fsm
from novainfer.fsm.core.machine import IllegalEvent, Machine, each_row
from novainfer.fsm.diagram import page
from novainfer.fsm.machines import FRONT, MACHINES, OF_MODELS, READERS, states
from novainfer.fsm.simulation.explore.coverage import ARGUED, coverage

each_machine = pytest.mark.parametrize("machine", [*MACHINES, *OF_MODELS, *READERS, *FRONT], ids=lambda m: m.__name__)
ROOT = Path(__file__).parents[2]
FSM = Path(inspect.getfile(novainfer.fsm)).resolve().parent
CORE = sorted(path for path in FSM.rglob("*.py") if "simulation" not in path.parts)


@each_machine
def test_every_state_can_be_reached(machine: type[Machine]):
    reached = {str(states(machine)[0])}
    while True:
        more = {str(s) for state, _, row in each_row(machine.TABLE) if state in reached for s in row.follows}
        if more <= reached:
            break
        reached |= more
    assert reached == {str(s) for s in states(machine)}


@each_machine
def test_every_action_exists_and_every_method_that_looks_like_one_is_used(machine: type[Machine]):
    actions = {row.action for _, _, row in each_row(machine.TABLE) if row.action}
    for action in actions:
        assert callable(getattr(machine, action))


@each_machine
def test_no_action_has_the_name_of_what_each_machine_holds(machine: type[Machine]):
    """The slot of the same name would hide it, or it the slot, and neither says a word."""
    actions = {row.action for _, _, row in each_row(machine.TABLE)}
    assert not actions & set(Machine.__slots__)


@each_machine
def test_what_is_ignored_or_cannot_come_has_a_reason(machine: type[Machine]):
    for state, event, row in each_row(machine.TABLE):
        assert row.action or row.why, f"({state}, {event.__name__})"
        assert row.follows or row.impossible
        assert row.only is None or (row.only.name and row.only.why), f"({state}, {event.__name__})"


@each_machine
def test_an_event_that_cannot_come_raises_in_each_state_that_says_so(machine: type[Machine]):
    for state, event, row in each_row(machine.TABLE):
        if row.impossible and row is machine.TABLE[event][state]:
            victim = object.__new__(machine)
            victim.state = state
            with pytest.raises(IllegalEvent, match="cannot come"):
                victim.handle(event(**dict.fromkeys(event.__struct_fields__)))
            assert victim.state is state


def test_state_is_assigned_in_one_line_of_one_file():
    found = []
    for file in CORE:
        for node in ast.walk(ast.parse(file.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(t, ast.Attribute) and t.attr == "state" for t in targets):
                found.append(file.name)
    assert found == ["machine.py", "machine.py"]  # in __init__, and in handle


def test_the_core_imports_nothing_that_waits_draws_or_tells_the_time():
    forbidden = {"asyncio", "time", "random", "threading", "logging", "torch", "datetime", "os", "secrets"}
    for file in CORE:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not forbidden & {name.split(".")[0] for name in names}, file.name


def test_rows_that_are_argued_to_be_out_of_reach_exist_and_are_no_never_rows():
    possible = {row for c in coverage({}) for row in c.missing}
    assert set(ARGUED) <= possible


def test_the_page_of_diagrams_is_in_sync_with_the_tables():
    assert (ROOT / "docs/machines.md").read_text() == page(), "run `make docs`"
