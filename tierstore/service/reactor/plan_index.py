"""The index of plans by which reactors answer: requests that Python has answered once, as numbers (`kernels/lookupplan.py`).

`PlanIndex.learn` is called when Python plans a request, and keeps the plan if a reactor can run it: look-ups of rows and
bags with binary keys in the body and binary outputs, small enough that no other connection waits for long. `learn_rows` does it
for a front's requests for rows (`kernels/front_rows.py`), all those of a table, version and line by one plan; `learn_queued` for
predictions, which a reactor can only refuse. The number of plans is bounded; the least recently used makes room. Any thread
may call anything; compiled threads read what is published.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.engine.data.cascade import LookupCounts
from tierstore.engine.serving.epochs import Epochs
from tierstore.engine.serving.words import can_be_read
from tierstore.kernels import front_rows
from tierstore.kernels import lookupplan as layout
from tierstore.kernels import reactor_words as kernel
from tierstore.kernels.codec import address_of
from tierstore.kernels.httpdate import DATE_PLACE
from tierstore.kernels.pool import combiner_code
from tierstore.kernels.reactor_refusals import QUEUED
from tierstore.service.dataplane.datatypes import KEY_DATATYPES
from tierstore.service.dataplane.plan import Call, Plan, Request
from tierstore.service.oip.json_request import HEADER_LENGTH, InBody, InferRequest
from tierstore.service.oip.json_response import ResponseLayout
from tierstore.service.reactor.count_rows import CountRows, Counts
from tierstore.types import KeyType, Tier

MOST_PLANS = 512
_SLOTS = 2048  # of the index: a quarter full at most
_MOST_VERSIONS, _MOST_TABLES = 512, 4096  # with counts of their own; requests beyond them are answered by Python
_HEAD = b"HTTP/1.1 200 OK\r\ndate: %b\r\ncontent-length: %d\r\n%b: %d\r\ncontent-type: application/octet-stream\r\n\r\n"
_ROWS_HEAD = b"HTTP/1.1 200 OK\r\ndate: %b\r\ncontent-length: %b\r\ncontent-type: application/octet-stream\r\n\r\n"
_DIGITS = b"-" * front_rows.DIGITS
_NOT_HERE = layout.NOWHERE

Words = npt.NDArray[np.int64]
Place = tuple[bytes, bytes, int]  # path, JSON, how many bytes follow that
Version = tuple[str, int]


class _Variant:
    """How a request is answered under one version and dense part."""

    def __init__(
        self, token: int, head: bytes, words: Words, version: Version | None, tables: list[LookupCounts]
    ) -> None:
        self.token, self.head, self.words, self.version, self.tables = token, head, words, version, tables
        self.alive = True  # while an index has it


_NEVER = _Variant(0, b"", np.empty(0, np.int64), ("", 0), [])  # stands for a request that a reactor cannot answer


class _Planned:
    """A request with its variants, the newest first; `words` is what the reactor reads."""

    def __init__(self, place: Place, model: int, wanted: int, variants: list[_Variant]) -> None:
        path, text, tail_bytes = place
        self.place, self.variants = place, variants
        self._bytes = np.frombuffer(path, np.uint8), np.frombuffer(text, np.uint8)
        at = [address_of(array) for array in self._bytes]
        one, other = (*(address_of(variant.words) for variant in variants), 0)[:2]
        self.words = np.array(
            [at[0], len(path), at[1], len(text), tail_bytes, model, wanted, one, other, time.monotonic_ns()], np.int64
        )

    @property
    def last_used_ns(self) -> int:
        return int(self.words[layout.LAST_USED])

    def slot(self, slots: int) -> int:
        at, length, text, text_bytes, tail_bytes = self.words[: layout.TAIL_BYTES + 1].tolist()
        return int(layout.place(at, length, text, text_bytes, tail_bytes)) & (slots - 1)


class PlanIndex:
    """The index of one service. `shared` is the memory of the reactors, where they find the index."""

    def __init__(self, store: Any, shared: Words, threads: int, absorb: Any) -> None:
        """`absorb` is called with a version, its new counts, and the highest counts of any thread."""
        # constant after construction
        self._store, self._shared = store, shared
        self._epochs: Epochs = store.epochs
        self.versions: CountRows[Version | None] = CountRows(threads, _MOST_VERSIONS, kernel.COUNT_WORDS, absorb)
        self.tables: CountRows[LookupCounts] = CountRows(threads, _MOST_TABLES, kernel.TABLE_COUNT_WORDS, _add_keys)
        shared[kernel.PLAN_SLOTS] = _SLOTS
        self._lock = threading.Lock()
        # guarded by _lock
        self._planned: dict[Place, _Planned] = {}
        self._mixed: set[Place] = set()  # paths of predictions, and of look-ups that only Python can answer
        self._index: Words = np.zeros(_SLOTS, np.int64)
        self._publish([], [])

    def __len__(self) -> int:
        return len(self._planned)

    def learn(
        self,
        model: str,
        view: Any,
        parsed: InferRequest,
        version: int | str | None,
        text: memoryview,
        plan: Plan,
        answer: ResponseLayout,
    ) -> None:
        """Keep how a request of `model` is answered under `view`, if a reactor can do it.

        `text` is its JSON, `version` the one that its path names, `answer` the layout of its outputs, which notes the result.
        """
        if (previous := answer.learned_as) is _NEVER:
            return
        token = self._store.model(model).publisher.token(view)
        if token is None or (previous is not None and previous.alive and previous.token == token):
            return
        tail_bytes, slot = _tail_bytes(parsed, plan, answer), self._epochs.slot(model)
        if tail_bytes is None or slot is None or isinstance(version, str):
            self._never(model, version, answer)
            return
        place = _path(model, version), bytes(text), tail_bytes
        with self._lock:
            if self._knows(place, token):
                return
            new = answer.learned_as = self._variant(token, view, parsed, plan, answer, (model, plan.version))
            if new is not None:
                self._keep(place, slot, _which(version), new)
        if new is None:
            self._never(model, version, answer)

    def _never(self, model: str, version: int | str | None, answer: ResponseLayout) -> None:
        """Only Python can answer such a look-up, and may do so without a thread: nothing of its path is to be refused from now on."""
        answer.learned_as = _NEVER
        if isinstance(version, str):
            return
        place = _path(model, version), b"", QUEUED
        with self._lock:
            self._mixed.add(place)
            queued = self._planned.pop(place, None)
            if queued is not None:
                self._publish([queued], queued.variants)

    def learn_queued(self, model: str, view: Any, version: int | str | None, number: int, refusal: bytes) -> None:
        """Keep that requests of `model`, whose path names `version`, wait for a thread under `view`, which is of version `number`.

        Those that would wait too long are answered with `refusal`, whose bytes `DATE_PLACE` are for the date.
        """
        token, slot = self._store.model(model).publisher.token(view), self._epochs.slot(model)
        if token is None or slot is None or isinstance(version, str):
            return
        place = _path(model, version), b"", QUEUED
        with self._lock:
            if place in self._mixed or self._knows(place, token):
                return
            rows = self._count_rows((model, number), [])
            if rows is None:
                return
            words = [token, _address(refusal), len(refusal), refusal.index(DATE_PLACE), 0, 0, *rows, 0]
            new = _Variant(token, refusal, np.array(words, np.int64), (model, number), [])
            self._keep(place, slot, _which(version), new)

    def learn_rows(self, model: str, view: Any, table: str, path: str, line: str) -> None:
        """Keep how a front's requests for rows of a table, at `path`, are answered under `view`, if a reactor can do it."""
        token, slot = self._store.model(model).publisher.token(view), self._epochs.slot(model)
        cascade = view.open_version.tables[table]
        if token is None or slot is None or not can_be_read(cascade):
            return
        place = path.encode(), line.encode(), front_rows.ANY_SIZE
        with self._lock:
            if self._knows(place, token):
                return
            rows = self._count_rows(None, [cascade.counts])
            if rows is None:
                return
            head = _ROWS_HEAD % (DATE_PLACE, _DIGITS)
            number = list(view.open_version.tables).index(table)
            words = [token, _address(head), len(head), head.index(DATE_PLACE), head.index(_DIGITS), number, *rows]
            variant = _Variant(token, head, np.array(words, np.int64), None, [cascade.counts])
            self._keep(place, slot, layout.ONE_VERSION, variant)

    def _knows(self, place: Place, token: int) -> bool:
        before = self._planned.get(place)
        return before is not None and any(variant.token == token for variant in before.variants)

    def _keep(self, place: Place, slot: int, which: int, new: _Variant) -> None:
        """Have reactors answer requests of `place` by a further variant. Called with the lock held."""
        before = self._planned.get(place)
        variants = [] if before is None else before.variants
        gone, unused = [], variants[1:]
        if before is not None:
            gone.append(before)
        elif len(self._planned) >= MOST_PLANS:
            gone.append(min(self._planned.values(), key=lambda planned: planned.last_used_ns))
            unused = gone[0].variants
        for planned in gone:
            del self._planned[planned.place]
        self._planned[place] = _Planned(place, slot, which, [new, *variants[:1]])
        for variant in unused:
            variant.alive = False
        self._publish(gone, unused)

    def _count_rows(self, version: Version | None, tables: list[LookupCounts]) -> list[int] | None:
        """Where a version and tables are counted, to be released; None where there is no room for one of them."""
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

    def _variant(
        self, token: int, view: Any, parsed: InferRequest, plan: Plan, answer: ResponseLayout, version: Version
    ) -> _Variant | None:
        """None where a table or its counts are out of reach of the reactors."""
        assert answer.header is not None
        assert answer.tail_bytes is not None
        tables = view.open_version.tables
        if not all(can_be_read(tables[call.table.name]) for call in plan.calls):
            return None
        counts = [tables[call.table.name].counts for call in plan.calls]
        rows = self._count_rows(version, counts)
        if rows is None:
            return None
        length = len(answer.header) + answer.tail_bytes
        head = _HEAD % (DATE_PLACE, length, HEADER_LENGTH, len(answer.header)) + answer.header
        order = list(tables)
        calls = [
            _call_words(call, parsed, plan, answer.positions, order.index(call.table.name), row, view)
            for call, row in zip(plan.calls, rows[1:], strict=True)
        ]
        own = [
            token,
            _address(head),
            len(head),
            head.index(DATE_PLACE),
            answer.tail_bytes,
            len(calls),
            rows[0],
            plan.keys,
        ]
        return _Variant(
            token, head, np.array([*own, *(word for call in calls for word in call)], np.int64), version, counts
        )

    def _publish(self, gone: list[_Planned], unused: list[_Variant]) -> None:
        """Give the reactors a new index. Called with the lock held.

        Plans that are not in it any more are kept while a reactor may read them; then the counts of `unused` are released.
        """
        index = np.zeros(_SLOTS, np.int64)
        for planned in self._planned.values():
            at = planned.slot(_SLOTS)
            while index[at]:
                at = (at + 1) & (_SLOTS - 1)
            index[at] = address_of(planned.words)
        old, self._index = self._index, index

        def release() -> None:
            for variant in unused:
                self.versions.release(variant.version)
                for table in variant.tables:
                    self.tables.release(table)

        generation = self._epochs.publish(address_of(self._shared) + 8 * kernel.PLANS_AT, address_of(index))
        if not self._epochs.retire(generation, [old, gone], release):
            release()

    def collect(self) -> None:
        """Bring the stats of versions and tables up to now."""
        self.versions.collect()
        self.tables.collect()


def _add_keys(counts: LookupCounts, new: Counts, _: Counts) -> None:
    counts.add(new[: len(Tier)])


def _which(version: int | None) -> int:
    return layout.ANY_VERSION if version is None else layout.ONE_VERSION


def _path(model: str, version: int | None) -> bytes:
    of = "" if version is None else f"versions/{version}/"
    return f"/v2/models/{model}/{of}infer".encode()


def _address(data: bytes) -> int:
    return address_of(np.frombuffer(data, np.uint8))


def _tail_bytes(parsed: InferRequest, plan: Plan, answer: ResponseLayout) -> int | None:
    """Bytes of binary data of a request that the reactor can answer; None for any other."""
    if plan.dense is not None or not isinstance(parsed.request, Request) or parsed.id is not None:
        return None
    if parsed.timeout_us is not None or answer.header is None or answer.tail_bytes is None or answer.spans:
        return None
    if any(place is None for place in answer.positions) or not all(
        isinstance(source, InBody) for source in parsed.sources
    ):
        return None
    if any(call.table.key is KeyType.STRING for call in plan.calls):
        return None
    # an input whose output is not requested is checked all the same, by Python
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
    return max((source.end for source in parsed.sources if isinstance(source, InBody)), default=0)


def _call_words(
    call: Call, parsed: InferRequest, plan: Plan, positions: list[int | None], table: int, counts: int, view: Any
) -> list[int]:
    """A call as the kernel reads it."""

    def begin(source: int | None) -> int:
        if source is None:
            return _NOT_HERE
        where = parsed.sources[source]
        assert isinstance(where, InBody)
        return where.begin

    def place(outputs: list[int]) -> int:
        if not outputs:
            return _NOT_HERE
        at = positions[outputs[0]]
        assert at is not None
        return at

    n = math.prod(call.spec.shape)
    kind = layout.FOUND_ALONE if not call.rows else layout.BAGS_OF_ROWS if call.pooled else layout.ROWS
    half = bool(call.rows) and plan.specs[call.rows[0]].datatype == "FP16"
    padding = view.open_version.padding.get(call.feature.name)
    a_bag = call.spec.shape[1] if len(call.spec.shape) == 2 else 1
    return [
        table, begin(call.keys), n, kind, max(place(call.rows), 0), int(half), place(call.found),
        0 if call.combiner is None else combiner_code(call.combiner), begin(call.offsets), call.shape[0], a_bag,
        begin(call.weights), int(padding is not None), 0 if padding is None else int(padding), counts,
        int(call.spec.datatype != KEY_DATATYPES[call.table.key][0]),
    ]  # fmt: skip
