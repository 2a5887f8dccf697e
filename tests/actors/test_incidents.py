"""The error queue: bounded, in the client's words, counted; its listeners cannot harm it."""

from __future__ import annotations

import logging

import pytest

from novainfer.actors.inspection.incidents import IncidentRecord, Incidents
from novainfer.fsm.messages.events import Incident
from tests.actors.helpers import ask, running

WHO = {1: ("chatcmpl-one", "alice"), 2: ("chatcmpl-two", "bob")}


def make(limit: int = 1000) -> Incidents:
    clock = iter(range(100, 10_000))
    return Incidents(WHO.get, limit=limit, clock=lambda: float(next(clock)))


def incident(kind: str = "oom", *stream_ids: int) -> Incident:
    return Incident(kind=kind, message="too little memory", action="bisected", step_id=7, stream_ids=list(stream_ids))


def test_an_incident_is_kept_with_its_time_and_the_names_that_clients_know() -> None:
    incidents = make()
    incidents.take(incident("oom", 1, 2))
    (record,) = incidents.records()
    assert (record.time, record.kind, record.step_id) == (100.0, "oom", 7)
    assert record.requests == ["chatcmpl-one", "chatcmpl-two"]
    assert (record.message, record.action) == ("too little memory", "bisected")


def test_a_stream_whose_reader_has_left_has_no_name() -> None:
    incidents = make()
    incidents.take(incident("oom", 1, 99))
    assert incidents.records()[0].requests == ["chatcmpl-one"]


def test_the_oldest_go_and_the_numbers_tell_that_they_were_there() -> None:
    incidents = make(limit=3)
    for _ in range(5):
        incidents.take(incident())
    assert [record.number for record in incidents.records()] == [2, 3, 4]
    assert incidents.counts == {"oom": 5}


def test_each_is_logged_as_a_warning_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "novainfer"):
        make().take(incident("oom", 1))
    (line,) = caplog.messages
    assert line == "oom in step 7: too little memory (requests chatcmpl-one); bisected"


def test_a_line_of_the_log_names_a_few_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    incidents = Incidents(lambda i: (f"r{i}", ""))
    incidents.take(incident("oom", *range(100)))
    assert len(incidents.records()[0].requests) == 100
    assert "(requests r0, r1, r2, r3, r4, r5, r6, r7 and 92 more)" in caplog.text


def test_listeners_hear_of_each_until_they_leave() -> None:
    incidents = make()
    heard: list[IncidentRecord] = []
    leave = incidents.subscribe(heard.append)
    incidents.take(incident("oom"))
    leave()
    leave()
    incidents.take(incident("lost"))
    assert [record.kind for record in heard] == ["oom"]


def test_a_listener_that_raises_is_dropped_and_the_others_hear(caplog: pytest.LogCaptureFixture) -> None:
    incidents = make()
    heard: list[IncidentRecord] = []

    def broken(record: IncidentRecord) -> None:
        raise OSError("disk full")

    incidents.subscribe(broken)
    incidents.subscribe(heard.append)
    incidents.take(incident())
    incidents.take(incident())
    assert len(heard) == 2
    assert caplog.text.count("hears of no more") == 1


def test_an_owner_sees_what_touched_its_requests_and_what_touched_nobodys() -> None:
    incidents = make()
    incidents.take(incident("oom", 1, 2))
    incidents.take(incident("exception", 2))
    incidents.take(incident("frozen"))
    assert [(r.kind, r.requests) for r in incidents.records("alice")] == [("oom", ["chatcmpl-one"]), ("frozen", [])]
    assert [(r.kind, r.requests) for r in incidents.records("carol")] == [("frozen", [])]
    assert len(incidents.records()) == 3


async def test_a_machine_reports_by_an_effect() -> None:
    async with running() as runtime:
        handle = ask(runtime, "hello")
        runtime._route("incidents", incident("exception", handle.stream_id), False)
        (record,) = runtime.incidents.records()
        assert record.requests == ["request"]
        assert record.kind == "exception"
