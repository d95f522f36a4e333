"""Plans that the reactor answers by: requests that Python has answered once, as numbers (`kernels/lookupplan.py`).

`Plans.learn` is told of a request when Python plans it, and keeps it if the reactor can run it: look-ups of rows and
bags with binary keys in the body and binary answers, small enough that no other connection waits for long. Their number
is bounded; the least lately used makes room. Any thread may call anything; compiled threads read what is published.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.engine.epochs import Epochs
from tierstore.engine.table import LookupCounts
from tierstore.engine.words import can_be_read
from tierstore.kernels import lookupplan as layout
from tierstore.kernels import reactor_words as kernel
from tierstore.kernels.codec import address_of
from tierstore.kernels.httpdate import DATE_BYTES
from tierstore.kernels.pool import combiner_code
from tierstore.service.oip.codec import HEADER_LENGTH, InBody, InferRequest, Layout
from tierstore.service.plane.plan import KEY_DATATYPES, Call, Plan, Request
from tierstore.service.reactor.counts import CountRows, Counts
from tierstore.types import KeyType, Tier

MOST_PLANS = 512
_SLOTS = 2048  # of the index: a quarter full at most
_MOST_VERSIONS, _MOST_TABLES = 512, 4096  # with counts of their own; what is beyond is answered by Python
_HEAD = b"HTTP/1.1 200 OK\r\ndate: %b\r\ncontent-length: %d\r\n%b: %d\r\ncontent-type: application/octet-stream\r\n\r\n"
_DATE = b"." * DATE_BYTES
_NOT_HERE = layout.NOWHERE

Words = npt.NDArray[np.int64]
Place = tuple[bytes, bytes, int]  # path, JSON, how many bytes follow that
Version = tuple[str, int]


class _Variant:
    """How a request is answered under one version and dense part."""

    def __init__(self, token: int, head: bytes, words: Words, version: Version, tables: list[LookupCounts]) -> None:
        self.token, self.head, self.words, self.version, self.tables = token, head, words, version, tables
        self.alive = True  # until no index has it


_NEVER = _Variant(
    0, b"", np.empty(0, np.int64), ("", 0), []
)  # instead of one of a request that a reactor cannot answer


class _Planned:
    """A request with its variants, newest first; `words` is what the reactor reads."""

    def __init__(self, place: Place, model: int, asked: int, variants: list[_Variant]) -> None:
        path, text, tail_bytes = place
        self.place, self.variants = place, variants
        self._bytes = np.frombuffer(path, np.uint8), np.frombuffer(text, np.uint8)
        at = [address_of(array) for array in self._bytes]
        one, other = (*(address_of(variant.words) for variant in variants), 0)[:2]
        self.words = np.array([at[0], len(path), at[1], len(text), tail_bytes, model, asked, one, other, 0], np.int64)

    @property
    def last_used_ns(self) -> int:
        return int(self.words[layout.LAST_USED])

    def slot(self, slots: int) -> int:
        at, length, text, text_bytes, tail_bytes = self.words[: layout.TAIL_BYTES + 1].tolist()
        return int(layout.place(at, length, text, text_bytes, tail_bytes)) & (slots - 1)


class Plans:
    """Of one service. `shared` is the reactors' own words, by which they find the index."""

    def __init__(self, store: Any, shared: Words, threads: int, absorb: Any) -> None:
        """`absorb` is called with a version, what was counted of it, and the highest counts of any thread."""
        # constant after construction
        self._store, self._shared = store, shared
        self._epochs: Epochs = store.epochs
        self.versions: CountRows[Version] = CountRows(threads, _MOST_VERSIONS, kernel.COUNT_WORDS, absorb)
        self.tables: CountRows[LookupCounts] = CountRows(threads, _MOST_TABLES, kernel.TABLE_COUNT_WORDS, _add_keys)
        shared[kernel.PLAN_SLOTS] = _SLOTS
        self._lock = threading.Lock()
        # guarded by _lock
        self._planned: dict[Place, _Planned] = {}
        self._index: Words = np.zeros(_SLOTS, np.int64)
        self._publish([], [])

    def __len__(self) -> int:
        return len(self._planned)

    def learn(
        self,
        model: str,
        view: Any,
        asked: InferRequest,
        version: int | str | None,
        text: memoryview,
        plan: Plan,
        answer: Layout,
    ) -> None:
        """Keep how a request of `model` is answered under `view`, if the reactor can do it.

        `text` is its JSON, `version` what its path names, `answer` where its outputs go, which notes what came of it.
        """
        known: _Variant | None = answer.known_by
        if known is _NEVER:
            return
        token = self._store.model(model).publisher.token(view)
        if token is None or (known is not None and known.alive and known.token == token):
            return
        tail_bytes, slot = _tail_bytes(asked, plan, answer), self._epochs.slot(model)
        if tail_bytes is None or slot is None or isinstance(version, str):
            answer.known_by = _NEVER
            return
        path = f"/v2/models/{model}/infer" if version is None else f"/v2/models/{model}/versions/{version}/infer"
        place = path.encode(), bytes(text), tail_bytes
        with self._lock:
            before = self._planned.get(place)
            variants = [] if before is None else before.variants
            if any(variant.token == token for variant in variants):
                return
            new = answer.known_by = self._variant(token, view, asked, plan, answer, (model, plan.version))
            if new is None:
                answer.known_by = _NEVER
                return
            gone, left = [], variants[1:]
            if before is not None:
                gone.append(before)
            elif len(self._planned) >= MOST_PLANS:
                gone.append(min(self._planned.values(), key=lambda planned: planned.last_used_ns))
                left = gone[0].variants
            for planned in gone:
                del self._planned[planned.place]
            which = layout.ANY_VERSION if version is None else layout.ONE_VERSION
            self._planned[place] = _Planned(place, slot, which, [new, *variants[:1]])
            for variant in left:
                variant.alive = False
            self._publish(gone, left)

    def _variant(
        self, token: int, view: Any, asked: InferRequest, plan: Plan, answer: Layout, version: Version
    ) -> _Variant | None:
        """None where a table or its counts are out of the reactor's reach."""
        assert answer.header is not None
        assert answer.tail_bytes is not None
        tables = view.holder.tables
        if not all(can_be_read(tables[call.table.name]) for call in plan.calls):
            return None
        counts = [tables[call.table.name].counts for call in plan.calls]
        held: list[tuple[CountRows[Any], Any]] = []
        rows: list[int] = []
        for of, key in ((self.versions, version), *((self.tables, count) for count in counts)):
            row = of.hold(key)  # type: ignore[attr-defined]
            if row is None:
                for other, key in held:
                    other.leave(key)
                return None
            held.append((of, key))  # type: ignore[arg-type]
            rows.append(row)
        length = len(answer.header) + answer.tail_bytes
        head = _HEAD % (_DATE, length, HEADER_LENGTH, len(answer.header)) + answer.header
        order = list(tables)
        calls = [
            _call_words(call, asked, plan, answer.places, order.index(call.table.name), row, view)
            for call, row in zip(plan.calls, rows[1:], strict=True)
        ]
        own = [token, _address(head), len(head), head.index(_DATE), answer.tail_bytes, len(calls), rows[0], plan.keys]
        return _Variant(
            token, head, np.array([*own, *(word for call in calls for word in call)], np.int64), version, counts
        )

    def _publish(self, gone: list[_Planned], left: list[_Variant]) -> None:
        """Give the reactors a new index. With the lock held.

        What is not in it any more is kept while one of them may be at it, and then the counts of `left` are given back.
        """
        index = np.zeros(_SLOTS, np.int64)
        for planned in self._planned.values():
            at = planned.slot(_SLOTS)
            while index[at]:
                at = (at + 1) & (_SLOTS - 1)
            index[at] = address_of(planned.words)
        old, self._index = self._index, index

        def leave() -> None:
            for variant in left:
                self.versions.leave(variant.version)
                for table in variant.tables:
                    self.tables.leave(table)

        generation = self._epochs.publish(address_of(self._shared) + 8 * kernel.PLANS_AT, address_of(index))
        if not self._epochs.retire(generation, [old, gone], leave):
            leave()

    def collect(self) -> None:
        """Bring the figures of versions and tables up to now."""
        self.versions.collect()
        self.tables.collect()


def _add_keys(counts: LookupCounts, new: Counts, _: Counts) -> None:
    counts.add(new[: len(Tier)])


def _address(data: bytes) -> int:
    return address_of(np.frombuffer(data, np.uint8))


def _tail_bytes(asked: InferRequest, plan: Plan, answer: Layout) -> int | None:
    """Bytes of binary data of a request that the reactor can answer; None for any other."""
    if plan.dense is not None or not isinstance(asked.request, Request) or asked.id is not None:
        return None
    if asked.timeout_us is not None or answer.header is None or answer.tail_bytes is None or answer.spans:
        return None
    if any(place is None for place in answer.places) or not all(isinstance(source, InBody) for source in asked.sources):
        return None
    if any(call.table.key is KeyType.STRING for call in plan.calls):
        return None
    # what nobody asks for is checked all the same, by Python
    if any(
        not call.rows and (not call.found or call.offsets is not None or call.weights is not None)
        for call in plan.calls
    ):
        return None
    bags = sum(call.shape[0] for call in plan.calls if call.pooled)
    if plan.keys > layout.MOST_KEYS or bags > layout.MOST_BAGS or plan.work_bytes > layout.MOST_WORK_BYTES:
        return None
    if len(answer.header) > kernel.HEAD_ROOM - 512 or answer.tail_bytes > layout.MOST_WORK_BYTES:
        return None
    return max((source.end for source in asked.sources if isinstance(source, InBody)), default=0)


def _call_words(
    call: Call, asked: InferRequest, plan: Plan, places: list[int | None], table: int, counts: int, view: Any
) -> list[int]:
    """A call as the kernel reads it."""

    def begin(source: int | None) -> int:
        if source is None:
            return _NOT_HERE
        where = asked.sources[source]
        assert isinstance(where, InBody)
        return where.begin

    def place(outputs: list[int]) -> int:
        if not outputs:
            return _NOT_HERE
        at = places[outputs[0]]
        assert at is not None
        return at

    n = math.prod(call.spec.shape)
    kind = layout.FOUND_ALONE if not call.rows else layout.BAGS_OF_ROWS if call.pooled else layout.ROWS
    half = bool(call.rows) and plan.specs[call.rows[0]].datatype == "FP16"
    padding = view.holder.padding.get(call.feature.name)
    a_bag = call.spec.shape[1] if len(call.spec.shape) == 2 else 1
    return [
        table, begin(call.keys), n, kind, max(place(call.rows), 0), int(half), place(call.found),
        0 if call.combiner is None else combiner_code(call.combiner), begin(call.offsets), call.shape[0], a_bag,
        begin(call.weights), int(padding is not None), 0 if padding is None else int(padding), counts,
        int(call.spec.datatype != KEY_DATATYPES[call.table.key][0]),
    ]  # fmt: skip
