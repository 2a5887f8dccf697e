"""The records that an `Engine` tells of itself with: `requests()`, `actors()`, `kv()`, `steps()`, `watch()` …"""

from novainfer.actors.inspection.feed import ActorEvent, FeedEvent, IncidentEvent, LostEvent, RequestEvent, Subscription
from novainfer.actors.inspection.frames import Frame, RequestNow, Snapshot, Taken
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
from novainfer.actors.inspection.watch import Watcher
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
    "Frame",
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
    "RequestNow",
    "RequestRecord",
    "RequestTimes",
    "SessionRecord",
    "Snapshot",
    "StepRecord",
    "Subscription",
    "Taken",
    "Transition",
    "Watcher",
]
