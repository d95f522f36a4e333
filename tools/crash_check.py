"""What a store must hold after the steps that a journal notes: for `tools/crash_test.py`."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import tierstore
from tierstore.errors import Conflict, SequenceGap
from tools.crash_work import DENSE, HEAD, KEYS, MODEL, Seqs, delta, expected, expected_dense, has_head


@dataclass(frozen=True)
class Routing:
    """Which version is active, which the canary with how many percent, and what the labels stand for."""

    active: int | None = None
    canary: int | None = None
    percent: int = 0
    labels: frozenset[tuple[int, int]] = frozenset()

    def after(self, verb: str, *numbers: int) -> Routing:
        """What it is once that is done."""
        verb = "activate" if verb == "rollback" else verb
        if verb == "promote" or (verb == "activate" and numbers[0] == self.canary):
            return Routing(self.canary, labels=frozenset(pair for pair in self.labels if pair[1] == self.canary))
        if verb == "load" or (verb == "activate" and numbers[0] != self.active):
            return Routing(numbers[0])
        if verb == "deactivate":
            return Routing()
        if verb in ("withdraw", "undo"):
            return Routing(self.active, labels=frozenset(pair for pair in self.labels if pair[1] != self.canary))
        if verb == "canary":
            return replace(self, canary=numbers[0], percent=numbers[1])
        if verb == "label":
            others = {pair for pair in self.labels if pair[0] != numbers[0]}
            return replace(self, labels=frozenset({*others, (numbers[0], numbers[1])}))
        return self

    @classmethod
    def of(cls, status: dict[str, Any]) -> Routing:
        canary = status["canary"]
        free = {(int(name.removeprefix("label")), of) for name, of in status["labels"].items() if name[-1].isdigit()}
        if canary is None:
            return cls(status["active_version"], labels=frozenset(free))
        return cls(status["active_version"], canary["version"], round(canary["share"] * 100), frozenset(free))


@dataclass
class Acknowledged:
    """What the journal says. `unfinished` is the step that was under way, which may have happened or not."""

    seed: int
    last: int = 0
    routing: Routing = Routing()
    versions: dict[int, int] = field(default_factory=dict)  # version → delta_seq
    undone: Seqs = frozenset()
    undone_at: dict[int, Seqs] = field(default_factory=lambda: {0: frozenset()})  # by delta: when it was applied
    before: list[int] = field(
        default_factory=list
    )  # versions that were active and not left by a rollback, in that order
    unfinished: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    def read(self, lines: list[str]) -> None:
        for line in lines:
            kind, verb, *numbers = line.split()
            self.unfinished = [verb, *numbers] if kind == "begin" else []
            if kind == "done":
                self.done[verb] += 1
                self._apply(verb, *map(int, numbers))

    def _apply(self, verb: str, *numbers: int) -> None:
        if verb == "load":
            self._forget(numbers[0])
        self.moved(verb, self.routing.after(verb, *numbers))
        if verb in ("delta", "run"):
            self.moved_to(numbers[-1])
        elif verb == "load":
            self.versions[numbers[0]] = numbers[1]
            self.moved_to(max(self.last, numbers[1]))
        elif verb in (
            "activate",
            "rollback",
        ):  # one that was loaded, and killed before it served, may be ahead of the log
            self.moved_to(max(self.last, self.versions[numbers[0]]))
        elif verb == "undo":
            self.undone = self.undone_after(numbers[0])
        elif verb == "drop":
            self.versions.pop(numbers[0], None)
            self._forget(numbers[0])

    def moved(self, verb: str, to: Routing) -> None:
        """The routing changes by that verb."""
        if to.active != self.routing.active:
            if self.routing.active is not None and verb != "rollback":
                self.before.append(self.routing.active)
            self._forget(to.active)
        self.routing = to

    def _forget(self, number: int | None) -> None:
        self.before = [other for other in self.before if other != number]

    def moved_to(self, last: int) -> None:
        """The log ends with that delta now."""
        for seq in range(self.last + 1, last + 1):
            self.undone_at[seq] = self.undone
        self.last = last

    def undone_after(self, seq: int) -> Seqs:
        """What is undone after a rollback to `seq`: what was when it was applied, and all that came since."""
        return self.undone_at[seq] | {*range(seq + 1, self.last + 1)}


class Wrong(AssertionError):
    """The store does not hold what it must."""


def check(acknowledged: Acknowledged, store: tierstore.Store) -> None:
    """Compare the store with what was acknowledged, and record what the killed step had done."""
    verb, numbers = (acknowledged.unfinished or [""])[0], [int(number) for number in acknowledged.unfinished[1:]]
    if MODEL not in store.models():
        _demand(not acknowledged.versions, f"the model is gone; it had versions {acknowledged.versions}")
        return
    status = store.status()["models"][MODEL]
    _demand(status["problem"] is None, f"problem: {status['problem']}")
    routing, last = Routing.of(status), status["log"]["last"] or 0
    active = routing.active
    versions = {entry["version"]: entry["delta_seq"] for entry in status["versions"]}

    may = {acknowledged.routing, acknowledged.routing.after(verb, *numbers)}
    _demand(
        routing in may, f"{routing} serves, {acknowledged.routing} did, and {acknowledged.unfinished} was under way"
    )
    undone = frozenset(seq for first, end in status["undone"] for seq in range(first, end + 1))
    before = acknowledged.undone
    after = acknowledged.undone_after(numbers[0]) if verb == "undo" else before
    _demand(undone in (before, after), f"{undone} is undone, {before} was, and {acknowledged.unfinished} was under way")
    acknowledged.undone = undone
    new = set(versions) - set(acknowledged.versions)
    _demand(not new or (verb == "load" and new == {numbers[0]}), f"version {new} came from nowhere")
    gone = set(acknowledged.versions) - set(versions) - ({numbers[0]} if verb == "drop" else set())
    _demand(
        routing.active not in gone and routing.canary not in gone, f"versions {gone} are gone, and {routing} serves"
    )
    ends = {acknowledged.last}
    if verb in ("delta", "run"):
        ends.update(range(numbers[0], numbers[-1] + 1))
    if verb in ("load", "activate", "rollback") and active == numbers[0]:
        ends.add(max(acknowledged.last, versions[active]))
    _demand(
        last in ends,
        f"the log ends with {last}, acknowledged was {acknowledged.last}, under way {acknowledged.unfinished}",
    )
    acknowledged.moved_to(last)
    acknowledged.moved(verb, routing)
    acknowledged.versions, acknowledged.unfinished = versions, []
    before = [number for number in acknowledged.before if number in versions]
    back = None if active is None else before[-1] if before else None
    _demand(
        status["rollback_to"] == back,
        f"a rollback would go to {status['rollback_to']}, and {acknowledged.before} served before, in that order",
    )
    _demand(
        len(versions) >= 3 or not gone or bool(acknowledged.done["drop"] + (verb == "drop")),
        f"versions {gone} are gone, and {sorted(versions)} are all that is kept",
    )

    report = store.verify()
    _demand(report.ok or not versions, f"verify: {report.problems}")  # without a version there is nothing to verify
    if active is None:
        return
    for version in (active, routing.canary):
        if version is not None:
            _check_version(acknowledged, store, version)
    _check_order(acknowledged, store, status["log"]["start"])


def check_rows(what: str, table: str, want: np.ndarray, rows: np.ndarray, found: np.ndarray) -> None:
    """Raise Wrong where these are not the rows of all KEYS of a table; NaN stands for no row."""
    wrong = np.flatnonzero((found != ~np.isnan(want[:, 0])) | (rows != np.nan_to_num(want)).any(axis=1))
    if wrong.size:
        at = wrong[0]
        raise Wrong(
            f"{what}: {wrong.size} rows of {table!r} are wrong, the first of key {KEYS[table][at]!r}: "
            f"expected {want[at][0]}, got {rows[at][0]} (found: {found[at]})"
        )


def _check_version(acknowledged: Acknowledged, store: tierstore.Store, version: int) -> None:
    want = expected(acknowledged.seed, version, acknowledged.versions[version], acknowledged.last, acknowledged.undone)
    for _ in range(2):  # from disk, then from memory
        got = store.model(MODEL).lookup_many(KEYS, version=version, return_found=True)
        for table, (rows, found) in got.items():
            check_rows(f"version {version} at {acknowledged.last}", table, want[table], rows, found)

    if DENSE:
        users = KEYS["user"][:8]
        of = expected_dense(version, acknowledged.versions[version], acknowledged.last, acknowledged.undone)
        rows = np.nan_to_num(want["user"][:8]).sum(axis=1, keepdims=True) + np.float32(of)
        with store.model(MODEL).view(version) as view:
            _demand(view.heads.keys() - {""} == ({HEAD} if has_head(of) else set()), f"version {version}: its heads")
            for head in view.heads:
                score = view.predict({"user": users}, head=head)
                _demand(
                    np.allclose(score, rows, rtol=1e-6),
                    f"version {version}: scores {score.ravel()} of {head!r}, expected {rows.ravel()}",
                )


def _check_order(acknowledged: Acknowledged, store: tierstore.Store, start: int) -> None:
    with contextlib.suppress(SequenceGap):
        store.apply_delta(delta(acknowledged.seed, acknowledged.last + 2))
        raise Wrong("a gap was accepted")
    if acknowledged.last > start:
        _demand(not store.apply_delta(delta(acknowledged.seed, acknowledged.last)).applied, "a delta was applied twice")
        with contextlib.suppress(Conflict):
            store.apply_delta(delta(acknowledged.seed, acknowledged.last, other=True))
            raise Wrong("other content under a seq that is held was accepted")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)
