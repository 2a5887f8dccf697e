"""The records that `Engine.requests()`, `actors()`, `kv()`, `steps()`, `events()`, `errors()`, `health()` give."""

from novainfer.actors.inspection.feed import ActorEvent, FeedEvent, IncidentEvent, LostEvent, RequestEvent, Subscription
from novainfer.actors.inspection.incidents import IncidentRecord
from novainfer.actors.inspection.records import (
    ActorRecord,
    ChoiceRecord,
    HealthRecord,
    KvRecord,
    RequestRecord,
    SessionRecord,
    Transition,
)
from novainfer.actors.inspection.steps import PhaseTotals, StepRecord
from novainfer.actors.inspection.times import (
    INTER_TOKEN_S,
    LATENCY_S,
    TTFT_S,
    WAITS,
    Histogram,
    HistogramRecord,
    RequestTimes,
)
from novainfer.fsm.health import Late

__all__ = [
    "INTER_TOKEN_S",
    "LATENCY_S",
    "TTFT_S",
    "WAITS",
    "ActorEvent",
    "ActorRecord",
    "ChoiceRecord",
    "FeedEvent",
    "HealthRecord",
    "Histogram",
    "HistogramRecord",
    "IncidentEvent",
    "IncidentRecord",
    "KvRecord",
    "Late",
    "LostEvent",
    "PhaseTotals",
    "RequestEvent",
    "RequestRecord",
    "RequestTimes",
    "SessionRecord",
    "StepRecord",
    "Subscription",
    "Transition",
]
