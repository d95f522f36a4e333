"""A node's answers to fronts: what it serves, rows of one version as of one seq, records, deltas.

A front asks for rows as of its own seq. So replaced views are held until every front is beyond them, but for LAG_S at
most, and the last view of a version that no longer serves while a front serves that version, unless something else
waits for it to be closed. While no front asks, nothing is held. Any thread may call anything; a thread that ends by
itself releases what is no longer needed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tierstore.engine.deltas.log import DeltaLog
from tierstore.engine.events.observer import Observer
from tierstore.engine.model import Model
from tierstore.engine.operations.explain import explain_codes
from tierstore.engine.operations.status import model_status
from tierstore.engine.reads.view import View
from tierstore.errors import Conflict, NotFound
from tierstore.formats import files
from tierstore.formats.keys import are_own
from tierstore.formats.names import dense_file
from tierstore.formats.regular import read_regular
from tierstore.threads import Thread
from tierstore.tiers.upstream import wire
from tierstore.tiers.upstream.layout import ABSENT, FOREIGN, THERE
from tierstore.types import Keys, Partitions, Tier

KEEP_S = 0.2  # how long a view is held in any case after it was replaced
LAG_S = 10.0  # how long a front is waited for
GONE_S = 3.0  # after which a front that has not asked counts as gone
LONGEST_S = 3600.0  # how long a version is held after it was left
_DIGESTS = 16  # of the newest deltas are reported
LOG_BYTES = 8 << 20  # of deltas that are read together
NEWEST = int(np.iinfo(np.int64).max)
_LOOK_S = 0.1


def partitions_of(model: Model) -> Partitions | None:
    """The partitions that the node owns; None where it owns all."""
    document = model_status(model).get("partitions")
    return None if document is None else Partitions.of_document(document)


def line_of(model: Model, view: View) -> str:
    """Identifies the content of a version number: what was loaded, tables, features, and which of its deltas were
    undone. A view with deltas that were undone since it was published is of another line than the one that follows.
    """
    info, record = view.open_version.info, model.state.log.undone
    tables = [(s.name, s.key.value, s.dim, s.dtype.value, s.default) for s in info.specs.values()]
    features = sorted(
        (f.name, f.table, f.combiner, str(f.padding_key), *([str(f.hash)] if f.hash else []))
        for f in info.features.values()
    )
    undone = [each for each in record.ranges if each[1] > info.manifest.delta_seq]
    parts = [tables, features, undone]
    is_current = model.where.version(view.version, record.line(view.version)).root == info.where.root
    if view.version in record.outdated or not is_current:
        parts.append("with what was undone")
    if info.content is not None:  # else an earlier release has loaded it, and nodes of that release report the same
        named = {head: digest for head, digest in info.loaded_digests.items() if head}
        parts += [info.content, info.loaded_digests.get(""), *([named] if named else [])]
    return xxhash.xxh3_64_hexdigest(json.dumps(parts).encode())


@dataclass(slots=True, eq=False)
class _Held:
    view: View
    line: str
    replaced_s: float | None = None  # since when there is a newer view, or the version no longer serves


class HeldViews:
    """Views of one model that the node holds for its fronts."""

    def __init__(self, model: Model) -> None:
        self._model, self._publisher = model, model.publisher
        self._lock = threading.Lock()
        # guarded by _lock
        self._held: list[_Held] = []  # oldest first
        self._fronts: dict[
            str, tuple[float, int, int]
        ] = {}  # front → when it last reported, the version that it serves, its seq
        self._called_s = -GONE_S
        self._partitions: tuple[object, Partitions | None] = None, None

    @property
    def in_use(self) -> bool:
        return time.monotonic() - self._called_s < GONE_S

    def touch(self, front: str | None = None, serves: tuple[int, int] | None = None) -> None:
        """Note that a front asks; the named front serves a version at a seq."""
        with self._lock:
            self._called_s = now_s = time.monotonic()
            if front is not None and serves is not None:
                self._fronts[front] = (now_s, *serves)
            self._fronts = {name: of for name, of in self._fronts.items() if now_s - of[0] < GONE_S}
            self._update()

    def update(self) -> None:
        """Note that something was published."""
        with self._lock:
            if self.in_use:
                self._update()

    def _update(self) -> None:
        now_s, held = time.monotonic(), {entry.view for entry in self._held}
        current = self._publisher.hold()
        for view in current:
            if view in held:
                self._publisher.unhold(view)
            else:
                self._held.append(_Held(view, line_of(self._model, view)))
        for entry in self._held:
            if entry.view not in current and entry.replaced_s is None:
                entry.replaced_s = now_s

    def expire(self, *, all_of_them: bool = False) -> bool:
        """Release views that are no longer needed. Returns whether any view is still held."""
        with self._lock:
            now_s, in_use = time.monotonic(), self.in_use and not all_of_them
            after: dict[int, _Held] = {}  # by version, the entry that came after
            for entry in reversed(list(self._held)):
                newer = after.get(entry.view.version)
                after[entry.view.version] = entry
                if not (in_use and self._is_needed(entry, newer, now_s)):
                    self._held.remove(entry)
                    self._publisher.unhold(entry.view)
            return bool(self._held)

    def _is_needed(self, entry: _Held, newer: _Held | None, now_s: float) -> bool:
        if entry.replaced_s is None:
            return True
        number, age_s = entry.view.version, now_s - entry.replaced_s
        if self._model.state.retiring.is_awaited(number):
            return False
        there = [of for of in self._fronts.values() if now_s - of[0] < GONE_S]
        if newer is None:
            return age_s < KEEP_S or (age_s < LONGEST_S and any(version == number for _, version, _ in there))
        return age_s < KEEP_S or (age_s < LAG_S and any(seq < newer.view.seq for _, _, seq in there))

    def acquire(self, number: int, line: str, upto: int) -> View:
        """The newest view of a version that has no delta above `upto`, or the oldest if all have; to be released.

        NotFound if none is held.
        """
        with self._lock:
            found = [entry.view for entry in self._held if entry.view.version == number and entry.line == line]
            if not found:
                raise NotFound(f"model {self._model.name!r} has no version {number} of this line to read rows of")
            view = max((view for view in found if view.seq <= upto), key=lambda view: view.seq, default=None)
            view = min(found, key=lambda view: view.seq) if view is None else view
            self._publisher.hold(view)
            return view

    def release(self, view: View) -> None:
        self._publisher.unhold(view)

    @contextmanager
    def at(self, number: int, line: str) -> Iterator[View]:
        """The newest view of a version. NotFound if none is held."""
        view = self.acquire(number, line, NEWEST)
        try:
            yield view
        finally:
            self.release(view)

    def newest(self) -> dict[int, tuple[View, str]]:
        """By version, the newest view and its line."""
        with self._lock:
            return {entry.view.version: (entry.view, entry.line) for entry in self._held}

    def partitions(self) -> Partitions | None:
        """`partitions_of`, read again whenever another version serves."""
        served = self._publisher.served.versions
        if self._partitions[0] != served:
            self._partitions = served, partitions_of(self._model)
        return self._partitions[1]


class StoredRead:
    """A read of rows of codes as they are stored. `finish` it, on any one thread."""

    def __init__(self, held: HeldViews, view: View, table: str, codes: Keys) -> None:
        self.view, self.table = view, table
        self._held, self._under = held, view.table(table)
        self._mine = _owned(codes, held.partitions())
        self._of, self._codes = len(codes), codes[self._mine]
        self._rows, self._state = self._under.stored(self._codes)

    def finish(self) -> list[bytes | memoryview]:
        """The answer in parts, see `wire`."""
        try:
            self._under.finish_stored(self._codes, self._rows, self._state)
        finally:
            self._held.release(self.view)
        there = self._state != Tier.ABSENT
        states = np.full(self._of, FOREIGN, np.uint8)
        states[self._mine] = np.where(there, THERE, ABSENT)
        return wire.encode_rows(self.view.seq, states, self._rows if there.all() else self._rows[there])


class Fronts(Observer):
    """A store's answers to its fronts.

    `models` gives all models, `model` one by its name. `close` it before the store.
    """

    def __init__(self, models: Callable[[], list[str]], model: Callable[[str], Model]) -> None:
        self._models, self._model = models, model
        self._lock = threading.Lock()
        # guarded by _lock
        self._of: dict[str, HeldViews] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def delta_visible(self, model: str, seq: int, rows: int, freshness_s: float) -> None:
        self._note(model)

    def version_switched(self, model: str, old: int | None, new: int | None) -> None:
        self._note(model)

    def _note(self, model: str) -> None:
        held = self._of.get(model)
        if held is not None:
            held.update()

    def held(self, name: str, front: str | None = None, serves: tuple[int, int] | None = None) -> HeldViews:
        """The views of a model, held from now on.

        NotFound for an unknown one; Conflict if its rows are on other machines.
        """
        model = self._model(name)
        model.state.shared.placement.refusals.check("serve_fronts")
        with self._lock:
            if self._closed:
                raise NotFound("the service is being closed")
            held = self._of.get(name)
            if held is None or held._model is not model:
                held = self._of[name] = HeldViews(model)
            held.touch(front, serves)
            if self._thread is None:
                thread = Thread(target=self._run, name="tierstore-fronts", daemon=True)
                thread.start()  # before it counts as running
                self._thread = thread
        return held

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                # others are forgotten: the models may be gone
                self._of = {name: held for name, held in self._of.items() if held.expire() or held.in_use}
                if not self._of:
                    self._thread = None
                    return

    def close(self) -> None:
        """Release all views."""
        with self._lock:
            self._closed = True
            for held in self._of.values():
                held.expire(all_of_them=True)

    # --- answers

    def state(self, front: str, serves: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        """What each model serves, for a front that serves these: (version, seq) by model."""
        models = {}
        for name in self._models():
            held = self.held(name, front, serves.get(name))
            log, active = held._model.state.log, held._model.active_version
            models[name] = {
                "active": active,
                "log": None if log.start is None else [log.start, log.last],
                "versions": {
                    str(number): {"line": line, "seq": view.seq} for number, (view, line) in held.newest().items()
                },
                "partitions": None if (own := held.partitions()) is None else own.document(),
                "digests": _digests(log, serves.get(name)),
            }
        return {"models": models}

    def rows(self, name: str, number: int, table: str, request: wire.RowsRequest) -> StoredRead:
        """Begin to read rows. NotFound; Conflict if no view has the delta `floor`."""
        held = self.held(name)
        view = held.acquire(number, request.line, request.upto)
        try:
            if view.seq < request.floor:
                raise Conflict(
                    f"version {number} of {name!r} has deltas up to {view.seq} here, not {request.floor} yet"
                )
            if table not in view.open_version.tables:
                raise NotFound(f"version {number} of {name!r} has no table {table!r}")
            return StoredRead(held, view, table, request.codes)
        except BaseException:
            held.release(view)
            raise

    def explain(self, name: str, number: int, table: str, line: str, upto: int, codes: Keys) -> dict[str, Any]:
        """`explain_codes` as of `upto`. NotFound."""
        held = self.held(name)

        @contextmanager
        def hold() -> Iterator[View]:
            view = held.acquire(number, line, upto)
            try:
                if table not in view.open_version.tables:
                    raise NotFound(f"version {number} of {name!r} has no table {table!r}")
                yield view
            finally:
                held.release(view)

        return explain_codes(held._model, hold, table, codes)

    def version(self, name: str, number: int, line: str) -> dict[str, Any]:
        """What a front needs to open a version: its record, and the names of its side files."""
        with self.held(name).at(number, line) as view:
            info = view.open_version.info
            return {
                "record": files.read_json(info.where.record),
                "files": sorted(_side_files(view)),
                "colliding": any(view.colliding.values()),
            }

    def file(self, name: str, number: int, line: str, path: str) -> bytes:
        """A side file of a version, by its path in the version's directory. NotFound."""
        with self.held(name).at(number, line) as view:
            found = _side_files(view).get(path)
            if found is None:
                raise NotFound(f"version {number} of {name!r} has no file {path!r}")
            return found if isinstance(found, bytes) else bytes(read_regular(found))

    def deltas(self, name: str, after: int, count: int) -> list[bytes | memoryview]:
        """At most `count` deltas of the log after `after`, in parts, see `wire`; none if the log begins later."""
        log = self._model(name).state.log
        entries: list[wire.LoggedDelta] = []
        size = 0
        if log.start is not None and after >= log.start:
            for seq in range(after + 1, min(after + count, log.last or 0) + 1):
                digest = log.digest(seq)
                if digest is None:
                    break
                entries.append(wire.LoggedDelta(seq, digest, log.read(seq)))
                size += len(entries[-1].data)
                if size > LOG_BYTES:
                    break
        return wire.encode_entries(entries)


def _digests(log: DeltaLog, serves: tuple[int, int] | None) -> dict[str, str]:
    """The digests of the newest deltas, and of the one that a front serves, by seq: those that the log holds."""
    last = log.last or 0
    seqs = {*range(max(0, last - _DIGESTS) + 1, last + 1), *([] if serves is None else [serves[1]])}
    return {str(seq): digest for seq in sorted(seqs) if (digest := log.digest(seq)) is not None}


def _owned(codes: Keys, partitions: Partitions | None) -> Any:
    """bool[n], or a slice of all: which codes this node owns."""
    return slice(None) if partitions is None else are_own(codes, partitions)


def _side_files(view: View) -> dict[str, Path | bytes]:
    """Dense parts, warm-up keys and recorded requests, by path in the version's directory.

    Golden examples are for a node that loads.
    """
    where = view.open_version.info.where
    found: dict[str, Path | bytes] = {dense_file(head): where.dense(head) for head in where.denses()}
    folder = where.requests().parent
    found |= {
        path.relative_to(where.root).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and not path.is_relative_to(where.golden)
    }
    for overlay in reversed(view.overlays):
        found |= {dense_file(name): head.graph for name, head in overlay.heads.items() if head.graph is not None}
    return found
