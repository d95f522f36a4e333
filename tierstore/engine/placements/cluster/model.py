"""A cluster's model on this node, and the verbs that any node accepts: deltas, loads, switches and drops.

Any thread may call. An acknowledged change is in the cluster, and this node serves it; the others follow in a moment.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tierstore.arguments import check_share
from tierstore.config import Settings
from tierstore.engine.deltas.incoming import DecodedDeltas
from tierstore.engine.deltas.origin import Origin
from tierstore.engine.lifecycle.rules import (
    check_active,
    check_canary,
    check_expected,
    check_unused,
    is_active,
    no_canary,
    served_last,
)
from tierstore.engine.model import Model
from tierstore.engine.placement import ModelVerbs, Refusals
from tierstore.engine.placements.cluster.ingester import Ingester
from tierstore.engine.placements.cluster.shared_load import SharedLoad
from tierstore.engine.placements.cluster.shared_model import (
    Commands,
    Owed,
    Recovering,
    SharedModel,
    order_text,
    owed_text,
)
from tierstore.engine.placements.cluster.target import DROPPING, READY, ClusterTarget, Writers
from tierstore.engine.placements.following.followed import Forked, Pointer
from tierstore.engine.placements.following.follower import Follower, remote_rows_of
from tierstore.engine.serving.order import DEACTIVATED, REPLACED, ROLLBACK, WITHDRAWN, ServingOrder
from tierstore.engine.serving.routing import Routing
from tierstore.errors import Conflict, DeltaError, NotReady, Overloaded, SequenceGap, StorageError, TooLarge
from tierstore.formats.delta.reader import Delta, DeltaHeader
from tierstore.tiers.cluster.write import Writer
from tierstore.types import DeltaResult, Progress, ProgressFn

log = logging.getLogger(__name__)

PREPARE_S = 600.0  # how long a switch waits until every node has made the version ready
VISIBLE_S = 30.0  # how long a delta may take until this node serves it
_PAUSE_S = 0.05  # between two tries to append


class ClusterModel:
    """One model on this node. `new_target`: the target of a load. `decoded`: deltas of all models."""

    def __init__(
        self, model: Model, cluster: Commands, node: str, owner: str, settings: Settings, writers: Writers,
        refusals: Refusals,
        new_target: Callable[[ClusterModel], ClusterTarget], decoded: DecodedDeltas,
    ) -> None:  # fmt: skip
        self.model, self.shared, self._node, self._decoded = model, SharedModel(cluster, model.name), node, decoded
        self.follower = Follower(model, self.shared, node, decoded.read)

        def open_writer(
            name: str, number: int, row_bytes: dict[str, int], tags: Sequence[bytes], **more: Any
        ) -> Writer:
            """For the line that counts."""
            line = self.shared.pointer().undone.line(number)
            return writers(name, number, row_bytes, tags, line=line, **more)

        self.open_load = lambda number: SharedLoad(self.shared, number, owner)
        self.ingester = Ingester(model, self.shared, node, settings, open_writer, decoded, self.open_load)
        self.open_writer, self._refusals = open_writer, refusals
        self._refused: tuple[int, str] | None = None  # after which delta none was taken here, and why
        self._switching = threading.Lock()
        self.placement = ModelVerbs(
            leads=lambda: self.ingester.epoch is not None, load=lambda: new_target(self), held=self.held,
            apply_delta=self.apply_delta, next_in_run=lambda: None, apply_run=lambda run: 0,
            activate=self.activate, rollback=self.rollback, canary=self.canary,
            rollback_to=self.rollback_to, promote=self.promote, withdraw=self.withdraw, deactivate=self.deactivate,
            drop=self.drop,
            **refusals.verbs(model.name),
        )  # fmt: skip

    def start(self) -> None:
        """Serve what the cluster says, and follow it."""
        self.follower.start()
        self.ingester.start()

    def close(self) -> None:
        """Stop, and report to the others that this node is gone."""
        self.ingester.close()
        self.follower.close()
        try:
            self.shared.withdraw_node(self._node)
        except StorageError as error:
            log.warning("the cluster does not hear that this node ends: %s", error)

    # --- deltas

    def held(self, header: DeltaHeader) -> DeltaResult | None:
        """The result for a delta that both the cluster's log and this node have."""
        if self.model.log.digest(header.seq) != header.digest or (self.follower.pointer.seq or 0) < header.seq:
            return None
        return self._result(header.seq, applied=False)

    def _result(self, seq: int, *, applied: bool) -> DeltaResult:
        pointer = self.follower.pointer
        undone = not applied and pointer.undone.range_of(seq) is not None
        return DeltaResult(self.model.name, seq, applied, send_as=(pointer.seq or 0) + 1 if undone else None)

    def apply_delta(self, delta: Delta, data: bytes | memoryview, origin: Origin | None = None) -> DeltaResult:
        """Acknowledge a delta in the cluster's log, and wait until this node serves it. Errors as `Store.apply_delta`.

        The origin is not kept: every node notes by itself how far it has read.
        """
        pointer = self.shared.pointer()
        if pointer.deactivated:
            raise self.model.publisher.served.nothing(self.model.name, " before sending deltas")
        if pointer.seq is not None and delta.seq == pointer.seq + 1:
            self._check(delta)
        applied = self._append(self._decoded.add(delta), data)
        if not self.follower.wait_for(delta.seq, VISIBLE_S):
            raise Overloaded(
                f"delta {delta.seq} of {self.model.name!r} is in the cluster's log, and this node does not serve it "
                f"yet: {self.follower.problem or 'it is behind'}; sending it again does no harm"
            )
        return self._result(delta.seq, applied=applied)

    def _append(self, delta: Delta, data: bytes | memoryview) -> bool:
        """Append a delta to the cluster's log, if that has everything that this node has.

        Waits until lost deltas are put back.
        """
        seq, mine, until_s = delta.seq, self.model.log, time.monotonic() + VISIBLE_S
        while True:
            held, newest = mine.digest(seq), mine.last or 0
            if held not in (None, delta.digest):
                raise Conflict(
                    f"delta {seq} of {self.model.name!r} is held with other content; give new content a new seq, "
                    f"{newest + 1} is next"
                )
            try:
                return self.shared.append(seq, delta.digest, data, mine.digest(seq - 1))
            except SequenceGap as gap:
                if gap.expected_seq > newest:
                    raise
                if seq > newest + 1:
                    raise SequenceGap(
                        f"delta {seq} of {self.model.name!r} came out of turn; {newest + 1} is next",
                        expected_seq=newest + 1,
                    ) from gap
                if time.monotonic() > until_s:
                    self._note_refusal(str(gap))
                    raise Overloaded(f"{gap}: this node puts back what the cluster has lost; send it again") from gap
            except Forked as error:  # this node has noticed it, and begins again
                if time.monotonic() > until_s:
                    raise Overloaded(str(error)) from error
            except Owed as error:
                self._note_refusal(str(error))
                raise
            except Recovering as error:
                if not self._recover() and time.monotonic() > until_s:
                    self._note_refusal(f"{error}; it waits for {', '.join(self._waited_for()) or 'nobody any more'}")
                    raise
            self.follower.wake()
            time.sleep(_PAUSE_S)

    def _recover(self) -> bool:
        """After another server has taken over: accept new deltas again, once nodes have put back what they have.

        If no node had a delta that all rows have, the log goes on after it; for a delta that only some rows have, no
        other content is accepted.
        """
        pointer = self.shared.pointer()
        if pointer.recovering is None:
            return True
        states = []
        if pointer.current is not None:
            tags = [tag.encode() for tag in self.shared.version(pointer.current)["tags"]]
            with self.open_writer(self.model.name, pointer.current, {}, tags) as writer:
                states = [state for state in writer.states() if state is not None]
        reached = min((state.seq for state in states), default=None)
        digests = {state.applying: state.digest for state in states}
        newest = max(digests, default=0)
        owed = (newest, digests[newest]) if newest > max(reached or 0, pointer.seq or 0) and digests[newest] else None
        return self.shared.recovered(pointer.recovering, reached, digests.get(reached or 0, ""), owed)

    def _note_refusal(self, why: str) -> None:
        """Keep for the status why a delta was refused that any other one would be too."""
        there, held = self.shared.pointer().seq, self.model.log.last
        if there is not None and held is not None and held > there:
            why = (
                f"the cluster has lost deltas {there + 1} to {held}, and does not take them back from this node: load "
                f"a snapshot with a delta_seq of {held} or more"
            )
        self._refused = there or 0, why

    def _waited_for(self) -> list[str]:
        """The nodes that have not said yet that they have put back what they have."""
        server = self.shared.pointer().server
        return sorted(name for name, of in self.shared.beat(self._node, None).items() if of.get("server") != server)

    def _check(self, delta: Delta) -> None:
        """DeltaError for a delta that does not fit what is served: once in the log, every node would skip it.

        TooLarge for a delta that not every node can hold in memory.
        """
        with self.model.publisher.hold_all() as served:
            overlays = self.model.deltas.check(delta, served)
            budget, nbytes = self.model.state.shared.overlay_budget, sum(overlay.nbytes for overlay in overlays)
            reports = self.shared.beat(self._node, None)
            budgets = {name: of["overlay_budget"] for name, of in reports.items() if "overlay_budget" in of}
            smallest, node = min([(total, name) for name, total in budgets.items()] + [(budget.total, self._node)])
            if nbytes > smallest:
                raise TooLarge(
                    f"a delta of {nbytes:,} bytes in memory is beyond overlay_budget of node {node}, {smallest:,}; "
                    "split it or raise the setting there"
                )
            if budget.used + nbytes > budget.total:
                raise Overloaded(
                    f"deltas come faster than the cluster takes them: {budget.used:,} of {budget.total:,} overlay "
                    "bytes are in use; send it again"
                )
        if colliding := [table for overlay in overlays for table in overlay.colliding]:
            table = colliding[0]
            raise DeltaError(
                f"delta {delta.seq}: two keys of table {table!r} have one hash, and a model in a cluster cannot keep "
                "them apart: rename one of them"
            )

    # --- versions

    def activate(
        self, number: int, *, force: bool = False, expected_active: int | None = None, progress: ProgressFn
    ) -> None:
        """Have every node make a version ready, then move the pointer. Conflict if a node cannot."""
        self._switch(number, force=force, expected_active=expected_active, left=REPLACED, progress=progress)

    def _switch(
        self, number: int, *, force: bool, expected_active: int | None, left: str, progress: ProgressFn
    ) -> None:
        with self._switching:
            self._check_ready(number, force=force)
            pointer = self._announce(number, expected_active)
            if pointer is not None:
                try:
                    self._await_nodes(number, pointer.generation, progress)
                    self._change(lambda pointer: self._moved(pointer, number, left))
                except BaseException:
                    self._withdraw(number)
                    raise
            self._await_this(lambda served: served.versions[:1] == (number,), f"version {number} is current")

    def _await_this(self, holds: Callable[[Routing], bool], what: str) -> None:
        """Wait until this node serves what the pointer says."""
        if not self.follower.wait_served(holds, PREPARE_S):
            why = self.follower.problem or "it is behind"
            raise NotReady(f"model {self.model.name!r}: {what}, and this node does not serve so yet: {why}")

    def _check_ready(self, number: int, *, force: bool) -> None:
        record, pointer = self.shared.version(number), self.shared.pointer()
        if record["state"] != READY:
            raise Conflict(f"version {number} of {self.model.name!r} cannot be activated: it is {record['state']}")
        if force and number != pointer.current:
            self._refusals.check("force", model=self.model.name)
        if number in pointer.undone.outdated:
            raise Conflict(
                f"version {number} of {self.model.name!r} holds deltas that were undone, and what they replaced was "
                "not kept: load its snapshot again, or a newer one"
            )
        mark = max(record["record"]["manifest"]["delta_seq"], pointer.marks.get(number, 0))
        if pointer.seq is not None and mark < pointer.seq:
            entries = self.shared.read(mark, 1)
            if not entries or entries[0].seq != mark + 1:
                raise Conflict(
                    f"version {number} of {self.model.name!r} is stale: it holds deltas up to {mark}, and the log "
                    "begins later; load a newer snapshot"
                )

    def _announce(self, number: int, expected_active: int | None) -> Pointer | None:
        """Have all nodes make a version ready. Returns the new pointer, None for the version that is current."""

        def wanted(pointer: Pointer) -> dict[str, float | str | None]:
            if pointer.current == number:
                return {}
            check_expected(self.model.name, expected_active, pointer.current)
            if pointer.wanted not in (None, number):
                raise Conflict(
                    f"model {self.model.name!r} is being switched to version {pointer.wanted}; wait until that is over"
                )
            self._check_not_rolling(pointer)
            return {} if pointer.wanted == number else {"wanted": number}

        self._change(wanted)
        pointer = self.shared.pointer()
        return None if pointer.current == number else pointer

    def _await_nodes(self, number: int, generation: int, progress: ProgressFn) -> None:
        """Wait until every node that reports is ready; a node that is gone is not waited for."""
        until_s = time.monotonic() + PREPARE_S
        while True:
            reports = self.shared.beat(self._node, None)
            ready = [n for n, of in reports.items() if number in (of.get(k) for k in ("prepared", "active", "canary"))]
            progress(Progress("prepare", len(ready), len(reports)))
            for name, of in reports.items():
                failed = of.get("failed")
                if failed and failed["version"] == number and failed["generation"] >= generation:
                    raise Conflict(
                        f"version {number} of {self.model.name!r} is not ready on node {name}: {failed['why']}"
                    )
            if self._node in ready and len(ready) == len(reports):
                return
            if time.monotonic() >= until_s:
                slow = sorted(set(reports) - set(ready))
                raise Conflict(
                    f"version {number} of {self.model.name!r} was not ready within {PREPARE_S:.0f} s "
                    f"on {', '.join(slow)}"
                )
            if self.shared.pointer().wanted != number:
                raise Conflict(f"the switch to version {number} of {self.model.name!r} was withdrawn")
            time.sleep(0.02)

    def _moved(self, pointer: Pointer, number: int, left: str) -> dict[str, float | str | None]:
        """The changes of the pointer from which on a version is current for every node, and no other is the canary."""
        seq = max(self.model.catalogue.info(number).manifest.delta_seq, pointer.seq or 0)
        order = self._order(pointer).after((pointer.current, pointer.canary), (number, None), left)
        return {
            "current": number, "wanted": None, "canary": None, "share": None, "seq": seq, "left": order_text(order),
            "deactivated": None,
        }  # fmt: skip

    def _order(self, pointer: Pointer) -> ServingOrder:
        """The order in which versions served, without those that are gone."""
        there = [number for number, record in self.shared.versions().items() if record["state"] == READY]
        order = pointer.order_of(there)
        return order.without({number for number, _ in order.left} - {*there})

    def _change(self, changes: Callable[[Pointer], dict[str, float | str | None]]) -> None:
        """Change the pointer, given its state at that moment."""
        self.shared.update(changes)
        self.follower.wake()

    def _withdraw(self, number: int) -> None:
        with contextlib.suppress(Conflict):
            self.shared.update(lambda pointer: {"wanted": None} if pointer.wanted == number else {})

    def rollback(self, *, force: bool, expected_active: int | None, progress: ProgressFn) -> int:
        """Go back to the version that served last. Returns it. Errors as `Store.rollback`."""
        there = [number for number, record in self.shared.versions().items() if record["state"] == READY]
        pointer = self.shared.pointer()
        current = check_active(self.model.name, pointer.current, expected_active, there)
        before = served_last(self.model.name, current, there, pointer.order_of(there))
        self._switch(before, force=force, expected_active=current, left=ROLLBACK, progress=progress)
        return before

    def rollback_to(self, seq: int, *, expected_active: int | None, progress: ProgressFn) -> int:
        """Bring the active version back to its state right after delta `seq`, on every node. Returns its number.

        Errors as `Store.rollback`. The ingester does it (`undo.py`); this waits for that, and for this node.
        """
        with self._switching:
            there = [number for number, record in self.shared.versions().items() if record["state"] == READY]
            pointer = self.shared.pointer()
            number = check_active(self.model.name, pointer.current, expected_active, there)
            lowest, last = self.model.catalogue.info(number).manifest.delta_seq, pointer.seq or 0
            if not lowest <= seq <= last:
                raise Conflict(
                    f"model {self.model.name!r}: expected a seq from {lowest} to {last}, got {seq}; the snapshot of "
                    f"version {number} holds deltas up to {lowest}, and {last} is the newest one"
                )

            def wanted(now: Pointer) -> dict[str, float | str | None]:
                if now.current != number or now.wanted is not None or now.canary is not None:
                    raise Conflict(
                        f"model {self.model.name!r} is being switched, or has a canary: a rollback to a delta is of "
                        "the active version alone; wait for the switch, or withdraw the canary"
                    )
                self._check_not_rolling(now, seq)
                return {} if now.rollback == seq else {"rollback": seq, "refused": None}

            # again if what ended was one whose end the cluster had lost, with deltas that came after it
            while pointer.rollback is not None or pointer.undone.as_of(seq, last).differs_from(pointer.undone, 0, last):
                self._change(wanted)
                pointer = self._await_rollback(seq, progress)
            self._await_this(
                lambda served: (
                    served.active is not None
                    and remote_rows_of(served.active.open_version).line == pointer.line
                    and self.model.log.undone.rollbacks == pointer.undone.rollbacks
                ),
                f"version {number} is as of delta {seq}",
            )
            return number

    def _await_rollback(self, seq: int, progress: ProgressFn) -> Pointer:
        until_s = time.monotonic() + PREPARE_S
        while (pointer := self.shared.pointer()).rollback is not None:
            progress(Progress("roll back", 0, 1))
            if time.monotonic() > until_s:
                raise NotReady(
                    f"model {self.model.name!r} is not rolled back to delta {seq} yet: "
                    f"{self.ingester.problem or 'the node with the lease is behind'}; it goes on by itself"
                )
            time.sleep(_PAUSE_S)
        if pointer.refused:
            raise Conflict(pointer.refused)
        return pointer

    def _check_not_rolling(self, pointer: Pointer, to: int | None = None) -> None:
        if pointer.rollback not in (None, to):
            raise Conflict(
                f"model {self.model.name!r} is being rolled back to delta {pointer.rollback}; wait until that is over"
            )

    def deactivate(self) -> None:
        """Stop serving the model, also its canary, on every node; its versions are kept."""
        with self._switching:

            def nothing(pointer: Pointer) -> dict[str, float | str | None]:
                self._check_not_rolling(pointer)
                if pointer.wanted is not None:
                    raise Conflict(
                        f"model {self.model.name!r} is being switched to version {pointer.wanted}; wait until that is "
                        "over"
                    )
                if pointer.current is None:
                    return {}
                order = self._order(pointer).after((pointer.current, pointer.canary), (None, None), DEACTIVATED)
                return {
                    "current": None, "canary": None, "share": None, "left": order_text(order), "deactivated": 1,
                }  # fmt: skip

            self._change(nothing)
            self._await_this(lambda served: not served.views, "it serves nothing")

    def drop(self, number: int) -> None:
        """Remove a version from the cluster, slowly. Conflict for one that is current or wanted."""
        record, pointer = self.shared.version(number), self.shared.pointer()
        check_unused(self.model.name, number, (pointer.current, pointer.wanted), pointer.canary)
        if record["state"] != DROPPING and not self.shared.record(number, record, {**record, "state": DROPPING}):
            raise Conflict(f"version {number} of {self.model.name!r} was changed by another node; try again")
        self.follower.wake()

    # --- the canary

    def canary(self, number: int, share: float, *, force: bool, progress: ProgressFn) -> None:
        """Have every node make a version ready, then serve it as the canary.

        Errors as `Store.canary`; Conflict if a node cannot.
        """
        share = check_share(share)
        with self._switching:
            pointer = self.shared.pointer()
            check_canary(self.model.name, number, pointer.current, pointer.canary)
            if pointer.canary != number:
                self._check_ready(number, force=force)
                announced = self._announce(number, None)
                if announced is None:
                    raise is_active(self.model.name, number)
                try:
                    self._await_nodes(number, announced.generation, progress)
                    self._change(lambda _: {"canary": number, "share": share, "wanted": None})
                except BaseException:
                    self._withdraw(number)
                    raise
            else:
                self._change(lambda pointer: {"share": share} if pointer.canary == number else self._no_canary())
            self._await_this(
                lambda served: served.versions[1:] == (number,) and served.share == share,
                f"version {number} is the canary",
            )

    def promote(self) -> int:
        """Make the canary, which every node serves already, the current version. Returns its number."""
        with self._switching:
            number = self.shared.pointer().canary
            if number is None:
                self._no_canary()
            self._change(lambda p: self._moved(p, number, REPLACED) if p.canary == number else self._no_canary())
            self._await_this(lambda served: served.versions == (number,), f"version {number} is current")
            return number

    def withdraw(self) -> int:
        """Stop serving the canary, on every node; the version is kept. Returns its number."""
        number = self.shared.pointer().canary
        if number is None:
            self._no_canary()
        self._change(lambda p: self._withdrawn(p) if p.canary == number else self._no_canary())
        self._await_this(
            lambda served: number not in served.versions[1:], f"version {number} is not the canary any more"
        )
        return number

    def _withdrawn(self, pointer: Pointer) -> dict[str, float | str | None]:
        order = self._order(pointer).after((pointer.current, pointer.canary), (pointer.current, None), WITHDRAWN)
        return {"canary": None, "share": None, "left": order_text(order)}

    def _takes_none(self, pointer: Pointer) -> str | None:
        """Why no delta is taken, and what to do; None if one is, as far as this node knows."""
        if pointer.owed is not None:
            return owed_text(self.model.name, pointer.owed)
        after, why = self._refused or (None, "")
        return why if after is not None and after == pointer.seq else None

    def _rollback_to(self, pointer: Pointer) -> int | None:
        """What a rollback would go to, of the versions that this node knows."""
        there = self.model.versions
        return None if pointer.current is None else pointer.order_of(there).last_of(there)

    def _no_canary(self) -> NoReturn:
        raise no_canary(self.model.name)

    def status(self) -> dict[str, Any]:
        """What this node knows of the model in the cluster, without asking the cluster."""
        follower, pointer = self.follower, self.follower.pointer
        problems = follower.silent, follower.unready, self.ingester.problem, follower.lost, self._takes_none(pointer)
        return {
            "reachable": follower.silent is None,
            "problem": "; ".join(filter(None, problems)) or None,
            "current": pointer.current,
            "wanted": pointer.wanted,
            "canary": pointer.canary,
            "share": pointer.share,
            "seq": pointer.seq,
            "rollback_to": self._rollback_to(pointer),
            "watermarks": {str(number): mark for number, mark in sorted(pointer.marks.items())},
            "ingester": self.ingester.epoch is not None,
            "epoch": self.ingester.epoch,
            "rolling_back_to": pointer.rollback,
        }
