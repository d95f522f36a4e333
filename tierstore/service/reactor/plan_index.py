"""The index of plans by which reactors answer: how requests of a structure are answered, as numbers
(`lookup/plans.py`).

`PlanIndex.learn` is called when Python has planned a request, and keeps the plan of its structure if a reactor can run
it: look-ups of rows and bags, and predictions of scores alone, whose graph a thread of Python runs
(`predictions.py`), with all outputs binary or all in JSON. For other predictions it notes that a reactor can refuse
them.
`learn_rows` does it for a front's requests for rows (`lookup/front_rows.py`), with one plan for all requests of a
table, version and line. The number of plans is bounded; the least recently used of its set makes room. Plans learned
in a second are bounded too, so that a client that sends a new structure each time costs no more than Python's answers.
Any thread may call anything; compiled threads read the index while it is filled.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.engine.data.cascade import LookupCounts
from tierstore.engine.serving.epochs import Epochs
from tierstore.engine.serving.routing import CANARY, STABLE
from tierstore.engine.serving.served import labels_word
from tierstore.kernels.codec import address_of
from tierstore.lookup import front_rows, plan_search
from tierstore.lookup import plans as layout
from tierstore.reactor import layout as kernel
from tierstore.service.dataplane.plan import Plan
from tierstore.service.limits.rates import RateLimits
from tierstore.service.reactor.count_rows import CountRows, Counts
from tierstore.service.reactor.plan_sources import PlanSource
from tierstore.service.reactor.scorings import Scoring, Unfit, can_score, scoring_of, scoring_words
from tierstore.service.reactor.variants import (
    VersionPlan,
    address,
    head_words,
    is_runnable,
    prediction_words,
    variant_words,
)
from tierstore.types import Tier, model_and_head
from tierstore.wire import request_record
from tierstore.wire.http1.date import DATE_PLACE

MOST_LEARNED = 256  # at a time, and LEARNED_A_SECOND
LEARNED_A_SECOND = 64
_MOST_UNFIT = 1024  # structures that reactors cannot answer, which are not tried again
_MOST_VERSIONS, _MOST_TABLES = 512, 4096  # with counts of their own; Python answers requests beyond them
_ROWS_HEAD = b"HTTP/1.1 200 OK\r\ndate: %b\r\ncontent-length: %b\r\ncontent-type: application/octet-stream\r\n\r\n"
_DIGITS = b"-" * front_rows.DIGITS

Words = npt.NDArray[np.int64]
Place = tuple[bytes, bytes, int]  # path, structure, form
Version = tuple[str, str, int]  # a protocol, a model, its version


class _Variant:
    """How a request is answered under one version and dense part. `kept`: the objects that its words point to."""

    scoring = 0  # the number of a prediction's scoring

    def __init__(
        self, words: npt.NDArray[Any], version: Version | None, tables: list[LookupCounts], *kept: object
    ) -> None:
        self.token, self.words, self.version = int(words["token"]), words, version
        self.tables, self._kept = tables, kept
        self.at = address_of(words)


class _Planned:
    """A structure with its variants, newest first; `words` is for the reactor."""

    def __init__(
        self, place: Place, model: int, rates: Words | None, wanted: int, labelled: int, variants: list[_Variant]
    ) -> None:
        path, structure, form = place
        self.place, self.variants, self._rates = place, variants, rates
        self._bytes = path + structure
        path_at = address(self._bytes)
        structure_at = path_at + len(path)
        one, other = (*(variant.at for variant in variants), 0)[:2]
        self.words = layout.PLAN.make(
            path_at=path_at,
            path_bytes=len(path),
            structure_at=structure_at,
            structure_bytes=len(structure),
            form=form,
            model=model,
            rates_at=0 if rates is None else address_of(rates),
            wanted=wanted,
            labelled=labelled,
            variant=one,
            other_variant=other,
            last_used=time.monotonic_ns(),
        )
        self.hash = int(plan_search.place_of(path_at, len(path), structure_at, len(structure), form))

    @property
    def last_used_ns(self) -> int:
        return int(self.words["last_used"])


class PlanIndex:
    """The index of one service. `shared` is the memory of the reactors, where they find the index."""

    def __init__(
        self,
        store: Any,
        rates: RateLimits,
        shared: npt.NDArray[Any],
        threads: int,
        absorb: Any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rates` are those that reactors draw from. `absorb` is called with a version, its new counts, and the
        highest counts of any thread.
        """
        # constant after construction
        self._store, self._rates, self._clock = store, rates, clock
        self._epochs: Epochs = store.epochs
        self.versions: CountRows[Version | None] = CountRows(
            threads, _MOST_VERSIONS, kernel.VERSION_COUNTS.bytes // 8, absorb
        )
        self.tables: CountRows[LookupCounts] = CountRows(threads, _MOST_TABLES, kernel.TABLE_COUNT_WORDS, _add_keys)
        self.scorings: dict[int, Scoring] = {}  # by number; kept while a thread may get a job of it
        self._numbers = itertools.count(1)
        self._index = layout.ENTRY.new((layout.SETS, layout.WAYS))  # read by compiled threads
        self._index_at = shared["plans_at"] = address_of(self._index)
        self._lock = threading.Lock()
        # guarded by _lock
        self._planned: dict[Place, _Planned] = {}
        self._sets: dict[int, dict[int, _Planned]] = {}  # by set and way
        self._unfit: OrderedDict[tuple[Place, int], None] = OrderedDict()  # with the token under which that was found
        self._record = np.zeros(request_record.RECORD_BYTES // 8, np.int64)
        self._structure = np.zeros(request_record.MOST_STRUCTURE_BYTES, np.uint8)
        self._scanned = address_of(self._record), address_of(self._structure)
        self._may_learn, self._learned_at_s = float(MOST_LEARNED), clock()

    def __len__(self) -> int:
        return len(self._planned)

    def learn(
        self,
        model: str,
        view: Any,
        version: int | str | None,
        plan: Plan,
        plan_source: PlanSource,
        refusal: bytes | None = None,
    ) -> None:
        """Teach reactors how requests of `model`, or of a head, with this structure are answered under `view`, if they
        can.

        `version` is the one in the request. `refusal`: for a prediction, these bytes refuse a request that would wait
        too long; over HTTP they have `DATE_PLACE` for the date. Otherwise the reactor begins the prediction, if it
        can.
        """
        if plan.dense is not None and refusal is None:
            return
        owner, _ = model_and_head(model)
        publisher = self._store.model(owner).publisher
        token, slot = publisher.token(view), self._epochs.slot(owner)
        if token is None or slot is None:
            return
        wanted, served = _wanted(version), publisher.served
        labelled = labels_word(served) if wanted == layout.BY_LABEL else 0
        if labelled and served.labels.get(version) != plan.version:  # it has moved since
            return
        with self._lock:
            place = self._place(plan_source)
            if (
                place is None
                or self._knows(place, token, labelled)
                or (place, token) in self._unfit
                or not self._has_time()
            ):
                return
            of, counted = VersionPlan(token, view, plan, plan_source), (plan_source.protocol, model, plan.version)
            if refusal is not None:
                new = self._predicting(of, plan_source, refusal, counted)
                new = new or self._refusing(token, refusal, counted)
            else:
                new = self._variant(of, plan_source, counted)
            if new is None:
                self._unfit[place, token] = None
                if len(self._unfit) > _MOST_UNFIT:
                    self._unfit.popitem(last=False)
                return
            self._keep(place, owner, slot, wanted, labelled, new)

    def learn_rows(self, model: str, view: Any, table: str, path: str, line: str) -> None:
        """Teach reactors how a front's requests for rows of a table, at `path`, are answered under `view`, if they
        can.
        """
        token, slot = self._store.model(model).publisher.token(view), self._epochs.slot(model)
        cascade = view.open_version.tables[table]
        if token is None or slot is None:
            return
        place = path.encode(), line.encode(), layout.STORED_ROWS
        with self._lock:
            if self._knows(place, token, 0) or not self._has_time():
                return
            rows = self._count_rows(None, [cascade.counts])
            if rows is None:
                return
            head = _ROWS_HEAD % (DATE_PLACE, _DIGITS)
            number = list(view.open_version.tables).index(table)
            words = layout.FRONT_ROWS.make(
                token=token, **head_words(head), digits_at=head.index(_DIGITS), table=number, counts=rows[0],
                table_counts=rows[1],
            )  # fmt: skip
            variant = _Variant(words, None, [cascade.counts], head)
            self._keep(place, model, slot, layout.ONE_VERSION, 0, variant)

    def _place(self, plan_source: PlanSource) -> Place | None:
        """The place of a plan source's structure; None if reactors do not know its form. Called with the lock held."""
        size = plan_source.scan(*self._scanned)
        return (plan_source.path, self._structure[:size].tobytes(), plan_source.form) if size else None

    def _has_time(self) -> bool:
        """Whether one more may be learned now; it is counted. Called with the lock held."""
        now_s = self._clock()
        passed_s, self._learned_at_s = now_s - self._learned_at_s, now_s
        self._may_learn = min(float(MOST_LEARNED), self._may_learn + passed_s * LEARNED_A_SECOND)
        if self._may_learn < 1:
            return False
        self._may_learn -= 1
        return True

    def _knows(self, place: Place, token: int, labelled: int) -> bool:
        """Whether the plan at a place has a variant for the token, and is of these labels."""
        before = self._planned.get(place)
        if before is None or before.words["labelled"] != labelled:
            return False
        return any(variant.token == token for variant in before.variants)

    def _keep(self, place: Place, model: str, slot: int, wanted: int, labelled: int, new: _Variant) -> None:
        """Have reactors answer requests of `place` by a further variant. Called with the lock held."""
        before = self._planned.get(place)
        variants = [] if before is None else [variant for variant in before.variants if variant.token != new.token]
        if wanted == layout.BY_LABEL:  # a label stands for one version at a time
            variants = []
        rates = self._rates.words_of_model(model)
        planned = _Planned(place, slot, rates, wanted, labelled, [new, *variants[:1]])
        ways = self._sets.setdefault(planned.hash & (layout.SETS - 1), {})
        if before is not None:
            way = next(way for way, other in ways.items() if other is before)
            unused = [variant for variant in before.variants if variant not in planned.variants]
        elif len(ways) < layout.WAYS:
            way, unused = len(ways), []
        else:
            way = min(ways, key=lambda way: ways[way].last_used_ns)
            before = ways[way]
            unused = before.variants
            del self._planned[before.place]
        self._planned[place] = ways[way] = planned
        self._publish(planned, way, before, unused)

    def _publish(self, planned: _Planned, way: int, before: _Planned | None, unused: list[_Variant]) -> None:
        """Put a plan into the index, in place of `before`. Called with the lock held.

        The replaced plan is kept while a reactor may read it; then the counts of `unused` are released. A reader in
        between sees a hash with the plan of another one, whose bytes it compares.
        """
        number = planned.hash & (layout.SETS - 1)
        self._index["hash"][number, way] = planned.hash
        entry_at = self._index_at + layout.ENTRY.bytes * (number * layout.WAYS + way)
        generation = self._epochs.publish(entry_at + layout.ENTRY.offset("plan"), address_of(planned.words))
        if before is None:
            return

        def release() -> None:
            for variant in unused:
                self._release(variant)

        if not self._epochs.retire(generation, before, release):
            release()

    def _release(self, variant: _Variant) -> None:
        """Release the counts of a variant that no reactor uses any more."""
        self.scorings.pop(variant.scoring, None)
        self.versions.release(variant.version)
        for table in variant.tables:
            self.tables.release(table)

    def _count_rows(self, version: Version | None, tables: list[LookupCounts]) -> list[int] | None:
        """The places for counts of a version and tables, to be released; None if there is no room for one of them."""
        held: list[tuple[CountRows[Any], Any]] = []
        rows: list[int] = []
        for of, key in ((self.versions, version), *((self.tables, table) for table in tables)):
            row = of.acquire(key)  # type: ignore[attr-defined]
            if row is None:
                for other, key in held:
                    other.release(key)
                return None
            held.append((of, key))  # type: ignore[arg-type]
            rows.append(row)
        return rows

    def _refusing(self, token: int, refusal: bytes, version: Version) -> _Variant | None:
        rows = self._count_rows(version, [])
        if rows is None:
            return None
        scoring = layout.SCORING.make(**head_words(refusal))
        words = layout.LOOKUP.make(token=token, counts=rows[0], scoring=address_of(scoring))
        return _Variant(words, version, [], refusal, scoring)

    def _predicting(
        self, of: VersionPlan, plan_source: PlanSource, refusal: bytes, version: Version
    ) -> _Variant | None:
        """The variant of a prediction; None if a reactor cannot begin it, or there is no room for counts.

        Called with the lock held.
        """
        plan, view = of.plan, of.view
        tables, session = view.open_version.tables, view.session
        if not can_score(plan_source, plan, session) or len(plan.specs) > request_record.MOST_TENSORS:
            return None
        on_device = any(tables[call.table.name].device is not None for call in plan.calls)
        apart = on_device and view.rows_on(session) is not None
        number = next(self._numbers)
        try:
            scoring, parts = scoring_words(number, plan_source.request, plan, session, refusal, apart=apart)
        except Unfit:
            return None
        pieces = plan_source.score_pieces(plan, parts[2])
        counts = [tables[call.table.name].counts for call in plan.calls]
        rows = None if pieces is None else self._count_rows(version, counts)
        if pieces is None or rows is None:
            return None
        words, kept = prediction_words(of, pieces, rows, scoring)
        new = _Variant(words, version, counts, refusal, parts, *kept)
        new.scoring = number
        self.scorings[number] = scoring_of(plan_source, version[1], plan, session, parts, apart=apart)
        return new

    def _variant(self, of: VersionPlan, plan_source: PlanSource, version: Version) -> _Variant | None:
        """The variant; None if a reactor cannot answer, or there is no room for a table or its counts."""
        plan, tables = of.plan, of.view.open_version.tables
        if not is_runnable(plan) or not plan_source.is_plain():
            return None
        pieces = plan_source.pieces(plan)
        if pieces is None:
            return None
        counts = [tables[call.table.name].counts for call in plan.calls]
        rows = self._count_rows(version, counts)
        if rows is None:
            return None
        words, kept = variant_words(of, pieces, rows)
        return _Variant(words, version, counts, *kept)

    def collect(self) -> None:
        """Bring the stats of versions and tables up to date."""
        self.versions.collect()
        self.tables.collect()


def _add_keys(counts: LookupCounts, new: Counts, _: Counts) -> None:
    counts.add(new[: len(Tier)])


def _wanted(version: int | str | None) -> int:
    """The kernel's number for the version in a request's path."""
    if version is None:
        return layout.ANY_VERSION
    if isinstance(version, int):
        return layout.ONE_VERSION
    return {STABLE: layout.STABLE, CANARY: layout.ONLY_CANARY}.get(version, layout.BY_LABEL)
