"""`GET /metrics`: the store's status and the service's stats as Prometheus families.

`Exposition.text` runs on a thread of the admin pool; it reads counters that others write, without stopping them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tierstore.engine.operations.problems import Problem
from tierstore.errors import NO_VERSION
from tierstore.predict.session import KEPT_BYTES
from tierstore.service.admin import health_metrics
from tierstore.service.context import Service
from tierstore.service.families import Key, counter, counters, gauge, gauges, histograms
from tierstore.service.protocols.oip.shared_memory import MAX_REGIONS
from tierstore.service.protocols.tfserving.signature import MAX_SIGNATURES
from tierstore.service.stats import InferenceStats
from tierstore.types import head_name

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("active", "canary", "kept", "stale", "outdated", "loading")
Documents = dict[str, Any]  # of models, by name


class Exposition:
    """The metrics document. It has a registry of its own, so that a program that embeds the service keeps its
    metrics apart.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(Everything(service))
        for kind in (ProcessCollector, PlatformCollector, GCCollector):
            kind(registry=self._registry)

    def text(self) -> bytes:
        """The metrics in the exposition format."""
        self._service.refresh()
        return generate_latest(self._registry)


class Everything(Collector):
    """All families of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []  # or the registry would collect once at registration

    def collect(self) -> Iterator[Metric]:
        service, status = self._service, self._service.store.status()
        yield from _store(service, status)
        yield from _service(service)
        yield from _bounds(service)
        for part in service.parts():
            yield from part.families()


def _store(service: Service, status: dict[str, Any]) -> Iterator[Metric]:
    models: Documents = status["models"]
    yield from health_metrics.problems(models, [*(Problem(**one) for one in status["problems"]), *service.problems()])
    yield from health_metrics.disk(status)
    yield from health_metrics.memory(status, service)
    yield from _tables(models)
    yield from _models(models)
    yield from _requests(service.inference_stats, models)
    yield from _dense(models, KEPT_BYTES)
    for what in ("host", "device", "overlay"):
        if budget := status.get(f"{what}_budget"):
            yield gauge(f"tierstore_{what}_used_bytes", f"Bytes of the {what} budget in use.", budget["used"])
            yield gauge(f"tierstore_{what}_budget_bytes", f"The {what} budget of the whole store.", budget["total"])
    yield from device_families(status.get("device") or {})
    if cache := status.get("ssd_cache"):
        yield from ssd_cache_families(cache, models)


def _tables_of(models: Documents) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(model, table, its part of the status)."""
    for model, document in models.items():
        for table, entry in document["tables"].items():
            yield model, table, entry


def ssd_cache_families(cache: dict[str, Any], models: Documents) -> Iterator[Metric]:
    is_on = float(cache["problem"] is None)
    yield gauge("tierstore_ssd_cache_on", "1; 0 once a disk that failed or was full has switched it off.", is_on)
    for name, text, key in (
        ("used_bytes", "Bytes of the cache on SSD in use.", "used"),
        ("budget_bytes", "The budget of the cache on SSD.", "total"),
        ("waiting_bytes", "Bytes of rows that wait to be written to the SSD.", "waiting_bytes"),
        ("waiting_limit_bytes", "Bytes that may wait; rows beyond that are not written.", "waiting_limit"),
    ):
        yield gauge(f"tierstore_ssd_cache_{name}", text, cache[key])
    dropped = cache["dropped_rows"]
    yield counter("tierstore_ssd_cache_dropped_rows", "Rows not written because too many waited.", dropped)
    for kind, name, text, key in (
        (gauges, "rows", "Rows of the active version on SSD.", "rows"),
        (gauges, "index_bytes", "Bytes of memory of the index of the rows on SSD.", "index_bytes"),
        (counters, "hits", "Keys that memory lacked and the SSD had, of the active version.", "hits"),
        (counters, "misses", "Keys that neither memory nor the SSD had.", "misses"),
        (counters, "evicted_rows", "Rows on SSD that were evicted for others.", "evicted"),
    ):
        found = (
            ((model, table), stats[key]) for model, table, entry in _tables_of(models) if (stats := entry["ssd_cache"])
        )
        yield kind(f"tierstore_ssd_cache_{name}", text, "model table", found)


def device_families(device: dict[str, Any]) -> Iterator[Metric]:
    yield gauge("tierstore_device_present", "Whether there is a device tier.", float(bool(device.get("present"))))
    if not device.get("present"):
        return
    for name, text in (
        ("promotions_waiting", "Keys offered to the device tier that wait for their thread."),
        ("promotions_limit", "Keys that may wait; those beyond are dropped."),
        ("workspaces_taken", "Workspaces on devices that are in use."),
        ("workspaces", "Workspaces that exist; a look-up that finds none free waits."),
        ("workspace_bytes", "Bytes of device memory in workspaces."),
    ):
        yield gauge(f"tierstore_device_{name}", text, device[name])
    dropped = device["promotions_dropped"]
    yield counter(
        "tierstore_device_promotions_dropped",
        "Keys dropped because there was no room, or another look-up was offering.",
        dropped,
    )
    yield counter(
        "tierstore_device_failed_in_streams",
        "Look-ups in a stream of the caller's that could not read rows, which are NaN.",
        device["failed_in_streams"],
    )


def _tables(models: Documents) -> Iterator[Metric]:
    def by_tier(kind: str) -> Iterator[tuple[Key, float]]:
        for model, table, entry in _tables_of(models):
            beside = ((models[model].get("canary") or {}).get("tables") or {}).get(table, {}).get(kind, {})
            for tier, value in entry[kind].items():
                yield (model, table, tier), value + beside.get(tier, 0)

    def by_table(value_of: Callable[[dict[str, Any]], float | None]) -> Iterator[tuple[Key, float]]:
        for model, table, entry in _tables_of(models):
            if (value := value_of(entry)) is not None:
                yield (model, table), value

    def expired(entry: dict[str, Any]) -> float | None:
        ttl = entry.get("ttl")
        return ttl["expired_at_load"] + ttl["expired_since"] if ttl else None

    tier = "model table tier"
    text = "Keys looked up since the start, of all versions, by the tier that answered; `absent`: there is no row."
    yield counters("tierstore_lookup_keys", text, tier, by_tier("lookup_keys"))
    text = "Bytes that a table holds in a tier, in all versions that are served."
    yield gauges("tierstore_tier_bytes", text, tier, by_tier("tier_bytes"))
    text = "Bytes that a table may hold in a tier, in all versions that are served."
    yield gauges("tierstore_tier_budget_bytes", text, tier, by_tier("tier_budget_bytes"))
    text = "Rows of a table, deltas included; an estimate after many keys changed at once."
    yield gauges("tierstore_table_rows", text, "model table", by_table(lambda entry: entry["rows"]))
    text = "Rows older than the table's ttl that the active version lacks, left out by its load or deleted since."
    yield gauges("tierstore_expired_rows", text, "model table", by_table(expired))
    curve: list[tuple[Key, float]] = [  # of tables with cache trials, once those have results
        ((model, table, f"{point['scale']:g}"), point["hit_rate"])
        for model, table, entry in _tables_of(models)
        for point in entry.get("cache", {}).get("curve", ())
        if point["hit_rate"] is not None
    ]
    text = (
        "Share of the keys looked up that memory would answer, by a multiple of the present memory; estimated "
        "from sampled look-ups."
    )
    yield gauges("tierstore_cache_hit_rate_at", text, "model table memory", curve)


def _dense(models: Documents, limit_bytes: int) -> Iterator[Metric]:
    heads = {
        name: stats for model, document in models.items() for name, stats in health_metrics.named_heads(model, document)
    }
    for kind, name, text, key in (
        (counters, "runs", "Runs of dense parts, warm-up included.", "runs"),
        (counters, "failed_runs", "Runs of dense parts that failed.", "failed"),
        (counters, "seconds", "Seconds of dense parts within ONNX Runtime.", "seconds"),
        (gauges, "buffer_bytes", "Bytes of row buffers that the dense part keeps for reuse.", "buffer_bytes"),
    ):
        yield kind(f"tierstore_dense_{name}", text, "model", {each: stats[key] for each, stats in heads.items()})
    yield gauge("tierstore_dense_buffer_limit_bytes", "Bytes of row buffers that a dense part may keep.", limit_bytes)


def _models(models: Documents) -> Iterator[Metric]:
    def each(name: str, text: str, value_of: Callable[[dict[str, Any], dict[str, Any]], float | None]) -> Metric:
        values = {model: value_of(document, document.get("canary") or {}) for model, document in models.items()}
        return gauges(name, text, "model", {model: value for model, value in values.items() if value is not None})

    text = "The seq up to which the active version holds every delta that is meant for it."
    yield each("tierstore_delta_watermark", text, lambda document, _: document["watermark"])
    text = (
        "Seconds since the event time of the newest delta that the active version shows; of its snapshot where "
        "there is none."
    )
    yield each("tierstore_delta_age_seconds", text, lambda document, _: document.get("delta_age_s"))
    text = "The version that answers; 0 for none."
    yield each("tierstore_active_version", text, lambda document, _: document["active_version"] or 0)
    text = "The version that is the canary; 0 for none."
    yield each("tierstore_canary_version", text, lambda _, canary: canary.get("version", 0))
    text = "The canary's share of the requests that name no version."
    yield each("tierstore_canary_share", text, lambda _, canary: canary.get("share", 0.0))
    text = "Bytes of deltas that are visible but not folded yet."
    yield each(
        "tierstore_overlay_bytes", text, lambda *both: sum(document.get("overlay_bytes", 0) for document in both)
    )
    states: list[tuple[Key, float]] = [
        ((model, state), [version["state"] for version in document["versions"]].count(state))
        for model, document in models.items()
        for state in _STATES
    ]
    yield gauges("tierstore_versions", "Versions by state.", "model state", states)
    stats: list[tuple[Key, float]] = [
        ((model, stat), value)
        for model, document in models.items()
        for stat, value in document.get("disk", {}).items()
        if isinstance(value, (int, float))
    ]
    yield gauges("tierstore_disk_stat", "Statistics of the active version's disk tier.", "model stat", stats)


def _requests(stats: InferenceStats, models: Documents) -> Iterator[Metric]:
    """Look-ups by the version that answered; only of existing versions, so that no series outlives its version."""
    there = {
        (head_name(name, head), entry["version"])
        for name, document in models.items()
        for entry in document["versions"]
        for head in ("", *entry.get("heads", ()))
    } | {(name, NO_VERSION) for name in models}
    found = [
        ((model, str(version)), counts) for model, version, counts in stats.by_version() if (model, version) in there
    ]
    outcomes: list[tuple[Key, float]] = [
        ((*key, outcome), n) for key, counts in found for outcome, n in counts.outcomes.copy().items()
    ]
    text = "Look-ups, by the version that answered them; 0: those that found no served version."
    yield counters("tierstore_model_requests", text, "model version outcome", outcomes)
    text = "Seconds of look-ups that were answered, by the version that answered them."
    seconds = [(key, counts.seconds) for key, counts in found if key[1] != str(NO_VERSION)]
    yield histograms("tierstore_model_request_seconds", text, "model version", seconds)


def _service(service: Service) -> Iterator[Metric]:
    text = "Seconds from a request's first line to its answer."
    times = service.request_times.histograms.copy()
    yield histograms("tierstore_request_seconds", text, "protocol outcome", times)
    text = "Seconds from a delta's newest training event to its being visible."
    yield histograms("tierstore_delta_freshness_seconds", text, "model", service.freshness.histograms.copy())
    predicts = service.inference_stats.predicts()
    text = "Requests that the dense part answered."
    yield counters("tierstore_predicts", text, "model", {model: times.count for model, times in predicts.items()})
    text = (
        "Seconds of these requests: in total, waiting for a thread, in look-ups, in ONNX Runtime. What remains is "
        "the service's own."
    )
    parts: list[tuple[Key, float]] = [
        ((model, part), ns / 1e9)
        for model, of in predicts.items()
        for part, ns in (
            ("total", of.total_ns),
            ("queue", of.queued_ns),
            ("lookup", of.lookup_ns),
            ("dense", of.dense_ns),
        )
    ]
    yield counters("tierstore_predict_seconds", text, "model part", parts)
    text = "1 while the service is ready, 0 while it drains or is not warm enough."
    yield gauge("tierstore_ready", text, float(service.ready))
    text = "Share of the keys that were hot before the start that has been read into memory."
    yield gauge("tierstore_warm_share", text, service.store.warm_share())
    throttle = service.store.throttle()
    text = "Share of the time that loads, verification and warming may be at work beside look-ups."
    yield gauge("tierstore_background_share", text, throttle["share"])
    for name, about in (("p99", "in the last measurement"), ("quiet_p99", "while no background work ran")):
        measured: list[tuple[Key, float]] = [] if (seconds := throttle[f"{name}_s"]) is None else [((), seconds)]
        yield gauges(f"tierstore_lookup_{name}_seconds", f"p99 of look-ups {about}.", "", measured)
    yield from health_metrics.ends(service)
    yield from health_metrics.loads(service)
    yield from health_metrics.releases()
    yield from service.shed.families()
    batches = service.batches
    yield histograms("tierstore_batch_requests", "Predict requests of a batch.", "", [((), batches.requests)])
    yield histograms("tierstore_batch_items", "Items of a batch.", "", [((), batches.items)])
    yield counter("tierstore_batch_apart", "Requests whose batch could not run as one.", batches.apart)


def _bounds(service: Service) -> Iterator[Metric]:
    """The fill and the limit of every queue and buffer of the service."""
    for pool in (
        service.lookup_pool, service.admin_pool, service.switch_pool, service.status_pool, service.explain_pool,
    ):  # fmt: skip
        what, name = f"tierstore_{pool.name}", pool.name
        yield gauge(f"{what}_threads_busy", f"Threads of the {name} pool at work.", pool.busy)
        yield gauge(f"{what}_threads", f"Threads of the {name} pool.", pool.threads)
        yield gauge(f"{what}_queue_depth", f"Calls that wait for a thread of the {name} pool.", pool.waiting)
        yield gauge(f"{what}_queue_limit", f"Calls that may wait for a thread of the {name} pool.", pool.queue_limit)
        yield counter(f"{what}_rejected", f"Calls refused because the {name} queue was full.", pool.rejected)
    for budget, name in ((service.inflight, "inflight"), (service.delta_bytes, "delta_inflight")):
        what, of = f"tierstore_{name}", budget.name
        yield gauge(f"{what}_bytes", f"Bytes of {of} in progress.", budget.used_bytes)
        yield gauge(f"{what}_limit_bytes", f"Bytes of {of} that may be in progress.", budget.limit_bytes)
        yield counter(f"{what}_rejected", f"Requests refused because {of} had reached that limit.", budget.rejected)
    yield gauge("tierstore_signatures", "Signatures of versions that are kept.", len(service.signatures))
    yield gauge("tierstore_signatures_limit", "Signatures that may be kept.", MAX_SIGNATURES)
    yield gauge("tierstore_shared_memory_regions", "Regions of clients that are registered.", len(service.regions))
    yield gauge("tierstore_shared_memory_regions_limit", "Regions that may be registered.", MAX_REGIONS)
    yield gauge("tierstore_jobs", "Loads, exports and backups that run or wait.", service.jobs.waiting)
    yield gauge("tierstore_jobs_limit", "Loads, exports and backups that may run or wait.", service.jobs.limit)
