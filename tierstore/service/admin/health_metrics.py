"""Metrics for alerts, as Prometheus families: problems by kind, expiring credentials, disk, memory by part,
versions.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import InfoMetricFamily, Metric

from tierstore import __version__
from tierstore.engine.operations.problems import MODEL_KINDS, STORE_KINDS, Problem
from tierstore.machine import memory_bytes
from tierstore.service.context import SERVICE_KINDS, Service
from tierstore.service.families import counters, gauge, gauges
from tierstore.types import head_name

_PAGE_BYTES = resource.getpagesize()


def problems(models: Iterable[str], found: Iterable[Problem]) -> Iterator[Metric]:
    """1 for each existing problem, 0 for each other known kind."""
    there = {(problem.model, problem.kind) for problem in found}
    possible = {("", kind) for kind in (*STORE_KINDS, *SERVICE_KINDS)}
    possible |= {(model, kind) for model in models for kind in (*MODEL_KINDS, "load_failed")}
    text = "1 while there is a problem of this kind. The status describes it; docs/runbook.md has a part for each kind."
    samples = [(one, float(one in there)) for one in sorted(possible | there)]
    yield gauges("tierstore_problem", text, "model kind", samples)


def ends(service: Service) -> Iterator[Metric]:
    """When credentials expire, on the wall clock."""
    found = {}
    if service.tls is not None:
        found["certificate"] = service.tls.ends_s
    if (end := service.access.tokens.next_end) is not None:
        found["token"] = end.timestamp()
    text = "When the certificate of the service expires, and when the next of its tokens does."
    yield gauges("tierstore_credential_ends_timestamp_seconds", text, "kind", found)


def disk(status: dict[str, Any]) -> Iterator[Metric]:
    """Metrics of the file system of the data directory, and of the logs there."""
    room = status["disk"]
    if room["free"] is not None:
        yield gauge("tierstore_disk_free_bytes", "Bytes that are free for the data directory.", room["free"])
    yield gauge("tierstore_disk_reserve_bytes", "Bytes that are kept free; deltas are refused below.", room["reserve"])
    entries = {model: document["log"]["entries"] for model, document in status["models"].items()}
    yield gauges("tierstore_log_entries", "Deltas that the log holds.", "model", entries)


def memory(status: dict[str, Any], service: Service) -> Iterator[Metric]:
    """The parts of the process's resident memory. `other`: the interpreter, code, threads, and everything uncounted."""
    disks = [document.get("disk", {}) for document in status["models"].values()]
    cache = status.get("ssd_cache") or {}
    parts = {
        "host_cache": status["host_budget"]["used"],
        "cache_samples": sum(
            table.get("cache", {}).get("bytes", 0)
            for document in status["models"].values()
            for table in document["tables"].values()
        ),
        "overlays": status["overlay_budget"]["used"],
        "block_index": sum(one.get("base_index_memory_bytes", 0) for one in disks),
        "filters": sum(one.get("changed_filter_memory_bytes", 0) + one.get("patch_memory_bytes", 0) for one in disks),
        "rocksdb": sum(one.get("index_bytes", 0) + one.get("block_cache_bytes", 0) for one in disks),
        "ssd_cache": cache.get("waiting_bytes", 0),
        "dense_buffers": sum(stats["buffer_bytes"] for name, document in status["models"].items()
        for _, stats in named_heads(name, document)),
        "history": service.history.nbytes,
        "requests": service.inflight.used_bytes + service.delta_bytes.used_bytes,
    }  # fmt: skip
    parts["other"] = max(0, resident_bytes() - sum(parts.values()))
    text = "Bytes of memory by purpose; `other` is what the process uses beyond the named parts."
    yield gauges("tierstore_memory_bytes", text, "part", parts)
    text = "Bytes of memory that the machine or the container has."
    yield gauge("tierstore_memory_limit_bytes", text, memory_bytes())


def releases() -> Iterator[Metric]:
    """The running release."""
    yield InfoMetricFamily("tierstore_build", "The release that runs.", value={"version": __version__})


def loads(service: Service) -> Iterator[Metric]:
    """How loads and exports ended."""
    ended = sorted(service.jobs.ended.copy().items())
    yield counters("tierstore_jobs_ended", "Loads and exports that have ended, by how.", "kind state", ended)


def resident_bytes() -> int:
    """Memory of this process that is not swapped out; 0 if the system does not report it."""
    try:
        return int(Path(f"/proc/{os.getpid()}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError):
        return 0


def named_heads(model: str, document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The figures of the dense parts in a model's status, by the names under which they are served."""
    own: Mapping[str, Any] | None = document.get("dense")
    heads = {head_name(model, head): stats for head, stats in document.get("heads", {}).items()}
    return [*([] if own is None else [(model, own)]), *heads.items()]
