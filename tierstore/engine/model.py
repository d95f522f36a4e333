"""A model: one served name. It answers look-ups and predictions, and is composed of the parts that manage its versions.

Look-ups and deltas: any thread, whatever the parts do. The parts share `state`; the order of locks is in
`lifecycle/state.py`.

After a crash: the document (`state.json`) names the active version, its RocksDB holds every delta up to its watermark,
and the delta log those above.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt

from tierstore.arguments import as_version, by_name
from tierstore.engine.deltas.apply import DeltaPath
from tierstore.engine.deltas.fold import Folder
from tierstore.engine.deltas.incoming import Incoming
from tierstore.engine.deltas.log import DeltaLog
from tierstore.engine.deltas.origin import Origin
from tierstore.engine.events.changes import audited, changing, requester
from tierstore.engine.lifecycle.copied import what_to_do
from tierstore.engine.lifecycle.drop import Drops
from tierstore.engine.lifecycle.freshness import Freshness
from tierstore.engine.lifecycle.housekeeping import Housekeeping
from tierstore.engine.lifecycle.loads import Loads
from tierstore.engine.lifecycle.opening import Opener
from tierstore.engine.lifecycle.retiring import DRAIN_S
from tierstore.engine.lifecycle.routes import Routes
from tierstore.engine.lifecycle.state import ModelState, Shared
from tierstore.engine.lifecycle.switch import Switcher
from tierstore.engine.lifecycle.tasks import Tasks
from tierstore.engine.lifecycle.throttle import LEAST_OF_A_SWITCH
from tierstore.engine.reads.cache_report import cache_report
from tierstore.engine.reads.view import View
from tierstore.engine.serving.publisher import Lease
from tierstore.engine.serving.routing import STABLE, Routing
from tierstore.errors import StorageError
from tierstore.forks import refuse
from tierstore.formats import files
from tierstore.formats.delta.reader import Delta
from tierstore.formats.names import ModelDirectory
from tierstore.predict.signature import Signature
from tierstore.types import DeltaResult, FeatureSpec, KeysLike, Partitions, TableSpec, Vectors

Floats = npt.NDArray[np.floating[Any]]  # a CuPy array if a device was named
Found = npt.NDArray[np.bool_]


class LookupOptions(TypedDict, total=False):
    """Options of every look-up besides `return_found`: those of `View.lookup`, and the choice of view."""

    dtype: str
    out: Vectors | None
    device: str | None
    stream: Any
    version: int | str | None
    route: bytes | str | None


class Model:
    """One served name. Its parts are for the engine; `store.py` has the verbs for users."""

    def __init__(self, name: str, where: ModelDirectory, shared: Shared) -> None:
        # constant after construction
        self.name, self.where = name, where
        self.state = state = ModelState(name, where, shared)
        self.catalogue, self.dense = state.catalogue, state.dense
        self.publisher = state.live.publisher  # of the current views; compiled readers look up in them
        self.deltas = DeltaPath(state.live, state.log, self.dense, self.catalogue.specs, shared.observers, state.room)
        self.folder = Folder(
            state.live, shared.settings.fold_grace_s, lambda: max(LEAST_OF_A_SWITCH, shared.throttle.share)
        )
        self.opener = Opener(state)
        self.routes = Routes(state)
        self.switcher = Switcher(state, self.opener, self.routes)
        self.loads = Loads(state, self.opener)
        self.drops = Drops(state, self.opener, self.routes)
        self.housekeeping = Housekeeping(name, self.folder, state.retiring, self.publisher, self.opener.free)
        self.freshness = Freshness(state, self.deltas.newest_event)
        self._times = shared.throttle.times

    # --- start and stop

    @classmethod
    def begin(cls, name: str, where: ModelDirectory, shared: Shared) -> Model:
        """A new model, started. If that fails nothing of it remains, except what was there. StorageError."""
        was_there = files.exists(where.root)
        try:
            files.make_dir(where.log)
            model = cls(name, where, shared)
            try:
                model.catalogue.find()
                # a model of an earlier start goes on with what can be read; a new one would be refused for good
                if (why := model.catalogue.unreadable) is not None:
                    raise StorageError(why)
                model.start()
            except BaseException:
                model.close()
                raise
        except BaseException:
            with contextlib.suppress(StorageError):
                if not was_there:
                    files.remove_tree(where.root)
            raise
        return model

    def start(self) -> None:
        """Begin housekeeping. After `catalogue.find`. The placement, which has the pointer, opens what is served."""
        tasks = Tasks(self.state, self.opener, self.drops, lambda: self.housekeeping.stopping)
        shared = self.state.shared
        self.housekeeping.start(shared.folding, shared.tending, tasks.by_problem(), tasks.often())

    def close(self) -> None:
        """Stop the background work, wait for look-ups under way, and close what is open."""
        self.housekeeping.stop()
        state, changed = self.state, self.publisher.changed
        with state.switch, state.live.write:
            with contextlib.suppress(StorageError):
                state.file.repair()
            retiring, served = state.retiring.all(), state.live.close()
            to_close = [*retiring, *served]
            with changed:
                changed.wait_for(lambda: not any(map(self.publisher.reads, to_close)), timeout=DRAIN_S)
            for version in served:
                if (
                    state.shared.warmer.warm_up_of(version) is None
                ):  # otherwise the saved keys are more complete than memory
                    with contextlib.suppress(StorageError):  # they only make the next start warmer
                        version.save_hot_keys()
            for version in to_close:
                self.opener.free(version)
            self.opener.scanned.close_all()

    def refuse(self) -> None:
        """In a forked child: the model and its views raise Closed; views that are held can be released."""
        self.publisher.refuse()
        refuse(self, "close")

    # --- look-ups and deltas

    def view(self, version: int | str | None = None, route: bytes | str | None = None, head: str = "") -> Lease:
        """Hold one view for the length of a request: `with model.view() as view`. NotReady if nothing serves.

        `version` is a number, also as text, or a label. A number that is not served is NotReady, or NotFound if there
        is no such version; an unknown label is NotFound, and what can be neither is InvalidInput. Without it the
        request goes to the active version or, by its share, to the canary: requests of an equal `route` (a request id)
        to the same one, others at random. `head`: the dense part for predictions; NotFound if the view has no such
        head.
        """
        return Lease(self.publisher, self.wanted(version), route, head)

    def _acquire(self, version: int | str | None, route: bytes | str | None) -> View:
        """`view(version, route)` without the lease, in fewer steps; the caller releases the view."""
        return self.publisher.acquire(None if version is None else self.wanted(version), route)

    def wanted(self, version: int | str | None) -> int | str | None:
        """`version` as `as_version` gives it. NotFound for the number of a version that is not there."""
        wanted = as_version(version)
        if isinstance(wanted, int):
            self.catalogue.info(wanted)
        return wanted

    @overload
    def lookup(
        self, feature: str, keys: KeysLike, *, return_found: Literal[False] = False, **options: Unpack[LookupOptions]
    ) -> Floats: ...
    @overload
    def lookup(
        self, feature: str, keys: KeysLike, *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> tuple[Floats, Found]: ...
    @overload
    def lookup(
        self, feature: str, keys: KeysLike, *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any: ...
    def lookup(
        self,
        feature: str,
        keys: KeysLike,
        *,
        version: int | str | None = None,
        route: bytes | str | None = None,
        **options: Any,
    ) -> Any:
        """`View.lookup` on the view of `view(version, route)`."""
        view = self._acquire(version, route)
        began = time.perf_counter_ns() if self._times.watched else 0
        try:
            return view.lookup(feature, keys, **options)
        finally:
            self.publisher.release(view)
            if began:
                self._times.add(time.perf_counter_ns() - began)

    @overload
    def lookup_bags(
        self,
        feature: str,
        keys: KeysLike,
        offsets: npt.ArrayLike,
        *,
        weights: npt.ArrayLike | None = None,
        combiner: str | None = None,
        return_found: Literal[False] = False,
        **options: Unpack[LookupOptions],
    ) -> Floats: ...
    @overload
    def lookup_bags(
        self,
        feature: str,
        keys: KeysLike,
        offsets: npt.ArrayLike,
        *,
        weights: npt.ArrayLike | None = None,
        combiner: str | None = None,
        return_found: Literal[True],
        **options: Unpack[LookupOptions],
    ) -> tuple[Floats, Found]: ...
    @overload
    def lookup_bags(
        self,
        feature: str,
        keys: KeysLike,
        offsets: npt.ArrayLike,
        *,
        weights: npt.ArrayLike | None = None,
        combiner: str | None = None,
        return_found: bool = False,
        **options: Unpack[LookupOptions],
    ) -> Any: ...
    def lookup_bags(
        self,
        feature: str,
        keys: KeysLike,
        offsets: npt.ArrayLike,
        *,
        version: int | str | None = None,
        route: bytes | str | None = None,
        **options: Any,
    ) -> Any:
        """`View.lookup_bags` on the view of `view(version, route)`."""
        view = self._acquire(version, route)
        began = time.perf_counter_ns() if self._times.watched else 0
        try:
            return view.lookup_bags(feature, keys, offsets, **options)
        finally:
            self.publisher.release(view)
            if began:
                self._times.add(time.perf_counter_ns() - began)

    @overload
    def lookup_many(
        self, keys: Mapping[str, Any], *, return_found: Literal[False] = False, **options: Unpack[LookupOptions]
    ) -> dict[str, Floats]: ...
    @overload
    def lookup_many(
        self, keys: Mapping[str, Any], *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> dict[str, tuple[Floats, Found]]: ...
    @overload
    def lookup_many(
        self, keys: Mapping[str, Any], *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> dict[str, Any]: ...
    def lookup_many(
        self,
        keys: Mapping[str, Any],
        *,
        version: int | str | None = None,
        route: bytes | str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Look up several features, all of one version and one seq.

        A feature's value is its keys, or for bags a tuple `(keys, offsets)` or `(keys, offsets, weights)`, or a
        JaggedTensor. Returns {feature: result of `lookup` or of `lookup_bags`}.
        """
        features = by_name(keys, "keys")
        with self.view(version, route) as view:
            return view.lookup_many(features, **options)

    def answers_on_gpu(self, number: int) -> bool:
        """`View.answers_on_gpu` of what serves now."""
        with self.view(STABLE) as view:
            return view.answers_on_gpu(number)

    def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        head: str = "",
        version: int | str | None = None,
        route: bytes | str | None = None,
    ) -> Any:
        """`View.predict` on the view of `view(version, route, head)`."""
        with self.view(version, route, head) as view:
            return view.predict(inputs, outputs=outputs)

    @property
    def signature(self) -> Signature | None:
        """Inputs and outputs of the active version's dense part; None if none is served. NotReady if nothing serves."""
        with self.view(STABLE) as view:
            return None if view.session is None else view.session.signature

    def apply_delta(
        self, delta: Delta, data: bytes | memoryview, origin: Origin | None = None, *, lenient: bool = False
    ) -> DeltaResult:
        """Log a delta, read from `data`, and make it visible; `origin` is logged. lenient: see `DeltaPath.apply`."""
        audit = self.state.shared.audit
        with audited(audit, "delta", self.name, self.position, flush=False, seq=delta.seq) as noted:
            result = self.deltas.apply(delta, data, origin, lenient=lenient)
            noted["unchanged"] = not result.applied
        return result

    def apply_run(self, run: Sequence[Incoming]) -> int:
        """`DeltaPath.apply_run`, with a line in the audit for each delta."""
        before = self.position()
        applied = self.deltas.apply_run(run)
        for delta, _, _ in run[:applied]:
            after = {**before, "seq": delta.seq}
            self.state.shared.audit.change(
                "delta", requester(), "done", flush=False, model=self.name, before=before, after=after, seq=delta.seq
            )
            before = after
        return applied

    # --- what there is

    @property
    def active_version(self) -> int | None:
        """The version that `stable` stands for; None if nothing serves."""
        return self.state.live.active_version

    def changing(self, change: str, **fields: Any) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """`events.changes.changing` for this model."""
        return changing(self.state.shared.audit, change, self.name, self.position, **fields)

    def position(self) -> dict[str, Any]:
        """The state that changes alter, for the audit: the active version, the canary, and the log's newest delta."""
        return {"active": self.active_version, "canary": self.routes.canary, "seq": self.state.log.last}

    @property
    def log(self) -> DeltaLog:
        """The delta log. Read only."""
        return self.state.log

    @property
    def served(self) -> Routing:
        """The current routing."""
        return self.publisher.served

    @property
    def ready(self) -> bool:
        """Whether look-ups are answered."""
        return self.publisher.current is not None

    @property
    def versions(self) -> list[int]:
        """Complete versions, ascending."""
        return self.catalogue.numbers

    @property
    def features(self) -> dict[str, FeatureSpec]:
        """The features of the active version. NotReady if nothing serves."""
        with self.view(STABLE) as view:
            return view.features

    @property
    def tables(self) -> dict[str, TableSpec]:
        """The tables of the active version. NotReady if nothing serves."""
        with self.view(STABLE) as view:
            return view.open_version.specs

    def cache(self, table: str, limit: int = 20) -> dict[str, Any]:
        """Cache statistics of a table of the active version: hit rates by size and by minute, the `limit` hottest keys.

        See `reads/cache_report.py`. NotFound for an unknown table.
        """
        with self.view(STABLE) as view:
            return cache_report(view, table, limit)

    def looked_up(self) -> dict[str, dict[str, int]]:
        """How many keys each tier has answered, for each table of the active version, over all versions.

        Empty if nothing serves.
        """
        with self.publisher.pinned() as version:
            tables = {} if version is None else version.tables
            return {name: table.counts.as_dict() for name, table in tables.items()}

    @property
    def problem(self) -> str | None:
        """The worst of `problems`."""
        return next(iter(self.problems().values()), None)

    def problems(self) -> dict[str, str]:
        """Problems by kind, the worst first: why nothing serves, what the log lost, which background work fails."""
        found = {
            "not_serving": self.state.live.start_problem,
            "log_damaged": "; ".join(self.state.log.damage[:3]),
            "canary_not_served": self.routes.problem,
            "partitions": self._partition_problem,
            "background_work": self.housekeeping.problem or self.state.shared.memory.problem,
            "not_fresh": self.freshness.problem,
        }
        if self.state.shared.copied:
            torn = ("not_serving", "log_damaged", "canary_not_served")
            found |= {kind: f"{found[kind]}; {what_to_do(self.where)}" for kind in torn if found[kind]}
        return {kind: why for kind, why in found.items() if why}

    @property
    def _partition_problem(self) -> str | None:
        """Why the served version has other keys than the setting says, or None."""
        view, wanted = self.state.live.served.active, self.state.shared.settings.own
        if view is None or wanted in ((info := view.open_version.info).own, info.partitions):
            return None
        return (
            f"version {info.number} has {_keys_of(info.partitions)}, and the setting partition asks for "
            f"{_keys_of(wanted)}: it serves what it has until a version is loaded with that setting"
        )


def _keys_of(partitions: Partitions | None) -> str:
    return "all keys" if partitions is None else f"partitions {partitions}"
