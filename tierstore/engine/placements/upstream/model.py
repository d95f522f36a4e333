"""One model as upstream nodes have it together: the `Followed` of a `Follower`. Any thread."""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tierstore.engine.placements.following.followed import LogEntry, Pointer
from tierstore.engine.placements.upstream.choice import (
    Choice,
    Partitions,
    ReportedModel,
    choose,
    ownership,
    partitions_of,
    problem_of,
)
from tierstore.engine.placements.upstream.watch import Watch
from tierstore.errors import Conflict, NotFound, Overloaded, RemoteUnavailable, StorageError, TierstoreError
from tierstore.formats.columns import Malformed
from tierstore.formats.names import KEYS_SUFFIX
from tierstore.formats.snapshot.tensor_shards import npy_header
from tierstore.tiers.answers import reading
from tierstore.tiers.upstream.connections import Document
from tierstore.tiers.upstream.table import Ownership
from tierstore.tiers.upstream.wire import PREFIX

FILE_TIMEOUT_S = 60.0
MOST_DIGESTS = 1024  # of a node's deltas, that are compared with what it says later
MOST_FILES = 10_000
FILES_BYTES = 4 << 30  # of all side files of a version: the dense part is the largest
T = TypeVar("T")
REMOTE_FORMAT = 3  # of `version.json`: rows are on other machines


class VersionDocument(Document):
    """A version as a front opens it: its record, and the names of its side files."""

    record: dict[str, Any]
    files: list[str] = Field(max_length=MOST_FILES)
    colliding: bool


class UpstreamModel:
    """One upstream model. `served` gives the version that this front serves."""

    forgetful = False

    def __init__(
        self, name: str, watches: Sequence[Watch], served: Callable[[], int | None], largest_delta: int
    ) -> None:
        # constant after construction
        self.name, self._watches, self._served, self._largest_delta = name, watches, served, largest_delta
        # guarded by _lock
        self._lock = threading.Lock()
        self._pointer = Pointer()
        self._seen: object = None
        self._lines: dict[int, str] = {}
        self._digests = [dict[int, str]() for _ in watches]  # by node, what it has said of its deltas
        self._built_anew = 0  # how often a node has had other deltas than before
        self._records: dict[tuple[int, str], dict[str, Any]] = {}
        # replaced in one step, by any thread
        self._owned: tuple[list[ReportedModel | None], dict[tuple[int, str], Ownership]] = [], {}

    def states(self) -> list[ReportedModel | None]:
        """The report of each node, None if it gives none."""
        return [watch.state(self.name) for watch in self._watches]

    def pointer(self) -> Pointer:
        states = self.states()
        if not any(state is not None for state in states):
            why = "; ".join(f"{watch.problem or f'{watch.node} is silent'}" for watch in self._watches[:3])
            raise RemoteUnavailable(f"no node upstream answers for model {self.name!r}: {why}")
        if (problem := problem_of(states)) is not None:
            raise StorageError(problem)
        with self._lock:
            self._compare_digests(states)
            choice = choose(states, self._served(), self._lines)
            self._lines.update(choice.lines)
            line = (
                "" if choice.current is None else choice.lines.get(choice.current, self._lines.get(choice.current, ""))
            )
            seen = choice.current, choice.wanted, line, self._wanted_versions(choice)
            pointer = Pointer(
                self._pointer.generation, choice.current, choice.wanted, choice.seq, choice.marks, line,
                server=str(self._built_anew or ""),
            )  # fmt: skip
            if seen != self._seen:
                self._seen, pointer = seen, replace(pointer, generation=self._pointer.generation + 1)
            self._pointer = pointer
            return pointer

    def _compare_digests(self, states: Sequence[ReportedModel | None]) -> None:
        """Notice a node that has another delta under a seq than it had: it has lost its data, and was built anew."""
        for state, known in zip(states, self._digests, strict=True):
            if state is None:
                continue
            if any(known.get(seq, digest) != digest for seq, digest in state.digests.items()):
                self._built_anew += 1
                known.clear()
            known.update(state.digests)
            for seq in sorted(known)[:-MOST_DIGESTS]:
                del known[seq]

    def pointer_from_now(self) -> Pointer:
        """See `Followed`: reports are otherwise as old as the last look."""
        asked_s = time.monotonic()
        for watch in self._watches:
            watch.wake()
        for watch in self._watches:
            watch.await_look(asked_s)
        return self.pointer()

    def _wanted_versions(self, choice: Choice) -> tuple[tuple[int, str], ...]:
        """(number, line) of versions that may be served."""
        wanted = {number for number in (choice.current, choice.wanted) if number is not None}
        return tuple((number, self._lines.get(number, "")) for number in sorted(wanted))

    def versions(self) -> dict[int, dict[str, Any]]:
        with self._lock:
            pointer, lines = self._pointer, dict(self._lines)
        numbers = sorted({number for number in (pointer.current, pointer.wanted) if number is not None})
        return {number: {"state": "ready", "record": self._record(number, lines.get(number, ""))} for number in numbers}

    def _record(self, number: int, line: str) -> dict[str, Any]:
        """The content of `version.json` here. It does not change while the line does not change."""
        with self._lock:
            kept = self._records.get((number, line))
        if kept is not None:
            return kept
        document = self._any(number, line, lambda watch: self._request(watch, number, line))
        with reading(f"what a node says of version {number} of {self.name!r}"):
            record = self._made_of(document, number, line)
        with self._lock:
            self._records = {key: of for key, of in self._records.items() if key[0] in self._lines} | {
                (number, line): record
            }
        return record

    def _made_of(self, document: VersionDocument, number: int, line: str) -> dict[str, Any]:
        record = dict(document.record)
        if any(table.get("colliding") for table in record["tables"].values()) or document.colliding:
            raise StorageError(
                f"version {number} of {self.name!r} has string keys with equal hashes, and a node in front cannot "
                "keep such keys apart: rename one of them"
            )
        rows = {table["name"]: int(table["rows"]) for table in record["manifest"]["tables"]}
        for name, table in record["tables"].items():
            table["rows"] = max(int(table["rows"]), rows[name])  # of all partitions
            table["times"] = False  # the nodes have them, and remove expired rows
        record |= {
            "format": REMOTE_FORMAT,
            "base": "remote",
            "tags": [],
            "loaded_at_s": _load_of(line),
        }
        return record

    def _request(self, watch: Watch, number: int, line: str) -> VersionDocument:
        query = urlencode({"line": line})
        target = f"{PREFIX}/models/{self.name}/versions/{number}?{query}"
        return watch.node.document(VersionDocument, target, timeout_s=FILE_TIMEOUT_S)

    def files(self, number: int, loaded_at_s: float) -> dict[str, bytes]:
        with self._lock:
            line = self._lines.get(number, "")
        if _load_of(line) != loaded_at_s:
            raise Conflict(f"version {number} of {self.name!r} was built anew upstream while it was copied here")
        query = urlencode({"line": line})
        base = f"{PREFIX}/models/{self.name}/versions/{number}/files"

        def fetch(watch: Watch) -> dict[str, bytes]:
            found: dict[str, bytes] = {}
            for name in self._request(watch, number, line).files:
                left = FILES_BYTES - sum(map(len, found.values()))
                found[name] = bytes(
                    watch.node.get(f"{base}/{quote(name)}?{query}", timeout_s=FILE_TIMEOUT_S, most=left)
                )
            return found

        found = self._any(number, line, fetch)
        if partitions_of(self.states()) > 1:  # each node has the warm-up keys of its own partitions
            for name in found:
                if name.endswith(KEYS_SUFFIX):
                    found[name] = self._keys_of_all(number, f"{base}/{quote(name)}?{query}", found[name])
        return found

    def _keys_of_all(self, number: int, target: str, first: bytes) -> bytes:
        """The keys in a file of all nodes, each once.

        Keys that a node does not give are not warmed; that does no other harm.
        """
        parts = [_keys(first)]
        for watch, state in zip(self._watches, self.states(), strict=True):
            if state is not None and number in state.versions:
                with contextlib.suppress(StorageError, NotFound, Overloaded):
                    parts.append(_keys(bytes(watch.node.get(target, timeout_s=FILE_TIMEOUT_S))))
        there = [part for part in parts if part is not None]
        if not there:
            return first
        keys = np.concatenate([part for part in there if part.dtype.kind == there[0].dtype.kind])
        _, at = np.unique(keys, return_index=True)
        out = io.BytesIO()
        np.save(out, keys[np.sort(at)], allow_pickle=False)
        return out.getvalue()

    def _any(self, number: int, line: str, fetch: Callable[[Watch], T]) -> T:
        """The result of the first node that serves this line of a version."""
        states, problems = self.states(), []
        for watch, state in zip(self._watches, states, strict=True):
            if state is None or number not in state.versions or state.versions[number].line != line:
                continue
            try:
                return fetch(watch)
            except (StorageError, NotFound, Overloaded) as error:
                problems.append(str(error))
        raise RemoteUnavailable(
            f"no node gives version {number} of {self.name!r}: {'; '.join(problems) or 'none serves it'}"
        )

    def read(self, after: int, count: int) -> list[LogEntry]:
        problems: list[str] = []
        for watch, state in zip(self._watches, self.states(), strict=True):
            if state is None or state.log is None or not state.log[0] <= after < state.log[1]:
                continue
            try:
                entries = watch.node.deltas(
                    self.name, after, count, timeout_s=FILE_TIMEOUT_S, largest=self._largest_delta
                )
            except TierstoreError as error:
                problems.append(str(error))
                continue
            if entries:
                return [LogEntry(entry.seq, entry.digest, entry.data, 0) for entry in entries]
        if problems:
            raise RemoteUnavailable(f"no node gives delta {after + 1} of {self.name!r}: {'; '.join(problems[:3])}")
        return []

    def put_back(self, seq: int, digest: str, data: bytes, after: str | None) -> bool:
        raise AssertionError("a node in front acknowledges nothing")

    def beat(self, node: str, report: Mapping[str, Any]) -> None:
        """Nothing: the nodes learn from each request which version is served here (`Watch`)."""

    # --- for look-ups

    def line(self, number: int, loaded_at_s: float) -> str:
        """The line by which a version is opened: that of its record, so that rows and all else are of one load."""
        with self._lock:
            return next(of for _, of in self._records if _load_of(of) == loaded_at_s)

    def ownership(self, number: int, line: str) -> Ownership:
        """Which node can be asked for which rows at this moment."""
        states, (before, owned) = self.states(), self._owned
        if before != states:  # a state is equal only to itself
            owned = {}
            self._owned = states, owned
        if (number, line) not in owned:
            owned[number, line] = ownership(states, number, line)
        return owned[number, line]

    def refresh(self, node: int) -> None:
        """Ask a node again whose state differs from its last report."""
        self._watches[node].wake()

    # --- for the status

    def coverage(self) -> dict[str, Any]:
        """How many partitions there are, and which of them no node has in the current version, as [first, last]."""
        states = self.states()
        with self._lock:
            current = self._pointer.current
            line = "" if current is None else self._lines.get(current, "")
        covered: Partitions = np.zeros(partitions_of(states), np.bool_)
        if current is not None:
            covered = np.asarray(ownership(states, current, line).owns.any(0))
        edges = np.flatnonzero(np.diff(np.concatenate([[True], covered, [True]]).astype(np.int8)))
        return {"count": len(covered), "missing": [[int(a), int(b) - 1] for a, b in edges.reshape(-1, 2)]}


def _load_of(line: str) -> float:
    """The `loaded_at_s` of a line: records differ by it."""
    return float(int.from_bytes(hashlib.sha256(line.encode()).digest()[:6]))


def _keys(data: bytes) -> npt.NDArray[Any] | None:
    """The keys of a `.npy` file; None for a file that has none."""
    stream = io.BytesIO(data)
    try:
        dtype, shape = npy_header(stream)
    except Malformed:
        return None
    nbytes = len(data) - stream.tell()
    if len(shape) != 1 or dtype.kind not in "iuSU" or not dtype.itemsize or shape[0] * dtype.itemsize != nbytes:
        return None
    return np.frombuffer(data, dtype, offset=stream.tell())
