"""Compares a plan with a running service: what it says of a table as it is served now, and what the service measured.

Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tierstore.sizing.plan import HOST_ROW_BYTES, KEY_CPU_S, READ_CPU_S, REQUEST_CPU_S, Load, bytes_of
from tierstore.sizing.reuse import Reuse, hit_rate


@dataclass(frozen=True, slots=True)
class ServedTraffic:
    """What a service counted between two looks: over all of its models `cpu_s` and `requests`, and of
    all tables the keys by tier.
    """

    seconds: float
    cpu_s: float
    requests: float
    keys: Mapping[str, float]

    @classmethod
    def between(cls, before: str, after: str, seconds: float) -> ServedTraffic:
        """What was served between two texts of `/metrics`."""
        cpu_s, requests, keys = _counts(before)
        cpu_later_s, requests_later, keys_later = _counts(after)
        by_tier = {tier: count - keys.get(tier, 0.0) for tier, count in keys_later.items()}
        return cls(seconds, cpu_later_s - cpu_s, requests_later - requests, by_tier)


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure; None where there is none.

    `unit`: of the figure: `%` (as a share), `µs` (in seconds), `bytes`, or nothing.
    """

    what: str
    unit: str
    planned: float | None
    measured: float | None

    def shown(self, value: float | None) -> str:
        if value is None:
            return "–"
        return _SHOWN[self.unit](value)


_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_TIER = re.compile(r'tier="(\w+)"')
_SHOWN: Mapping[str, Callable[[float], str]] = {
    "%": lambda value: f"{100 * value:.1f}%",
    "µs": lambda value: f"{1e6 * value:,.1f} µs",
    "bytes": lambda value: f"{value:,.1f} bytes",
    "": lambda value: f"{value:,.0f}",
}


def _counts(metrics: str) -> tuple[float, float, dict[str, float]]:
    """(processor time, requests for rows and predictions that were answered, keys by tier)."""
    cpu_s = requests = 0.0
    keys: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(metrics):
        if name == "process_cpu_seconds_total":
            cpu_s = float(value)
        elif (
            name == "tierstore_request_seconds_count" and 'outcome="ok"' in labels and 'protocol="admin"' not in labels
        ):
            requests += float(value)
        elif name == "tierstore_lookup_keys_total" and (tier := _TIER.search(labels)) is not None:
            keys[tier[1]] = keys.get(tier[1], 0.0) + float(value)
    return cpu_s, requests, keys


def compare(load: Load, entry: Mapping[str, Any], traffic: ServedTraffic, assumed: Reuse) -> list[Compared]:
    """`load`: the table as it is served. `entry`: what the status says of it.

    `assumed`: what is taken of look-ups where nothing is measured.
    """
    rows = max(1.0, float(entry["rows"]))
    counts: Mapping[str, float] = entry["lookup_keys"]
    total = sum(counts.values())
    cached = float((entry.get("host") or {}).get("rows", 0))
    host_bytes = float(entry["tier_bytes"]["host"])
    keys = sum(traffic.keys.values())
    requests = traffic.requests
    per_request = keys / requests if requests else None
    disk = traffic.keys.get("disk", 0.0) / requests if requests else 0.0
    planned_cpu = None if per_request is None else REQUEST_CPU_S + per_request * KEY_CPU_S + disk * READ_CPU_S
    # keys that exist nowhere are answered from memory too, once that is remembered
    in_memory = sum(counts.get(tier, 0.0) for tier in ("overlay", "device", "host", "absent"))
    return [
        Compared("hit rate", "%", hit_rate(load.reuse, min(cached, rows), rows), in_memory / total if total else None),
        Compared(
            f"hit rate, {assumed.name}",
            "%",
            hit_rate(assumed, min(cached, rows), rows),
            in_memory / total if total else None,
        ),
        Compared(
            "memory of a row in memory",
            "bytes",
            load.row_bytes + HOST_ROW_BYTES,
            host_bytes / cached if cached else None,
        ),
        Compared(
            "disk of a row",
            "bytes",
            (bytes_of(load).version + bytes_of(load).changed) / rows,
            float(entry["tier_bytes"]["disk"]) / rows,
        ),
        Compared("processor of a request", "µs", planned_cpu, traffic.cpu_s / requests if requests else None),
        Compared("requests a second", "", load.qps or None, requests / traffic.seconds),
        Compared("keys of a request", "", load.keys if load.qps else None, per_request),
    ]
