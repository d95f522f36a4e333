"""The status document of a model: one place that says what a person or a dashboard may read.

Reads counters without stopping anything, so figures of one document may be a moment apart.
"""

from __future__ import annotations

from typing import Any

from tierstore.engine.model import Model
from tierstore.engine.served import Served
from tierstore.engine.version import VersionInfo
from tierstore.engine.view import View


def model_status(model: Model) -> dict[str, Any]:
    """`{"active_version", "watermark", "versions": […], "tables": {…}, …}`, see docs/http-api.md."""
    with model.publisher.beside() as served:  # held, so that what it tells of stays open
        return _document(model, served)


def _document(model: Model, served: Served) -> dict[str, Any]:
    view = served.active
    document: dict[str, Any] = {
        "model": model.name,
        "active_version": None if view is None else view.version,
        "watermark": None if view is None else view.seq,
        "canary": None if served.canary is None else _canary(served.canary, served.share),
        "labels": served.all_labels(),
        "problem": model.problem,
        "log": model.log_status(),
        "versions": _versions(model, served),
        "resting": model.resting_status(),
        "damaged": {str(number): why for number, why in sorted(model.damaged.copy().items())},
        "unfinished": {
            str(number): {"bytes": left.bytes, "age_s": round(left.age_s)}
            for number, left in sorted(model.unfinished.items())
        },
        "tables": {},
    }
    if view is not None:
        version = view.holder
        document |= {
            "folded_watermark": version.watermark,
            "last_event_time": model.last_event_time,
            "overlays": len(view.overlays),
            "overlay_bytes": sum(overlay.nbytes for overlay in view.overlays),
            "features": {
                name: {"table": feature.table, "combiner": feature.combiner.value if feature.combiner else None}
                for name, feature in view.features.items()
            },
            "dense": model.dense.counts.as_dict()
            | {"buffer_bytes": 0 if view.predictor is None else view.predictor.buffer_bytes},
            "disk": version.disk.stats(),
            "tables": version.status(view.colliding),
        }
    return document


def _canary(view: View, share: float) -> dict[str, Any]:
    tables = view.holder.status(view.colliding)
    return {
        "version": view.version,
        "share": share,
        "watermark": view.seq,
        "folded_watermark": view.holder.watermark,
        "overlays": len(view.overlays),
        "overlay_bytes": sum(overlay.nbytes for overlay in view.overlays),
        # look-ups are counted over all versions of the model, so they are not repeated here
        "tables": {
            name: {
                key: entry[key] for key in ("rows", "rows_exact", "colliding_keys", "tier_bytes", "tier_budget_bytes")
            }
            for name, entry in tables.items()
        },
    }


def _dense(model: Model, info: VersionInfo, view: View | None) -> str | None:
    """What becomes of a version's dense part; `view` if it is served."""
    if view is not None and view.has_dense:
        state = "served" if view.predictor is not None else f"kept, not served: {view.unserved}"
    elif info.has_dense:
        state = model.dense.kept
    else:
        state = "none"
    newer = info.passed_over  # but for what is not folded yet
    if newer is not None and not (view is not None and any(overlay.dense is not None for overlay in view.overlays)):
        return f"{state}; a newer one was passed over: {newer}"
    return None if state == "none" else state


def _versions(model: Model, served: Served) -> list[dict[str, Any]]:
    entries = []
    labels = served.all_labels()
    for info in model.infos():
        view = served.numbered(info.number)
        state = "stale" if model.is_stale(info) else "kept"
        if view is not None:
            state = "active" if view is served.active else "canary"
        entries.append(
            {
                "version": info.number,
                "state": state,
                "share": _share(served, view),
                "labels": [name for name, number in labels.items() if number == info.number],
                "watermark": info.watermark if view is None else view.seq,
                "delta_seq": info.manifest.delta_seq,
                "created_at": info.manifest.to_document().get("created_at"),
                "dense": _dense(model, info, view),
                "problem": info.problem,
                "warming": None if view is None else model.warming(view.holder),
                "host_bytes": None if view is None else _host_bytes(view),
            }
        )
    for number, step in model.loads():
        entries.append(
            {
                "version": number,
                "state": "loading",
                "watermark": None,
                "phase": step.phase,
                "done": step.done,
                "total": step.total,
            }
        )
    return sorted(entries, key=lambda entry: entry["version"])


def _host_bytes(view: View) -> dict[str, int]:
    """Of all tables: what the host tier may take, and with how much every row would be in it."""
    return {"budget": view.holder.host_budget_bytes, "need": view.holder.host_need_bytes}


def _share(served: Served, view: View | None) -> float | None:
    """Of the requests that name no version; None for what is not served."""
    if view is None:
        return None
    return served.share if view is served.canary else 1.0 - served.share
