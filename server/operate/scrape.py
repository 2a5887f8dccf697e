"""`/metrics`: the engine's numbers under vLLM's names, which dashboards and routers know, and our own as `nova_*`.

A router may ask twenty times a second, so a scrape asks the engine for each of its records once, and what has to be
counted over all requests and blocks, or over all tasks, is counted again only after `WALK_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from novainfer import EngineStatistics
from novainfer.fsm.health import GrammarState
from novainfer.fsm.models.model import ModelState
from novainfer.inspection import HealthRecord
from novainfer.models import Models
from novainfer.server.engine import ServedEngine, weights_in
from novainfer.server.operate.exposition import (
    COUNTER,
    GAUGE,
    Family,
    HistogramFamily,
    SummaryFamily,
    of_model,
    process_text,
    together,
)
from novainfer.server.service import Service

WALK_S = 1.0
ENGINE = "0"  # vLLM numbers the engines of a server; there is one
OF_MODEL = ("engine", "model_name")

# the words of vLLM's own `finished_reason`, and ours for what it has no word for
VLLM_REASONS = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_LENGTH": "length",
    "FINISHED_ABORTED": "abort",
    "FINISHED_ERROR": "error",
    "FINISHED_TIMEOUT": "timeout",
    "FINISHED_IGNORED": "ignored",
}

# ---- what HTTP counts ------------------------------------------------------------------------------------------------

HTTP_REQUESTS = Family("nova_http_requests_total", COUNTER, "HTTP requests answered", "method", "route", "status")
TERMINAL_EVENTS = Family("nova_terminal_events_total", COUNTER, "How generations ended", "kind")
LIVE_REQUESTS = Family("nova_live_requests", GAUGE, "Generations in progress")
STORED_RESPONSES = Family("nova_stored_responses", GAUGE, "Responses that are kept or being made")
STORED_BYTES = Family("nova_stored_bytes", GAUGE, "Bytes of responses that are kept, with conversations and events")
JOURNAL_TOKENS = Family("nova_journal_tokens_total", COUNTER, "Tokens written into the journal")
JOURNAL_FAILURES = Family("nova_journal_failures_total", COUNTER, "Writes into the journal that failed")
JOURNAL_SECONDS = Family("nova_journal_write_seconds_total", COUNTER, "Time of writes into the journal")
CONNECTIONS = Family("nova_connections", GAUGE, "Open connections")
API_PROCESS = Family(
    "nova_api_process_up", GAUGE, "1 while this place of --api-processes has a process that listens", "process"
)
API_CONNECTIONS = Family("nova_api_process_connections", GAUGE, "Connections of each API process", "process")
API_REQUESTS = Family("nova_api_process_requests", GAUGE, "HTTP requests of each that are being answered", "process")
API_LOSSES = Family("nova_api_process_losses_total", COUNTER, "API processes that were lost", "process")
API_LAG = Family("nova_api_process_lag_seconds", GAUGE, "How late the loop of each said that it lives", "process")
API_CPU = Family("nova_api_process_cpu_seconds_total", COUNTER, "CPU time of each, since it was started", "process")
TASKS = Family("nova_tasks", GAUGE, "Tasks of the server's loop")
READY = Family("nova_ready", GAUGE, "1 when /readyz answers 200")
UNKNOWN_KEYS = Family("nova_unknown_keys_total", COUNTER, "Requests refused for their key")
RATE_LIMITED = Family("nova_rate_limited_total", COUNTER, "Requests that were over a limit of their key", "limit")

# ---- several models --------------------------------------------------------------------------------------------------

MODEL_STATE = Family("nova_model_state", GAUGE, "1 for the state that each model is in", "model_name", "state")
MODEL_LIVE = Family("nova_model_live_requests", GAUGE, "Requests that have this model", "model_name")
MODEL_WAITING = Family("nova_model_waiting_requests", GAUGE, "Requests that wait for it to be loaded", "model_name")
MODEL_LOADS = Family("nova_model_loads_total", COUNTER, "How often it began to be loaded", "model_name")
MODEL_FAILURES = Family("nova_model_failures_total", COUNTER, "How often it could not be loaded, or died", "model_name")
MODEL_UNLOADS = Family("nova_model_unloads_total", COUNTER, "How often it was unloaded", "model_name")

# ---- the engine, under vLLM's names ----------------------------------------------------------------------------------

RUNNING = Family("vllm:num_requests_running", GAUGE, "Requests in the running batch", *OF_MODEL)
WAITING = Family("vllm:num_requests_waiting", GAUGE, "Requests that wait", *OF_MODEL)
WAITING_BY_REASON = Family(
    "vllm:num_requests_waiting_by_reason", GAUGE, "Requests that wait, by what for", *OF_MODEL, "reason"
)
KV_USAGE = Family("vllm:kv_cache_usage_perc", GAUGE, "Share of KV blocks in use, 0 to 1", *OF_MODEL)
PREEMPTIONS = Family("vllm:num_preemptions_total", COUNTER, "Preemptions", *OF_MODEL)
PROMPT_TOKENS = Family("vllm:prompt_tokens_total", COUNTER, "Prompt tokens", *OF_MODEL)
GENERATION_TOKENS = Family("vllm:generation_tokens_total", COUNTER, "Generated tokens", *OF_MODEL)
QUERIES = Family("vllm:prefix_cache_queries_total", COUNTER, "Prompt tokens looked up", *OF_MODEL)
HITS = Family("vllm:prefix_cache_hits_total", COUNTER, "Prompt tokens found in the cache", *OF_MODEL)
PROMPT_CACHED = Family("vllm:prompt_tokens_cached_total", COUNTER, "As vllm:prefix_cache_hits_total", *OF_MODEL)
SUCCESS = Family("vllm:request_success_total", COUNTER, "Finished", "engine", "finished_reason", "model_name")
REJECTED = Family(
    "vllm:admission_rejections_total", COUNTER, "Requests refused by admission", "engine", "model_name", "reason"
)
CACHE_CONFIG = Family(
    *("vllm:cache_config_info", GAUGE, "How the KV cache is laid out: always 1"),
    *("block_size", "cache_dtype", "enable_prefix_caching", "engine", "model_name", "num_gpu_blocks"),
)
_SPEC = "vllm:spec_decode_num"
DRAFTS = Family(f"{_SPEC}_drafts_total", COUNTER, "Rows of steps that verified drafts", *OF_MODEL)
DRAFT_TOKENS = Family(f"{_SPEC}_draft_tokens_total", COUNTER, "Drafts verified", *OF_MODEL)
ACCEPTED = Family(f"{_SPEC}_accepted_tokens_total", COUNTER, "Drafts that were right", *OF_MODEL)
ACCEPTED_AT = Family(
    *(f"{_SPEC}_accepted_tokens_per_pos_total", COUNTER, "Drafts that were right, by their place in the row"),
    *(*OF_MODEL, "position"),
)
TTFT = HistogramFamily("vllm:time_to_first_token_seconds", "time to first token seconds", *OF_MODEL)
INTER_TOKEN = HistogramFamily("vllm:inter_token_latency_seconds", "inter token latency seconds", *OF_MODEL)
E2E = HistogramFamily("vllm:e2e_request_latency_seconds", "e2e request latency seconds", *OF_MODEL)
REQUEST_PROMPT = HistogramFamily("vllm:request_prompt_tokens", "request prompt tokens", *OF_MODEL)
REQUEST_GENERATION = HistogramFamily("vllm:request_generation_tokens", "request generation tokens", *OF_MODEL)
PARAMS_N = HistogramFamily("vllm:request_params_n", "request params n", *OF_MODEL)
PARAMS_MAX_TOKENS = HistogramFamily("vllm:request_params_max_tokens", "request params max_tokens", *OF_MODEL)
STEP_TOKENS = HistogramFamily("vllm:iteration_tokens_total", "Tokens of a step", *OF_MODEL)
TIMES = {  # by the field of RequestTimes
    field: HistogramFamily(f"vllm:request_{name}", text, *OF_MODEL)
    for field, name, text in (
        ("queue", "queue_time_seconds", "From the arrival until a request first ran"),
        ("prefill", "prefill_time_seconds", "From there to its first token"),
        ("decode", "decode_time_seconds", "From there to its end"),
        ("inference", "inference_time_seconds", "From when it first ran to its end"),
        ("per_token", "time_per_output_token_seconds", "Of each request, its mean time for a token behind the first"),
        ("preemptions", "num_preemptions", "How often a request was preempted"),
    )
}

# ---- and under the names that older versions of vLLM had, which some routers still read ------------------------------

OLD_KV_USAGE = Family("vllm:gpu_cache_usage_perc", GAUGE, "As vllm:kv_cache_usage_perc", *OF_MODEL)
OLD_QUERIES = Family("vllm:gpu_prefix_cache_queries_total", COUNTER, "As vllm:prefix_cache_queries_total", *OF_MODEL)
OLD_HITS = Family("vllm:gpu_prefix_cache_hits_total", COUNTER, "As vllm:prefix_cache_hits_total", *OF_MODEL)
OLD_HIT_RATE = Family("vllm:gpu_prefix_cache_hit_rate", GAUGE, "Hits by queries since the start", *OF_MODEL)
OLD_INTER_TOKEN = HistogramFamily(
    "vllm:time_per_output_token_seconds", "As vllm:inter_token_latency_seconds", *OF_MODEL
)

# ---- our own ---------------------------------------------------------------------------------------------------------

STEPS = Family("nova_steps_total", COUNTER, "Steps")
COPIED = Family("nova_copied_blocks_total", COUNTER, "KV blocks copied before a request wrote into one that it shared")
SWAPPED_OUT = Family("nova_swapped_out_blocks_total", COUNTER, "KV blocks copied to the host's memory")
SWAPPED_IN = Family("nova_swapped_in_blocks_total", COUNTER, "KV blocks copied back from it")
REQUEST_STATE = Family("nova_request_state", GAUGE, "Live choices by state", "state")
TRANSITIONS = Family(
    "nova_transitions_total", COUNTER, "How often requests and actors came into another state", "actor", "from", "to"
)
ROLLBACKS = Family("nova_rollbacks_total", COUNTER, "Steps that were taken back, by cause", "cause")
KV_BLOCKS = Family("nova_kv_blocks", GAUGE, "KV blocks by their owner's state; they add up to the total", "state")
STEP_SECONDS = SummaryFamily("nova_step_seconds", "Time of steps by phase", "phase")
LIVE = Family("nova_live", GAUGE, "1 when no actor is stuck or dead")
LAG = Family("nova_loop_lag_seconds", GAUGE, "How late the watchdog's last look came")
DWELL = Family("nova_state_dwell_seconds", GAUGE, "How long each actor has been in its state", "actor", "state")
MAILBOX_WAIT = Family(
    "nova_mailbox_wait_seconds", GAUGE, "For how long an actor that is stuck has taken no turn", "actor"
)
GRAMMAR_THREADS = Family(
    "nova_grammar_threads_left_behind", GAUGE, "Threads at a grammar that nobody waits for any more: it took too long"
)
MAILBOX_DEPTH = Family("nova_mailbox_depth", GAUGE, "Messages that wait for each actor", "actor")
INCIDENTS = Family("nova_incidents_total", COUNTER, "What went wrong, by kind", "kind")
RESTARTS = Family("nova_worker_restarts_total", COUNTER, "Workers that were lost and replaced")
RUNG = Family("nova_ladder_rung", GAUGE, "1 for the rung of the ladder that the engine works on", "rung")
MODE = Family(
    *("nova_mode", GAUGE, "1 for the kernels and the precision that steps are computed with"),
    *("kernels", "precision", "weights"),
)
FAILED_KERNELS = Family(
    "nova_failed_kernels", GAUGE, "Kernels whose self-test failed at the load; others compute instead"
)
QUEUED = Family("nova_queued_requests", GAUGE, "Let in, and not run yet")
QUEUED_TOKENS = Family("nova_queued_tokens", GAUGE, "Prompt tokens of those")
OVERFLOW = Family("nova_overflow_requests", GAUGE, "Waiting for room in the queue")
OVERFLOWED = Family("nova_overflowed_total", COUNTER, "Streams that had to wait for room in the queue")
DRAIN_RATE = Family(
    "nova_queue_drain_rate", GAUGE, "Requests a second that leave the queue: what Retry-After is computed from"
)
REJECTIONS = Family("nova_rejections_total", COUNTER, "Streams refused at once, by what was full", "reason")
CANCELS = Family("nova_cancels_total", COUNTER, "Requests ended before their time", "cause")
STALLED = Family("nova_stalled_streams", GAUGE, "Streams whose readers are slow")
STALLS = Family("nova_stalls_total", COUNTER, "How often a stream stalled")


def scrape(service: Service) -> bytes:
    """The text of one scrape."""
    parts = list(_http(service))
    if service.models is None:
        parts += _of_one(service, service.engine)
    else:
        parts += _of_several(service, service.models)
    parts.append(_walk(service))
    parts.append(process_text())
    return "".join(parts).encode()


def _of_one(service: Service, engine: ServedEngine | None) -> Iterator[str]:
    if engine is None:
        yield READY.one(0.0)
        return
    stats, health = engine.statistics(), engine.health()
    yield READY.one(float(service.is_ready and health.is_ready))
    yield from _of_engine(service, engine, stats, health)


def _of_several(service: Service, models: Models[ServedEngine]) -> Iterator[str]:
    """What one has, of each that is loaded: a head for all of them, and a label that tells them apart."""
    yield READY.one(float(service.is_ready))
    records = models.models()
    yield MODEL_STATE.each({(one.name, str(state)): one.state is state for one in records for state in ModelState})
    yield MODEL_LIVE.each({one.name: one.num_live for one in records})
    yield MODEL_WAITING.each({one.name: one.num_waiting for one in records})
    yield MODEL_LOADS.each({one.name: one.loads_total for one in records})
    yield MODEL_FAILURES.each({one.name: one.failures_total for one in records})
    yield MODEL_UNLOADS.each({one.name: one.unloads_total for one in records})
    yield together(
        of_model(part, name)
        for name, engine in models.engines().items()
        for part in _of_engine(service, engine, engine.statistics(), engine.health())
    )


def _of_engine(service: Service, engine: ServedEngine, stats: EngineStatistics, health: HealthRecord) -> Iterator[str]:
    if engine.is_ready:
        yield from _engine(engine, stats, is_compat=service.settings.metrics_compat)
        yield from _requests(service, engine)
        yield from _admission(stats)
    yield from _progress(engine, stats, health)


def _walk(service: Service) -> str:
    """What is counted one by one, or was a moment ago."""
    walked, now_s = service.metrics.walked, time.monotonic()
    if now_s - walked.at_s >= WALK_S:
        parts = [TASKS.one(float(len(asyncio.all_tasks())))]
        for name, engine in service.engines().items():
            if engine.is_ready and (kv := engine.kv()) is not None:
                blocks = KV_BLOCKS.each(kv.blocks)
                parts.append(of_model(blocks, name) if name else blocks)
        walked.text, walked.at_s = together(parts), now_s
    return walked.text


def _http(service: Service) -> Iterator[str]:
    metrics = service.metrics
    yield HTTP_REQUESTS.each(metrics.http_requests)
    yield TERMINAL_EVENTS.each({kind: metrics.terminal_events[kind] for kind in ("finish", "error", "disconnect")})
    yield LIVE_REQUESTS.one(float(service.live.num_live))
    yield STORED_RESPONSES.one(float(len(service.store)))
    yield STORED_BYTES.one(float(service.store.num_bytes))
    if (journal := service.journal) is not None:
        yield JOURNAL_TOKENS.one(float(journal.tokens_total))
        yield JOURNAL_FAILURES.one(float(journal.failures_total))
        yield JOURNAL_SECONDS.one(journal.write_s_total)
    yield CONNECTIONS.one(float(len(service.connections)))
    yield from _api_processes(service)
    yield UNKNOWN_KEYS.one(float(metrics.unknown_keys))
    yield RATE_LIMITED.each(service.quotas.num_refused)


def _api_processes(service: Service) -> Iterator[str]:
    if service.front is None or not (found := service.front.processes()):
        return
    yield API_PROCESS.each({str(one.index): one.state == "OPEN" for one in found})
    yield API_CONNECTIONS.each({str(one.index): one.num_connections for one in found})
    yield API_REQUESTS.each({str(one.index): one.num_requests for one in found})
    yield API_LOSSES.each({str(one.index): one.num_losses for one in found})
    yield API_LAG.each({str(one.index): one.lag_s for one in found})
    yield API_CPU.each({str(one.index): one.cpu_s for one in found})


def _engine(engine: ServedEngine, stats: EngineStatistics, *, is_compat: bool) -> Iterator[str]:
    info = engine.model_info
    of = (ENGINE, info.name)
    in_use = stats.kv_blocks_owned / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
    queries, hits = float(stats.prefix_cache_queries), float(stats.prefix_cache_hits)
    yield RUNNING.one(float(stats.num_running), *of)
    yield WAITING.one(float(stats.num_waiting), *of)
    deferred = stats.num_deferred
    yield WAITING_BY_REASON.each({(*of, "capacity"): stats.num_waiting - deferred, (*of, "deferred"): deferred})
    yield KV_USAGE.one(in_use, *of)
    yield PREEMPTIONS.one(float(stats.preemptions), *of)
    yield PROMPT_TOKENS.one(float(stats.prompt_tokens_total), *of)
    yield GENERATION_TOKENS.one(float(stats.generation_tokens_total), *of)
    yield QUERIES.one(queries, *of)
    yield HITS.one(hits, *of)
    yield PROMPT_CACHED.one(hits, *of)
    for field, family in TIMES.items():
        yield family.one(getattr(stats.times, field), *of)
    yield STEP_TOKENS.one(stats.step_tokens, *of)
    ends = stats.requests_finished.items()
    yield SUCCESS.each({(ENGINE, VLLM_REASONS.get(reason, reason), info.name): count for reason, count in ends})
    layout = (str(info.block_size), info.kv_cache_dtype, str(info.enable_prefix_caching), ENGINE)
    yield CACHE_CONFIG.one(1.0, *layout, info.name, str(info.num_kv_blocks))
    if is_compat:
        yield OLD_KV_USAGE.one(in_use, *of)
        yield OLD_QUERIES.one(queries, *of)
        yield OLD_HITS.one(hits, *of)
        yield OLD_HIT_RATE.one(hits / queries if queries else 0.0, *of)
    if (drafts := stats.speculation) is not None:
        yield DRAFTS.one(float(drafts.num_drafts_total), *of)
        yield DRAFT_TOKENS.one(float(drafts.num_draft_tokens_total), *of)
        yield ACCEPTED.one(float(drafts.num_accepted_tokens_total), *of)
        yield ACCEPTED_AT.each({(*of, str(at)): count for at, count in enumerate(drafts.accepted_per_position)})
    yield STEPS.one(float(stats.steps))
    yield COPIED.one(float(stats.copied_blocks))
    yield SWAPPED_OUT.one(float(stats.swapped_out_blocks))
    yield SWAPPED_IN.one(float(stats.swapped_in_blocks))
    yield REQUEST_STATE.each(stats.request_states)
    yield TRANSITIONS.each(stats.transitions)
    yield ROLLBACKS.each(stats.rollbacks)
    yield STEP_SECONDS.each({name: getattr(stats.phases, name) for name in ("schedule", "device", "outputs")})


def _requests(service: Service, engine: ServedEngine) -> Iterator[str]:
    name = engine.model_info.name
    metrics, of = service.metrics.of(name), (ENGINE, name)
    yield TTFT.one(metrics.time_to_first_token, *of)
    yield INTER_TOKEN.one(metrics.inter_token_latency, *of)
    yield E2E.one(metrics.e2e_request_latency, *of)
    yield REQUEST_PROMPT.one(metrics.prompt_tokens, *of)
    yield REQUEST_GENERATION.one(metrics.generation_tokens, *of)
    yield PARAMS_N.one(metrics.params_n, *of)
    yield PARAMS_MAX_TOKENS.one(metrics.params_max_tokens, *of)
    yield REJECTED.each({(*of, code): count for code, count in metrics.rejections.items()})
    if service.settings.metrics_compat:
        yield OLD_INTER_TOKEN.one(metrics.inter_token_latency, *of)


def _admission(stats: EngineStatistics) -> Iterator[str]:
    found = stats.admission
    yield QUEUED.one(float(found.num_queued))
    yield QUEUED_TOKENS.one(float(found.num_queued_tokens))
    yield OVERFLOW.one(float(found.num_overflow))
    yield OVERFLOWED.one(float(found.overflowed_total))
    if found.drain_rate_per_s is not None:
        yield DRAIN_RATE.one(float(found.drain_rate_per_s))
    yield REJECTIONS.each(found.rejected_total)
    yield CANCELS.each(found.cancelled_total)
    yield STALLED.one(float(found.num_stalled))
    yield STALLS.one(float(found.stalls_total))


def _progress(engine: ServedEngine, stats: EngineStatistics, health: HealthRecord) -> Iterator[str]:
    """Whether everything moves, and what went wrong; also while the engine is not ready."""
    actors = engine.actors()
    yield LIVE.one(float(health.is_live))
    yield LAG.one(float(health.lag_s))
    yield DWELL.each({(actor.name, actor.state): actor.dwell_s for actor in actors})
    yield MAILBOX_WAIT.each({actor.name: actor.wait_s for actor in actors})
    yield MAILBOX_DEPTH.each({actor.name: actor.mailbox_depth for actor in actors})
    yield GRAMMAR_THREADS.one(float(sum(actor.state == GrammarState.LEFT_BEHIND for actor in actors)))
    yield INCIDENTS.each(stats.incidents)
    yield RESTARTS.one(float(stats.worker_losses))
    yield RUNG.each({rung: rung == stats.rung for rung in stats.rungs})
    mode = stats.mode
    yield MODE.one(1.0, mode.kernels, mode.precision, weights_in(engine.model_info, mode))
    yield FAILED_KERNELS.one(float(len(engine.model_info.failed_kernels)))
