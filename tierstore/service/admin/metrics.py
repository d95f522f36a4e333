"""`GET /metrics`: the store's status and the service's stats as Prometheus families.

`Exposition.text` runs on a thread of the admin pool; it reads counters that others write, without stopping them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tierstore.engine.operations.problems import Problem
from tierstore.predict.session import KEPT_BYTES
from tierstore.service.admin import health_metrics
from tierstore.service.context import Service
from tierstore.service.dataplane.plan_cache import MOST_CACHED
from tierstore.service.oip.shared_memory import MAX_REGIONS
from tierstore.service.stats import InferenceStats
from tierstore.service.tfserving.signature import MAX_SIGNATURES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("active", "canary", "kept", "stale", "outdated", "loading")


class Exposition:
    """Has a registry of its own, so that a program which embeds the service keeps its metrics apart."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_StoreCollector(service))
        self._registry.register(_ServiceCollector(service))
        for kind in (ProcessCollector, PlatformCollector, GCCollector):
            kind(registry=self._registry)

    def text(self) -> bytes:
        """The exposition format."""
        self._service.refresh()
        return generate_latest(self._registry)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


class _StoreCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []  # else the registry would collect once at registration

    def collect(self) -> Iterator[Metric]:
        status = self._service.store.status()
        found = [*(Problem(**one) for one in status["problems"]), *self._service.problems()]
        yield from health_metrics.problems(status["models"], found)
        yield from health_metrics.disk(status)
        yield from health_metrics.memory(status, self._service)
        yield from _tables(status["models"])
        yield from _models(status["models"])
        yield from _requests(self._service.inference_stats, status["models"])
        yield from _dense(status["models"], KEPT_BYTES)
        for what in ("host", "device", "overlay"):
            budget = status.get(f"{what}_budget")
            if budget:
                yield _gauge(f"tierstore_{what}_used_bytes", f"Bytes of the {what} budget in use.", budget["used"])
                yield _gauge(
                    f"tierstore_{what}_budget_bytes", f"The {what} budget of the whole store.", budget["total"]
                )
        yield from _device(status.get("device") or {})
        if cache := status.get("ssd_cache"):
            yield from _ssd_cache(cache, status["models"])


def _ssd_cache(cache: dict[str, Any], models: dict[str, Any]) -> Iterator[Metric]:
    yield _gauge(
        "tierstore_ssd_cache_on",
        "0 once a disk that failed or was full has switched it off.",
        float(cache["problem"] is None),
    )
    yield _gauge("tierstore_ssd_cache_used_bytes", "Bytes of the cache on SSD in use.", cache["used"])
    yield _gauge("tierstore_ssd_cache_budget_bytes", "The budget of the cache on SSD.", cache["total"])
    yield _gauge(
        "tierstore_ssd_cache_waiting_bytes", "Bytes of rows that wait to be written to it.", cache["waiting_bytes"]
    )
    yield _gauge(
        "tierstore_ssd_cache_waiting_limit_bytes",
        "Bytes that may wait; rows beyond are not let in.",
        cache["waiting_limit"],
    )
    yield CounterMetricFamily(
        "tierstore_ssd_cache_dropped_rows", "Rows not let in as too many waited.", value=cache["dropped_rows"]
    )
    labels = ["model", "table"]
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
        "rows": GaugeMetricFamily("tierstore_ssd_cache_rows", "Rows of the active version on SSD.", labels=labels),
        "index_bytes": GaugeMetricFamily(
            "tierstore_ssd_cache_index_bytes", "Bytes of memory that say where they are.", labels=labels
        ),
        "hits": CounterMetricFamily(
            "tierstore_ssd_cache_hits", "Keys that memory lacked and the SSD had, of the active version.", labels=labels
        ),
        "misses": CounterMetricFamily("tierstore_ssd_cache_misses", "Keys that neither had.", labels=labels),
        "evicted": CounterMetricFamily(
            "tierstore_ssd_cache_evicted_rows", "Rows that made room for others.", labels=labels
        ),
    }
    for model, document in models.items():
        for table, entry in document["tables"].items():
            if stats := entry["ssd_cache"]:
                for name, family in families.items():
                    family.add_metric([model, table], stats[name])
    yield from families.values()


def _device(device: dict[str, Any]) -> Iterator[Metric]:
    yield _gauge("tierstore_device_present", "Whether there is a device tier.", float(bool(device.get("present"))))
    if not device.get("present"):
        return
    for name, text in (
        ("promotions_waiting", "Offers of keys to the device tier that wait for their thread."),
        ("promotions_limit", "Offers that may wait; beyond it they are dropped."),
        ("workspaces_taken", "Workspaces on devices that are in use."),
        ("workspaces", "Workspaces there are; who finds none free waits."),
        ("workspace_bytes", "Bytes of device memory that workspaces take."),
    ):
        yield _gauge(f"tierstore_device_{name}", text, device[name])
    yield CounterMetricFamily(
        "tierstore_device_promotions_dropped",
        "Offers dropped as the queue was full.",
        value=device["promotions_dropped"],
    )


def _tables(models: dict[str, Any]) -> Iterator[Metric]:
    keys = CounterMetricFamily(
        "tierstore_lookup_keys", "Keys looked up, by the tier that answered.", labels=["model", "table", "tier"]
    )
    held = GaugeMetricFamily(
        "tierstore_tier_bytes",
        "Bytes that a table holds in a tier, in all versions that are served.",
        labels=["model", "table", "tier"],
    )
    budget = GaugeMetricFamily(
        "tierstore_tier_budget_bytes",
        "Bytes that a table may hold in a tier, in all versions that are served.",
        labels=["model", "table", "tier"],
    )
    rows = GaugeMetricFamily(
        "tierstore_table_rows",
        "Rows of a table, deltas included; where many keys changed at once an estimate.",
        labels=["model", "table"],
    )
    expired = GaugeMetricFamily(
        "tierstore_expired_rows",
        "Rows older than the table's ttl that the active version lacks, since its load and at it.",
        labels=["model", "table"],
    )
    for model, document in models.items():
        for table, entry in document["tables"].items():
            rows.add_metric([model, table], entry["rows"])
            if ttl := entry.get("ttl"):
                expired.add_metric([model, table], ttl["expired_at_load"] + ttl["expired_since"])
            beside = ((document.get("canary") or {}).get("tables") or {}).get(table, {})
            for family, kind in ((keys, "lookup_keys"), (held, "tier_bytes"), (budget, "tier_budget_bytes")):
                for tier, value in entry[kind].items():
                    family.add_metric([model, table, tier], value + beside.get(kind, {}).get(tier, 0))
    yield from (keys, held, budget, rows, expired)
    yield from _caches(models)


def _caches(models: dict[str, Any]) -> Iterator[Metric]:
    """Of tables that a cache is tried for, and only as soon as that says something."""
    at = GaugeMetricFamily(
        "tierstore_cache_hit_rate_at",
        "Share of the keys looked up that memory would answer, as trials with sampled look-ups have it, by how many times the memory.",
        labels=["model", "table", "memory"],
    )
    for model, document in models.items():
        for table, entry in document["tables"].items():
            for point in entry.get("cache", {}).get("curve", ()):
                if point["hit_rate"] is not None:
                    at.add_metric([model, table, f"{point['scale']:g}"], point["hit_rate"])
    yield at


def _dense(models: dict[str, Any], limit_bytes: int) -> Iterator[Metric]:
    runs = CounterMetricFamily("tierstore_dense_runs", "Runs of dense parts, warm-up included.", labels=["model"])
    failed = CounterMetricFamily("tierstore_dense_failed_runs", "Runs that failed.", labels=["model"])
    seconds = CounterMetricFamily("tierstore_dense_seconds", "Seconds within ONNX Runtime.", labels=["model"])
    held = GaugeMetricFamily(
        "tierstore_dense_buffer_bytes", "Bytes of row buffers that the dense part keeps for reuse.", labels=["model"]
    )
    for model, document in models.items():
        if stats := document.get("dense"):
            for family, name in ((runs, "runs"), (failed, "failed"), (seconds, "seconds"), (held, "buffer_bytes")):
                family.add_metric([model], stats[name])
    yield from (runs, failed, seconds, held)
    yield _gauge("tierstore_dense_buffer_limit_bytes", "Bytes of row buffers that a dense part may keep.", limit_bytes)


def _models(models: dict[str, Any]) -> Iterator[Metric]:
    watermark = GaugeMetricFamily(
        "tierstore_delta_watermark",
        "The seq up to which the active version holds every delta that is meant for it.",
        labels=["model"],
    )
    age = GaugeMetricFamily(
        "tierstore_delta_age_seconds",
        "Seconds since the event time of the newest delta that the active version shows; of its snapshot where there is none.",
        labels=["model"],
    )
    active = GaugeMetricFamily("tierstore_active_version", "The version that answers; 0 for none.", labels=["model"])
    canary = GaugeMetricFamily(
        "tierstore_canary_version", "The version that is the canary; 0 for none.", labels=["model"]
    )
    share = GaugeMetricFamily(
        "tierstore_canary_share", "The canary's share of the requests that name no version.", labels=["model"]
    )
    versions = GaugeMetricFamily("tierstore_versions", "Versions by state.", labels=["model", "state"])
    overlay = GaugeMetricFamily(
        "tierstore_overlay_bytes", "Bytes of deltas that are visible but not folded yet.", labels=["model"]
    )
    disk = GaugeMetricFamily(
        "tierstore_disk_stat", "Figures of the active version's disk tier.", labels=["model", "stat"]
    )
    for model, document in models.items():
        if document["watermark"] is not None:
            watermark.add_metric([model], document["watermark"])
        if document.get("delta_age_s") is not None:
            age.add_metric([model], document["delta_age_s"])
        active.add_metric([model], document["active_version"] or 0)
        beside = document.get("canary") or {}
        canary.add_metric([model], beside.get("version", 0))
        share.add_metric([model], beside.get("share", 0.0))
        states = [version["state"] for version in document["versions"]]
        for state in _STATES:
            versions.add_metric([model, state], states.count(state))
        overlay.add_metric([model], document.get("overlay_bytes", 0) + beside.get("overlay_bytes", 0))
        for stat, value in document.get("disk", {}).items():
            if isinstance(value, (int, float)):
                disk.add_metric([model, stat], value)
    yield from (watermark, age, active, canary, share, versions, overlay, disk)


def _requests(stats: InferenceStats, models: dict[str, Any]) -> Iterator[Metric]:
    """Look-ups by the version that answered; only of existing versions, so that no series outlives its version."""
    requests = CounterMetricFamily(
        "tierstore_model_requests",
        "Look-ups, by the version that answered them.",
        labels=["model", "version", "outcome"],
    )
    seconds = HistogramMetricFamily(
        "tierstore_model_request_seconds",
        "Seconds of look-ups that were answered, by the version that answered them.",
        labels=["model", "version"],
    )
    there = {(name, entry["version"]) for name, document in models.items() for entry in document["versions"]}
    for model, version, counts in stats.by_version():
        if (model, version) not in there:
            continue
        for outcome, n in counts.outcomes.copy().items():
            requests.add_metric([model, str(version), outcome], n)
        seconds.add_metric([model, str(version)], counts.seconds.buckets(), counts.seconds.total)
    yield from (requests, seconds)


def _predictions(service: Service) -> Iterator[Metric]:
    count = CounterMetricFamily(
        "tierstore_predicts", "Requests answered by the dense part, rows looked up for it.", labels=["model"]
    )
    seconds = CounterMetricFamily(
        "tierstore_predict_seconds",
        "Their seconds: in all, waiting for a thread, in look-ups, and in ONNX Runtime. The rest is the service's own.",
        labels=["model", "part"],
    )
    for model, times in service.inference_stats.predicts().items():
        count.add_metric([model], times.count)
        parts = {"total": times.total_ns, "queue": times.queued_ns, "lookup": times.lookup_ns, "dense": times.dense_ns}
        for part, ns in parts.items():
            seconds.add_metric([model, part], ns / 1e9)
    yield from (count, seconds)


class _ServiceCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        service = self._service
        times = HistogramMetricFamily(
            "tierstore_request_seconds",
            "Seconds from a request's first line to its answer.",
            labels=["protocol", "outcome"],
        )
        for labels, histogram in list(service.request_times.histograms.items()):
            times.add_metric(list(labels), histogram.buckets(), histogram.total)
        fresh = HistogramMetricFamily(
            "tierstore_delta_freshness_seconds",
            "Seconds from a delta's newest training event to its being visible.",
            labels=["model"],
        )
        for model, histogram in list(service.freshness.histograms.items()):
            fresh.add_metric([model], histogram.buckets(), histogram.total)
        yield from (times, fresh)
        yield from _predictions(service)
        yield _gauge(
            "tierstore_ready",
            "1 while the service is ready, 0 while it drains or is not warm enough.",
            float(service.ready),
        )
        yield _gauge(
            "tierstore_warm_share",
            "Share of the keys that were hot before the start that has been read into memory.",
            service.store.warm_share(),
        )
        throttle = service.store.throttle()
        yield _gauge(
            "tierstore_background_share",
            "Share of the time that loads, verification and warming may be at work beside look-ups.",
            throttle["share"],
        )
        for name, about in (("p99", "as measured last"), ("quiet_p99", "when no such work was done")):
            if throttle[f"{name}_s"] is not None:
                yield _gauge(
                    f"tierstore_lookup_{name}_seconds", f"99% of look-ups took less, {about}.", throttle[f"{name}_s"]
                )
        yield from health_metrics.ends(service)
        yield from health_metrics.loads(service)
        yield from health_metrics.releases()
        yield from service.shed.families()
        yield from service.batches.families()
        yield from self._bounds()
        for part in service.parts():
            yield from part.families()

    def _bounds(self) -> Iterator[Metric]:
        """How full every queue and buffer of the service is, and how much it may hold."""
        service = self._service
        pools = (
            service.lookup_pool,
            service.admin_pool,
            service.switch_pool,
            service.status_pool,
            service.explain_pool,
        )
        for pool in pools:
            yield _gauge(f"tierstore_{pool.name}_threads_busy", f"Threads of the {pool.name} pool at work.", pool.busy)
            yield _gauge(f"tierstore_{pool.name}_threads", f"Threads of the {pool.name} pool.", pool.threads)
            yield _gauge(
                f"tierstore_{pool.name}_queue_depth", f"Calls that wait for a {pool.name} thread.", pool.waiting
            )
            yield _gauge(
                f"tierstore_{pool.name}_queue_limit", f"Calls that may wait for a {pool.name} thread.", pool.queue_limit
            )
            yield CounterMetricFamily(
                f"tierstore_{pool.name}_rejected",
                f"Calls refused as the {pool.name} queue was full.",
                value=pool.rejected,
            )
        for budget, name in ((service.inflight, "inflight"), (service.delta_bytes, "delta_inflight")):
            yield _gauge(f"tierstore_{name}_bytes", f"Bytes of {budget.name} in progress.", budget.used_bytes)
            yield _gauge(
                f"tierstore_{name}_limit_bytes", f"Bytes of {budget.name} that may be in progress.", budget.limit_bytes
            )
            yield CounterMetricFamily(
                f"tierstore_{name}_rejected",
                f"Requests refused as that bound on {budget.name} was reached.",
                value=budget.rejected,
            )
        yield _gauge("tierstore_known_requests", "Request headers kept parsed and planned.", len(service.plan_cache))
        yield _gauge("tierstore_signatures", "Signatures of versions that are kept.", len(service.signatures))
        yield _gauge("tierstore_signatures_limit", "Signatures that may be kept.", MAX_SIGNATURES)
        yield _gauge("tierstore_known_requests_limit", "Request headers that may be kept.", MOST_CACHED)
        yield _gauge("tierstore_shared_memory_regions", "Regions of clients that are registered.", len(service.regions))
        yield _gauge("tierstore_shared_memory_regions_limit", "Regions that may be registered.", MAX_REGIONS)
        yield _gauge("tierstore_jobs", "Loads, exports and backups that run or wait.", service.jobs.waiting)
        yield _gauge("tierstore_jobs_limit", "Loads, exports and backups that may run or wait.", service.jobs.limit)
