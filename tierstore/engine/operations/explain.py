"""Explanations of answers: what each tier holds of a key, and which delta wrote or deleted it last.

For people, a few keys at a time; it changes nothing (`holdings.py`). Any thread may call it. The view is held while
tiers are read, and released before the log is searched (`key_history.py`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tierstore.engine.data.cascade import Cascade
from tierstore.engine.model import Model
from tierstore.engine.operations.holdings import Holdings, look
from tierstore.engine.operations.key_history import KeyHistory, iso_time, search
from tierstore.engine.reads.view import View
from tierstore.engine.serving.routing import STABLE
from tierstore.engine.versions.info import VersionInfo
from tierstore.engine.versions.kept_strings import find_strings
from tierstore.errors import InvalidInput, StorageError
from tierstore.formats.colliding import NONE
from tierstore.formats.key_arrays import key_array
from tierstore.formats.keys import as_codes, partition_of
from tierstore.kernels import codec
from tierstore.tiers.base import Peek
from tierstore.types import Keys, KeyType, TableSpec

MOST_KEYS = 100  # in a request
_NO_HISTORY: dict[str, Any] = {"written": None, "undone": [], "passed_over": []}


def explain(
    model: Model,
    feature: str,
    keys: Any,
    *,
    version: int | str | None = None,
) -> dict[str, Any]:
    """Why `keys` of a feature are answered as they are, by `version` (a number or a label; None: the active one).

    docs/cli.md describes the document. Errors as of a look-up, and InvalidInput for more than MOST_KEYS keys.
    """
    array = key_array(keys)
    keys = array if isinstance(array, list) else array.tolist()
    if not 1 <= len(keys) <= MOST_KEYS:
        raise InvalidInput(f"expected 1 to {MOST_KEYS} keys, got {len(keys)}")
    with model.view(STABLE if version is None else version) as view:
        of = view.feature(feature)
        spec, codes = of.rows.table.spec, of.codes(keys)
    number = view.version  # to ask for it again: a label may change its version
    document = explain_codes(model, lambda: model.view(number), spec.name, codes)
    entries = []
    for key, entry in zip(keys, document.pop("keys"), strict=True):
        del entry["stored"]
        if entry["code"] == of.padding:
            entry |= {
                "state": "padding",
                "why": f"it is the padding key of {feature}: answered with zeros, never looked up",
            }
            entry |= {"found": False, "default": False, "tier": None, "row": [0.0] * spec.dim}
        shown = key.decode() if isinstance(key, bytes) else key
        if entry["string"] not in (None, shown):
            entry["why"] += f"; the row is that of {entry['string']!r}, which has the same hash"
        entries.append({"key": shown} | entry)
    return {"model": model.name, "feature": feature} | document | {"keys": entries}


def explain_codes(
    model: Model,
    hold: Callable[[], AbstractContextManager[View]],
    table: str,
    codes: Keys,
) -> dict[str, Any]:
    """`explain` for codes of a table, with the view that `hold` gives."""
    with hold() as view:
        version = view.open_version
        cascade, info, colliding = version.tables[table], version.info, view.colliding.get(table)
        seen = look(view, cascade, codes)
        folded, seq, strings = version.watermark, view.seq, dict[int, str]()
        if cascade.spec.key is KeyType.STRING:
            with contextlib.suppress(StorageError):  # `verify` names the file
                strings = find_strings(version, view.overlays, table, codes.tolist(), colliding or NONE)
    spec = cascade.spec
    wanted = np.array([one.code for one in seen if one.place is None or one.place.explained is None], np.int64)
    history = search(model.state.log, info, table, wanted, lambda keys: as_codes(keys, spec.key, colliding), seq)
    return {
        "table": table,
        "key_type": spec.key.value,
        "dim": spec.dim,
        "version": info.number,
        "seq": seq,
        "folded": folded,
        "snapshot": {"delta_seq": info.manifest.delta_seq, "created_at": info.manifest.to_document().get("created_at")},
        "log": {"first": history.first, "last": history.newest, "ended": history.ended},
        "keys": [
            _of_string(_entry(one, cascade, info, history, model.state.log.undone.rollbacks), strings) for one in seen
        ],
    }


def _of_string(entry: dict[str, Any], strings: Mapping[int, str]) -> dict[str, Any]:
    """An entry with the string of the key whose row is answered; None if it is not kept, or there is no row."""
    known = strings.get(entry["code"], entry.get("string"))  # else as a node behind a front said
    return entry | {"string": known if entry["found"] else None}


def _entry(
    seen: Holdings, table: Cascade, info: VersionInfo, history: KeyHistory, rollbacks: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    spec, place = table.spec, seen.place
    own = place.partition if place is not None else _partition(seen.code, info)
    tier, peek = seen.answering
    entry: dict[str, Any] = {
        "code": seen.code,
        "partition": None if own is None else {"number": own[0], "count": own[1], "own": seen.own},
        "node": None if place is None else place.node,
        "tier": tier if seen.own else None,
        "found": seen.own and peek.row is not None,
        "default": seen.own and peek.row is None,
        "row": None,
        "stored": None if peek.row is None else peek.row.hex(),  # for a front, which compares
        "tiers": [_tier(name, of, more, spec) for name, of, more in seen.tiers]
        + [{"tier": name, "error": text} for name, text in seen.errors.items()],
        "agree": seen.agree,
        "differ": seen.differ,
        "row_time": None if not seen.time_s else iso_time(seen.time_s),
        "expires_at": None if not seen.time_s or spec.ttl_s is None else iso_time(seen.time_s + spec.ttl_s),
    }
    if not seen.own:
        why = "its partition is not on this node: look-ups of it are refused here"
        return entry | _NO_HISTORY | {"state": "elsewhere", "why": why}
    entry["row"] = numbers(peek.row, spec) if peek.row is not None else _floats(table.default)
    unread = seen.errors and tier == "absent"
    if unread:  # no tier that could be read holds it, and one could not be read
        entry |= {"tier": None, "default": False, "row": None}
    if place is not None and place.explained is not None:
        theirs: dict[str, Any] = place.explained
        of_owner = {name: theirs[name] for name in ("state", "why", *_NO_HISTORY, "row_time", "expires_at")}
        return (
            entry
            | of_owner
            | {
                "string": theirs.get("string"),
                "owner": {name: theirs[name] for name in ("tier", "tiers", "agree", "differ")},
            }
        )
    write = history.last.get(seen.code)
    others = [one.document() | {"base_version": one.base_version} for one in history.others.get(seen.code, ())]
    undone = [
        one.document() | {"rolled_back_to": _rolled_back(rollbacks, one.seq)}
        for one in history.undone.get(seen.code, ())
    ]
    entry |= {"written": None if write is None else write.document(), "undone": undone, "passed_over": others}
    if unread:
        return entry | {"state": "unreadable", "why": "; ".join(seen.errors.values())}
    state, why = (_why_there if peek.row is not None else _why_absent)(seen, spec, info, history)
    return entry | {"state": state, "why": why}


def _why_there(seen: Holdings, spec: TableSpec, info: VersionInfo, history: KeyHistory) -> tuple[str, str]:
    write, floor = history.last.get(seen.code), info.manifest.delta_seq
    if write is not None and not write.deleted:
        return "present", f"delta {write.seq} wrote it"
    if write is not None:
        return "inconsistent", f"delta {write.seq} deleted it, and a row is answered: run `tierstore verify`"
    if seen.of("changes").row is not None:
        return (
            "present",
            f"a delta from {floor + 1} to {history.first - 1} wrote it; which one is not known: {history.ended}",
        )
    if seen.of("base").row is not None or history.ended is None:
        return "present", f"it came with the snapshot of version {info.number}, and no delta has written it since"
    return (
        "present",
        f"the snapshot of version {info.number} or a delta up to {history.first - 1} wrote it; which is not known: "
        f"{history.ended}",
    )


def _why_absent(seen: Holdings, spec: TableSpec, info: VersionInfo, history: KeyHistory) -> tuple[str, str]:
    write = history.last.get(seen.code)
    ends_s = math.inf if seen.time_s is None or spec.ttl_s is None else seen.time_s + spec.ttl_s
    is_marked = any(peek.absent for name, peek, _ in seen.tiers if name in ("overlay", "changes", "disk"))
    if write is not None and write.deleted:
        return "deleted", f"delta {write.seq} deleted it"
    if write is not None:
        ends_s = write.event_time.timestamp() + (spec.ttl_s or math.inf)
        if ends_s <= time.time():
            return "expired", f"delta {write.seq} wrote it, and it expired at {iso_time(ends_s)}"
        return (
            "inconsistent",
            f"delta {write.seq} wrote it, and no tier has it: it did not fit the version, or is lost; run "
            "`tierstore verify`",
        )
    if is_marked and ends_s <= time.time() and history.ended is None:
        return "expired", f"it came with the snapshot, and it expired at {iso_time(ends_s)}"
    if is_marked:
        how = "was deleted, or expired" if spec.ttl_s is not None else "was deleted"
        return (
            "deleted",
            f"it {how} by delta {history.first - 1} or one before; which one is not known: {history.ended}",
        )
    # an undone deletion explains no absence
    if wrote := [one.seq for one in history.undone.get(seen.code, ()) if not one.deleted]:
        return "undone", f"delta {wrote[0]} wrote it, and a rollback has undone that"
    if history.ended is None or info.base == "sealed":  # its deltas leave a mark of what they delete
        had = int(info.tables[spec.name].get("expired", 0))
        also = f", or was one of {had:,} that had expired at the load" if had else ""
        return (
            "never_there",
            f"it is not in the snapshot of version {info.number}{also}, and no delta has written it since",
        )
    return "not_known", f"it is not there; whether it ever was is not known: {history.ended}"


def _tier(name: str, peek: Peek, more: Mapping[str, Any], spec: TableSpec) -> dict[str, Any]:
    row = None if peek.row is None else numbers(peek.row, spec)
    return {"tier": name, "holds": peek.holds, "row": row, **more}


def numbers(row: bytes, spec: TableSpec) -> list[float]:
    """The numbers in a stored row."""
    out = np.empty((1, spec.dim), np.float32)
    codec.decode(np.frombuffer(row, np.uint8).reshape(1, -1).copy(), spec.dtype, out)
    return _floats(out[0])


def _floats(vector: Any) -> list[float]:
    return [float(str(number)) for number in vector]  # through text: 0.1, not 0.10000000149011612


def _rolled_back(rollbacks: Sequence[tuple[int, int]], seq: int) -> int | None:
    """The delta of the rollback that has undone `seq`."""
    return next((to for to, last in reversed(rollbacks) if to < seq <= last), None)


def _partition(code: int, info: VersionInfo) -> tuple[int, int] | None:
    if info.partitions is None:
        return None
    count = info.partitions.count
    return int(partition_of(np.array([code], np.int64), count)[0]), count
