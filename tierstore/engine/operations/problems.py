"""The problems of a store, by kind: its status as a list for alerts. docs/runbook.md has a part for each kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# of a model, as in `Model.problems`, and of its nodes
MODEL_KINDS = (
    "not_serving", "log_damaged", "canary_not_served", "partitions", "background_work", "not_fresh", "version_damaged",
    "dense_passed_over", "cluster", "upstream",
)  # fmt: skip
STORE_KINDS = ("disk_full", "audit", "ssd_cache", "device", "cluster", "upstream")  # of the whole store


class Problem(NamedTuple):
    """A problem. `model` is empty if it is not a model's."""

    model: str
    kind: str
    text: str


def problems_of(status: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems in a store's status document."""
    for name, document in status["models"].items():
        for kind, text in document["problems"].items():
            yield Problem(name, kind, text)
        unusable = {**document["damaged"], **{one["version"]: one.get("problem") for one in document["versions"]}}
        if why := "; ".join(f"version {number}: {text}" for number, text in unusable.items() if text):
            yield Problem(name, "version_damaged", why)
        for one in document["versions"]:
            if one["state"] == "active" and (text := one["dense_passed_over"]):
                yield Problem(name, "dense_passed_over", text)
        for kind, key in (("cluster", "remote"), ("upstream", "upstream")):
            if text := (document.get(key) or {}).get("problem"):
                yield Problem(name, kind, text)
    for kind, part in (("audit", "audit"), ("ssd_cache", "ssd_cache"), ("device", "device"), ("cluster", "remote")):
        if text := (status.get(part) or {}).get("problem"):
            yield Problem("", kind, text)
    nodes = (status.get("upstream") or {}).get("nodes", {})
    silent = [f"{node}: {one['problem']}" for node, one in nodes.items() if one["problem"]]
    if silent:
        yield Problem("", "upstream", "; ".join(silent))
    if text := status["disk"]["problem"]:
        yield Problem("", "disk_full", text)
