"""The records that `Engine.requests()`, `actors()`, `kv()`, `steps()`, `events()`, `errors()`, `health()` give."""

from novainfer.actors.inspection.feed import ActorEvent, FeedEvent, IncidentEvent, LostEvent, RequestEvent, Subscription
from novainfer.actors.inspection.incidents import IncidentRecord
from novainfer.actors.inspection.records import (
    ActorRecord,
    ChoiceRecord,
    HealthRecord,
    KvRecord,
    RequestRecord,
    Transition,
)
from novainfer.actors.inspection.steps import PhaseTotals, StepRecord
from novainfer.fsm.health import Late

__all__ = [
    "ActorEvent",
    "ActorRecord",
    "ChoiceRecord",
    "FeedEvent",
    "HealthRecord",
    "IncidentEvent",
    "IncidentRecord",
    "KvRecord",
    "Late",
    "LostEvent",
    "PhaseTotals",
    "RequestEvent",
    "RequestRecord",
    "StepRecord",
    "Subscription",
    "Transition",
]
