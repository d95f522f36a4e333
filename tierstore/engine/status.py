"""The status document of a model: one place that says what a person or a dashboard may read.

Reads counters without stopping anything, so figures of one document may be a moment apart.
"""

from __future__ import annotations

from typing import Any

from tierstore.engine.model import Model
from tierstore.engine.version import VersionInfo
from tierstore.engine.view import View
from tierstore.errors import NotReady


def model_status(model: Model) -> dict[str, Any]:
    """`{"active_version", "watermark", "versions": […], "tables": {…}, …}`, see docs/http-api.md."""
    try:
        with model.view() as view:
            return _document(model, view)
    except NotReady:
        return _document(model, None)


def _document(model: Model, view: View | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "model": model.name,
        "active_version": None if view is None else view.version,
        "watermark": None if view is None else view.seq,
        "problem": model.problem,
        "log": model.log_status(),
        "versions": _versions(model, view),
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
            "tables": version.status(),
        }
    return document


def _dense(model: Model, info: VersionInfo, view: View | None) -> str | None:
    """What becomes of a version's dense part; `view` if it is the active one."""
    if view is not None and view.has_dense:
        return "served" if view.predictor is not None else f"kept, not served: {view.unserved}"
    return model.dense.kept if info.has_dense else None


def _versions(model: Model, view: View | None) -> list[dict[str, Any]]:
    entries = []
    for info in model.infos():
        active = view is not None and info.number == view.version
        entries.append(
            {
                "version": info.number,
                "state": "active" if active else "stale" if model.is_stale(info) else "kept",
                "watermark": view.seq if view is not None and active else info.watermark,
                "delta_seq": info.manifest.delta_seq,
                "created_at": info.manifest.to_document().get("created_at"),
                "dense": _dense(model, info, view if active else None),
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
