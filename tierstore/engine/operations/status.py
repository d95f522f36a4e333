"""The status document of a store and of a model: what people and dashboards may read.

It reads counters without stopping anything, so numbers of one document may be a moment apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierstore.engine.data.disk_room import disk_status
from tierstore.engine.lifecycle.state import Shared
from tierstore.engine.model import Model
from tierstore.engine.operations.problems import problems_of
from tierstore.engine.reads.view import View
from tierstore.engine.serving.routing import Routing
from tierstore.engine.versions.info import VersionInfo
from tierstore.engine.versions.kept_strings import tables_of_hashes


def store_status(models: Mapping[str, Model], shared: Shared, warming: dict[str, int] | None) -> dict[str, Any]:
    """The status document of these models, and of what all models of the store share."""
    shared.epochs.collect()
    return {
        "models": {name: model_status(model) for name, model in models.items()},
        "warming": warming,
        "throttle": shared.throttle.status(),
        "host_budget": {"used": shared.host_budget.used, "total": shared.host_budget.total},
        "overlay_budget": {"used": shared.overlay_budget.used, "total": shared.overlay_budget.total},
        "device_budget": {"used": shared.devices.budget.used, "total": shared.devices.budget.total},
        "device": shared.devices.status(),
        "audit": {"problem": shared.audit.problem},
        "disk": disk_status(shared.root, shared.settings.disk_reserve),
    }


def with_problems(document: dict[str, Any]) -> dict[str, Any]:
    """The status document with its problems."""
    return document | {"problems": [problem._asdict() for problem in problems_of(document)]}


def model_status(model: Model) -> dict[str, Any]:
    """`{"active_version", "watermark", "versions": […], "tables": {…}, …}`, see docs/http-api.md."""
    with model.publisher.hold_all() as served:  # held, so that the reported versions stay open
        return _document(model, served)


def _document(model: Model, served: Routing) -> dict[str, Any]:
    view = served.active
    document: dict[str, Any] = {
        "model": model.name,
        "active_version": None if view is None else view.version,
        "watermark": None if view is None else view.seq,
        "canary": None if served.canary is None else _canary(served.canary, served.share),
        "labels": served.all_labels(),
        "partitions": None if view is None else _partitions(view.open_version.info),
        "problem": model.problem,
        "problems": model.problems(),
        "log": model.state.log.status(),
        "undone": [list(each) for each in model.state.log.undone.ranges],
        "versions": _versions(model, served),
        "rollback_to": None if view is None else model.state.file.document.order.last_of(model.versions),
        "to_drop": model.drops.once_active(),
        "damaged": {str(number): why for number, why in sorted(model.catalogue.damaged.copy().items())},
        "unfinished": {
            str(number): {"bytes": load.bytes, "age_s": round(load.age_s)}
            for number, load in sorted(model.catalogue.unfinished.items())
        },
        "tables": {},
    }
    if view is not None:
        version = view.open_version
        document |= {
            "folded_watermark": version.watermark,
            **model.freshness.status(),
            "overlays": len(view.overlays),
            "overlay_bytes": view.overlay_bytes,
            "features": {
                name: {"table": feature.table, "combiner": feature.combiner.value if feature.combiner else None}
                | ({} if feature.hash is None else {"hash": feature.hash.document()})
                for name, feature in view.features.items()
            },
            "dense": _runs(model, view, ""),
            "heads": {head: _runs(model, view, head) for head in sorted(view.heads) if head},
            "disk": version.rows.stats(),
            "tables": version.status(view.colliding),
        }
    return document


def _warming(model: Model, view: View) -> dict[str, int] | None:
    """The progress, in keys, of a version's warm-up after a start; None if it is over."""
    warm_up = model.state.shared.warmer.warm_up_of(view.open_version)
    return None if warm_up is None else {"done": warm_up.done, "total": warm_up.total}


def _canary(view: View, share: float) -> dict[str, Any]:
    tables = view.open_version.status(view.colliding)
    return {
        "version": view.version,
        "share": share,
        "watermark": view.seq,
        "folded_watermark": view.open_version.watermark,
        "overlays": len(view.overlays),
        "overlay_bytes": view.overlay_bytes,
        # look-ups are counted over all versions of the model, so they are not repeated here
        "tables": {
            name: {
                key: entry[key] for key in ("rows", "rows_exact", "colliding_keys", "tier_bytes", "tier_budget_bytes")
            }
            for name, entry in tables.items()
        },
    }


def _runs(model: Model, view: View, head: str) -> dict[str, float]:
    """Counts of a head over all versions, and of its buffers in the active one."""
    session = view.heads[head].session if head in view.heads else None
    return model.dense.counts_of(head).as_dict() | {"buffer_bytes": 0 if session is None else session.buffer_bytes}


def _heads(model: Model, info: VersionInfo, view: View | None) -> dict[str, str]:
    """The state of a version's dense parts, by head; `view` if it is served."""
    if view is None:
        states = dict.fromkeys(info.heads, model.dense.kept)
    else:
        states = {
            head: "served" if of.session is not None else f"kept, not served: {view.under(head).unserved}"
            for head, of in view.heads.items()
        }
    for head, newer in _passed_over(info, view).items():
        states[head] = f"{states.get(head, 'none')}; a newer one was passed over: {newer}"
    return dict(sorted(states.items()))


def _peculiar(view: View | None) -> dict[str, list[str]]:
    """What a user may not expect of dense parts that are served: heads whose answer for a row depends on the batch
    that it is in, heads with post-transforms that ONNX Runtime applies otherwise than ONNX specifies, and features that
    no head takes.
    """
    heads = {} if view is None else view.heads
    served = {head: of.session.bindings for head, of in sorted(heads.items()) if of.session is not None}
    taken = {name for bindings in served.values() for name in bindings.features}
    return {
        "mixes_rows": [head for head, bindings in served.items() if bindings.mixes_rows],
        "misapplied_transforms": [head for head, bindings in served.items() if bindings.misapplied],
        "unused_features": [name for name in view.features if name not in taken] if view and served else [],
    }


def _passed_over(info: VersionInfo, view: View | None) -> Mapping[str, str]:
    """Why dense parts newer than the version's are not served, by head."""
    return info.passed_over if view is None else view.passed_over


def _versions(model: Model, served: Routing) -> list[dict[str, Any]]:
    entries = []
    labels, order = served.all_labels(), model.state.file.document.order
    for info in model.catalogue.infos():
        heads = _heads(model, info, served.numbered(info.number))
        view = served.numbered(info.number)
        state = "stale" if model.catalogue.is_stale(info) else "kept"
        if model.catalogue.is_outdated(info.number):
            state = "outdated"
        if view is not None:
            state = "active" if view is served.active else "canary"
        entries.append(
            {
                "version": info.number,
                "state": state,
                "share": _share(served, view),
                "labels": [name for name, number in labels.items() if number == info.number],
                "left": order.why(info.number),
                "watermark": info.watermark if view is None else view.seq,
                "delta_seq": info.manifest.delta_seq,
                "partitions": _partitions(info),
                "created_at": info.manifest.to_document().get("created_at"),
                "golden": info.golden,
                "hashes_only": tables_of_hashes(info),
                **_peculiar(view),
                "dense": heads.pop("", None),
                "heads": heads,
                "dense_passed_over": "; ".join(_passed_over(info, view).values()) or None,
                "problem": info.problem,
                "warming": None if view is None else _warming(model, view),
                "host_bytes": None if view is None else _host_bytes(view),
            }
        )
    for number, step in model.catalogue.loads():
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
    """The bytes that the host tier may use for all tables, and the bytes that it would need for every row."""
    return {"budget": view.open_version.hosts.budget_bytes, "need": view.open_version.host_need_bytes}


def _partitions(info: VersionInfo) -> dict[str, Any] | None:
    """The partitions of a version, and the number of all; None: it has all keys, without partitions."""
    return None if info.partitions is None else info.partitions.document()


def _share(served: Routing, view: View | None) -> float | None:
    """The share of the requests that name no version; None if it is not served."""
    if view is None:
        return None
    return served.share if view is served.canary else 1.0 - served.share
