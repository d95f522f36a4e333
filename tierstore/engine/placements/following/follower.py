"""The follower of one model whose rows are on other machines: one thread for its versions, pointer and log.

It is written for a cluster; nodes upstream are another `Followed`. A delta in the cluster's log is put into the node's
own log and overlays, as if a client had sent it here, and becomes visible; its overlay is folded (dropped) once all
rows in the cluster have it. A version that all nodes should make ready is opened and warmed next to the one that
serves, and served when the pointer moves to it.

The node's own log is a copy of the end of the cluster's, begun again at each start. Only hot keys survive a crash.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tierstore.engine.deltas.log import NewEntry
from tierstore.engine.model import Model
from tierstore.engine.placements.following.followed import Followed, Forked, LogEntry, Pointer
from tierstore.engine.placements.following.rows import RemoteRows
from tierstore.engine.placements.following.version_copies import VersionCopies
from tierstore.engine.serving.routing import Routing
from tierstore.engine.serving.undone import Undone
from tierstore.engine.versions.version import Version
from tierstore.errors import Closed, Conflict, Overloaded, StorageError, TierstoreError, TooLarge
from tierstore.formats.delta.reader import Delta
from tierstore.threads import Thread
from tierstore.types import Progress

log = logging.getLogger(__name__)

SHORTEST_S, LONGEST_S = 0.01, 0.1  # between two checks of the pointer: after a change, and in quiet
BEAT_S = 1.0
SILENT_S = 3.0
AGAIN_S = 5.0  # until a version that is to be served, and could not be, is tried again though nothing has changed
BATCH = 64  # entries of the log that are read together


@dataclass(frozen=True, slots=True)
class _Failure:
    """A version that could not be made ready. `generation`: of the pointer then; `seq`: of its rows then."""

    version: int
    generation: int
    why: str
    seq: int
    at_s: float


class Follower:
    """Follows one model. `start` before anything else; `close` before the model is closed.

    `decode` decodes a delta from the log's bytes and their digest.
    """

    def __init__(self, model: Model, shared: Followed, node: str, decode: Callable[[bytes, str], Delta]) -> None:
        self.model, self.shared, self._node, self._decode = model, shared, node, decode
        self._copies = VersionCopies(model, shared)
        self._thread = Thread(target=self._run, name=f"tierstore-follow-{model.name}", daemon=True)
        self._switch: threading.Thread | None = None  # of the version that is being made ready
        self._wake = threading.Event()
        # guarded by changed, which is notified of every change
        self.changed = threading.Condition()
        self.pointer = Pointer()
        self.problem: str | None = None  # why the cluster cannot be followed at the moment
        self._lost: tuple[int | None, str] | None = None  # see `lost`, and the version that served then
        self._prepared: int | None = None
        self._failed: _Failure | None = None
        self._interrupted = False  # what is being made ready has to begin again
        self._stopping = False
        # for the thread
        self._opening: int | None = None  # the version that was made ready last
        self._reported: tuple[float, dict[str, Any]] = (0.0, {})
        self._seen: tuple[str, int] = ("", -1)  # the pointer's server and generation: another server may count again
        self._put_back_to = ""  # the server that has everything that this node has
        self._history = ""  # the pointer's server, where this node's log is of its deltas alone
        self._looked_s = time.monotonic()

    # --- start and stop

    def start(self) -> None:
        """Serve what the pointer names, with every delta that is acknowledged by now; then follow.

        A failure becomes the `problem`, and is tried again: the other models serve.
        """
        try:
            self._look(start=True)
        except Exception as error:  # noqa: BLE001 - as above
            self._note_problem(error)
        self._thread.start()

    def close(self) -> None:
        with self.changed:
            self._stopping = True
            self.changed.notify_all()
        self._wake.set()
        for thread in (self._thread, self._switch):
            if thread is not None and thread.ident is not None:
                thread.join()

    def wake(self) -> None:
        """Check the cluster at once."""
        self._wake.set()

    def wait_for(self, seq: int, timeout_s: float) -> bool:
        """Wait until this node serves the delta `seq`. False if it does not in that time."""
        self.wake()
        with self.changed:
            return self.changed.wait_for(lambda: self._stopping or self._has(seq), timeout_s) and self._has(seq)

    def _has(self, seq: int) -> bool:
        view = self.model.publisher.current
        return view is not None and view.seq >= seq

    def wait_served(self, holds: Callable[[Routing], bool], timeout_s: float) -> bool:
        """Wait until a condition holds for what this node serves."""
        self.wake()
        with self.changed:
            return self.changed.wait_for(lambda: self._stopping or holds(self.model.publisher.served), timeout_s)

    @property
    def silent(self) -> str | None:
        """Why this node does not know the cluster's state; None if it does. A call may hang for long."""
        silent_s = time.monotonic() - self._looked_s
        return self.problem or (f"it has not answered for {silent_s:.0f} s" if silent_s > SILENT_S else None)

    @property
    def lost(self) -> str | None:
        """The deltas that this node had and that differ in the cluster now; until another version serves."""
        lost = self._lost
        return lost[1] if lost is not None and lost[0] == self.model.active_version else None

    @property
    def unready(self) -> str | None:
        """Why this node does not serve the version that it should; None if it does, or has not failed to."""
        failed, current = self._failed, self.pointer.current
        if failed is None or current in (None, self.model.active_version) or failed.version != current:
            return None
        return f"version {failed.version}, which is to be served, is not ready here: {failed.why}"

    # --- the thread

    def _run(self) -> None:
        pause_s = SHORTEST_S
        while True:
            self._wake.wait(pause_s)
            self._wake.clear()
            if self._stopping:
                return
            try:
                moved = self._look()
                self._note_problem(None)
                pause_s = SHORTEST_S if moved else min(LONGEST_S, pause_s * 1.5)
            except Exception as error:  # noqa: BLE001 - whatever it is, what is in memory is served
                self._note_problem(error)
                pause_s = min(1.0, max(LONGEST_S, pause_s * 2))

    def _note_problem(self, error: Exception | None) -> None:
        why = None if error is None else str(error)
        if error is not None and why != self.problem:
            log.error(
                "model %s: the cluster is not followed: %s",
                self.model.name,
                why,
                exc_info=not isinstance(error, TierstoreError),
            )
        with self.changed:
            self.problem = why
            self.changed.notify_all()

    def _look(self, *, start: bool = False) -> bool:
        """Do what the cluster says now. Returns whether anything was new."""
        pointer = self.shared.pointer()
        self._looked_s = time.monotonic()
        moved = pointer != self.pointer
        seen, waits = (pointer.server, pointer.generation), False
        self._copies.fetched = set()
        if seen != self._seen or self._copies.lacks(pointer):
            records = self.shared.versions()
            waits = self._switches and self._copies.differs(self._opening, records)
            if waits:  # its copy is replaced once nobody opens it
                self._interrupt()
            else:
                pointer = self._copies.update(records, pointer)
        self._note_marks(pointer)
        with self.changed:
            self.pointer = pointer
            self.changed.notify_all()
        self._check_history(pointer)
        try:
            self._check_digest(pointer)
            self._put_back(pointer)
            self._apply(pointer)
        except Forked:
            self._follow_instead(pointer)
        self._put_back_to = pointer.server
        if start and pointer.current is not None:
            self._begin(pointer)
            self._beat()  # so that rows wait for this node from now on
            self._serve(pointer.current, lambda: None, start=True)
        else:
            self.model.switcher.follow_canary(pointer.current, pointer.canary, pointer.share)
            self._check_line(pointer)
            if pointer.deactivated and self.model.active_version is not None:
                self.model.switcher.deactivate()
            if not waits:
                self._follow(pointer)
        self._note_undone(pointer)
        if not waits:
            self._seen = seen  # only now: a failure is tried again
        self._beat()
        with self.changed:
            self.changed.notify_all()
        return moved

    def _note_marks(self, pointer: Pointer) -> None:
        publisher, catalogue = self.model.publisher, self.model.catalogue
        served = {view.version: view.open_version for view in publisher.served.views}
        opening = self._opening if self._switches else None  # its dense part is of the mark that it is opened with
        for number, mark in pointer.marks.items():
            info, version = catalogue.get(number), served.get(number)
            if version is not None:
                if number == pointer.current and self._is_replaced(pointer):
                    continue  # the mark is of rows that it does not read
                if (rows := remote_rows_of(version)).reached < mark:
                    rows.reached = mark
                    with publisher.changed:
                        publisher.changed.notify_all()  # the fold thread waits for it
            elif info is not None and number != opening and number not in self.model.state.retiring:
                info.watermark = max(info.watermark, mark)

    # --- deltas

    def _put_back(self, pointer: Pointer) -> None:
        """Append deltas again that the cluster has acknowledged and lost, as in a failover: this node has them."""
        local = self.model.state.log
        if not self.shared.forgetful or pointer.seq is None or local.start is None or local.last is None:
            return
        if pointer.seq < local.start:
            return  # a switch was lost, with which the log began anew
        for seq in range(pointer.seq + 1, local.last + 1):
            data, digest = local.read(seq), local.digest(seq)
            assert digest is not None
            if self.shared.put_back(seq, digest, data, local.digest(seq - 1)):
                log.warning("model %s: the cluster had lost delta %d; it is put back", self.model.name, seq)

    def _check_history(self, pointer: Pointer) -> None:
        """Begin again if a node upstream has other deltas than before: some may be in memory here."""
        if self.shared.forgetful or pointer.server == self._history:
            return
        if pointer.current is not None and self.model.state.log.start is not None:
            self._begin_again(pointer, "a node upstream was built anew, and has other deltas than before")
        self._history = pointer.server

    def _check_digest(self, pointer: Pointer) -> None:
        """Forked if the newest delta of the cluster differs from this node's."""
        held = None if pointer.seq is None else self.model.state.log.digest(pointer.seq)
        if None not in (held, pointer.digest) and held != pointer.digest:
            raise Forked(f"delta {pointer.seq} of {self.model.name!r} is another one in the cluster")

    def _follow_instead(self, pointer: Pointer) -> None:
        """Serve what the cluster has, if this node, cut off meanwhile, has deltas that were lost there."""
        local = self.model.state.log
        lost = local.last
        after = max(0, (local.start or 0))
        while entries := self.shared.read(after, BATCH):
            after = entries[-1].seq
            differing = [entry.seq for entry in entries if local.digest(entry.seq) not in (None, entry.digest)]
            if differing:
                lost = differing[0]
                break
        deltas = f"delta {lost}" if lost == local.last else f"deltas {lost} to {local.last}"
        why = (
            f"the cluster has lost {deltas}, which this node had, and has other content there by now, which this node "
            "serves from now on: send again under new seqs what was lost"
        )
        self._lost = pointer.current, why
        log.error("model %s: %s", self.model.name, why)
        self._begin_again(self.shared.pointer(), "its deltas were not those of the cluster")

    def _apply(self, pointer: Pointer) -> None:
        local = self.model.state.log
        while pointer.seq is not None and local.last is not None and local.last < pointer.seq and not self._stopping:
            if self.model.active_version is None or self._is_replaced(pointer):
                return  # it is opened anew first
            entries = self.shared.read(local.last, BATCH)
            if not entries or entries[0].seq != local.last + 1:
                if pointer.current == self.model.active_version:
                    self._begin_again(pointer, "missed deltas that the log does not have any more")
                return  # otherwise a switch that this node has not made yet has begun the log again
            if entries[0].after not in ("", local.digest(local.last) or entries[0].after):
                raise Forked(f"delta {entries[0].seq} of {self.model.name!r} comes after another one in the cluster")
            for entry in entries:
                if not self._apply_one(entry, pointer):
                    return

    def _apply_one(self, entry: LogEntry, pointer: Pointer) -> bool:
        """Make a delta visible. False if memory has no room for it yet, or had none and its rows have it by now."""
        delta = self._decode(entry.data, entry.digest)
        try:
            self.model.deltas.apply(delta, entry.data, lenient=True)
        except Overloaded:
            return False
        except TooLarge:
            if pointer.current is None or pointer.current != self.model.active_version:
                raise
            if self._mark(pointer, pointer.current) < entry.seq:
                raise
            self._begin_again(pointer, f"delta {entry.seq} is too large for the memory of this node")
            return False
        with self.changed:
            self.changed.notify_all()
        return True

    def _begin(self, pointer: Pointer) -> None:
        """Begin the node's log at the seq that all rows of the current version have, followed by the cluster's
        entries.
        """
        assert pointer.current is not None
        state, mark = self.model.state, self._mark(pointer, pointer.current)
        with state.live.write:
            state.log.restart(mark)
            while state.log.last is not None and state.log.last < (pointer.seq or 0):
                entries = self.shared.read(state.log.last, BATCH)
                if not entries or entries[0].seq != state.log.last + 1:
                    raise StorageError(
                        f"model {self.model.name!r}: version {pointer.current} has deltas up to {state.log.last}, and "
                        "the log in the cluster lacks those that follow: load a newer snapshot"
                    )
                for entry in entries:
                    state.log.append(NewEntry(entry.seq, entry.data, entry.digest))

    def _check_line(self, pointer: Pointer) -> None:
        """Open the served version anew if its rows were replaced."""
        if self._is_replaced(pointer):
            self._begin_again(pointer, f"version {pointer.current} was rolled back, or built again")

    def _is_replaced(self, pointer: Pointer) -> bool:
        """Whether the rows of the served version were replaced by those of another line."""
        view = self.model.publisher.current
        return (
            view is not None
            and view.version == pointer.current
            and remote_rows_of(view.open_version).line != pointer.line
        )

    def _note_undone(self, pointer: Pointer) -> None:
        """Keep which deltas are undone with this node's copies, for the status and for explanations."""
        state = self.model.state
        rollbacks = pointer.undone.rollbacks
        if state.log.undone.rollbacks != rollbacks:
            with state.live.write:
                state.publish(replace(state.file.document, undone=Undone(rollbacks)))

    def _begin_again(self, pointer: Pointer, why: str) -> None:
        """Begin again, because nothing in memory can be trusted."""
        number = pointer.current
        assert number is not None
        log.warning("model %s: %s; its caches begin again", self.model.name, why)
        self._interrupt()  # a version that waits for its turn would hold the lock until the pointer moves
        with self.model.state.switch, self._frozen(number):
            pointer = replace(self._copies.renew(number, pointer), current=number)
            self._begin(pointer)
            self.model.catalogue.info(number).watermark = self._mark(pointer, number)
            self._serve(number, lambda: None)

    @contextlib.contextmanager
    def _frozen(self, number: int) -> Iterator[None]:
        """Within the block, and after it unless it fails, no delta is folded into a served version: a fold would put
        its dense part, which may be undone or an older one, into the files that the version is opened anew from.
        """
        frozen = []
        for view in self.model.publisher.served.views:
            if view.version == number:
                with view.open_version.writing:  # after a fold that has begun
                    frozen.append(remote_rows_of(view.open_version))
                    frozen[-1].frozen = True
        try:
            yield
        except BaseException:
            for rows in frozen:
                rows.frozen = False
            raise

    def _mark(self, pointer: Pointer, number: int) -> int:
        return max(pointer.marks.get(number, 0), self.model.catalogue.info(number).manifest.delta_seq)

    # --- versions

    def _follow(self, pointer: Pointer) -> None:
        """Begin to make the wanted version ready, or to serve the current one."""
        served, local = self.model.publisher.served, self.model.state.log
        if self._switches:
            return
        canary = None if served.active is None else pointer.canary  # it needs an active version beside it
        for number in (pointer.current, canary, pointer.wanted):
            info = None if number is None else self.model.catalogue.get(number)
            if number is None or number in served.versions or info is None or self._failed_before(number, pointer):
                continue
            if local.start is None or not served.views:  # deltas that came since it was deactivated are not in it
                self._begin(replace(pointer, current=number))
            if self._mark(pointer, number) < (local.start or 0):
                continue  # it is caught up first
            if number in self.model.state.retiring:
                continue  # it is closed first
            if number not in self._copies.fetched:  # its dense part may be older than its rows by now
                self._apply(self._copies.update_dense(number))
            self._opening, self._interrupted = number, False
            self._switch = Thread(
                target=self._make_ready,
                args=(number, pointer.generation),
                name=f"tierstore-switch-{self.model.name}",
                daemon=True,
            )
            self._switch.start()
            return

    @property
    def _switches(self) -> bool:
        """Whether a version is being made ready."""
        return self._switch is not None and self._switch.is_alive()

    def _interrupt(self) -> None:
        """Have the version that is being made ready, if there is one, begin again."""
        with self.changed:
            self._interrupted = True
            self.changed.notify_all()

    def _failed_before(self, number: int, pointer: Pointer) -> bool:
        """Whether making this version ready has failed before. It may succeed once its rows have more deltas: then
        fewer need memory. One that nobody waits for to be ready, as it is to be served, is tried again after a time.
        """
        info, failed = self.model.catalogue.info(number), self._failed
        if failed is None or (failed.version, failed.generation) != (number, pointer.generation):
            return False
        is_time = number != pointer.wanted and time.monotonic() - failed.at_s >= AGAIN_S
        return failed.seq >= info.watermark and not is_time

    def _make_ready(self, number: int, generation: int) -> None:
        try:
            self._serve(number, lambda: self._await_turn(number), self._check_uninterrupted)
        except Exception as error:
            with self.changed:
                if not self._interrupted:
                    info = self.model.catalogue.get(number)  # none if that is the reason: it is tried once it is back
                    seq = info.watermark if info else -1
                    self._failed = _Failure(number, generation, str(error), seq, time.monotonic())
            if not (self._interrupted or isinstance(error, (Closed, Conflict))):
                log.exception("model %s: version %d is not ready", self.model.name, number)
        with self.changed:
            self._prepared = None
            self.changed.notify_all()
        self.wake()

    def _serve(
        self,
        number: int,
        ready: Callable[[], float | None],
        check: Callable[[], None] = lambda: None,
        *,
        start: bool = False,
    ) -> None:
        def report(_: Progress) -> None:
            if self._stopping:
                raise Closed(f"the store of model {self.model.name!r} is being closed")
            check()

        self.model.switcher.follow(number, ready, start=start, progress=report)

    def _await_turn(self, number: int) -> float | None:
        """Wait until the pointer is at a ready version. Returns its share as the canary, None if it is current.

        Conflict if it is not wanted any more.
        """
        with self.changed:
            self._prepared = number
            self._wake.set()
            self.changed.wait_for(
                lambda: self._stopping or self._interrupted or self.pointer.wanted != number or self._has_turn(number)
            )
            self._check_uninterrupted()
            if not self._has_turn(number):
                raise Conflict(f"version {number} of {self.model.name!r} is not to be switched to any more")
            return None if self.pointer.current == number else self.pointer.share

    def _check_uninterrupted(self) -> None:
        if self._interrupted:
            raise Conflict(f"model {self.model.name!r}: what is made ready begins again")

    def _has_turn(self, number: int) -> bool:
        return number in (self.pointer.current, self.pointer.canary)

    # --- reports to others

    def _beat(self) -> None:
        with self.changed:
            failed = self._failed
            canary = self.model.publisher.served.canary
            report = {
                "seq": self._lowest_seq(),
                "server": self._put_back_to,
                "overlay_budget": self.model.state.shared.overlay_budget.total,
                "active": self.model.active_version,
                "canary": None if canary is None else canary.version,
                "prepared": self._prepared,
                "failed": None
                if failed is None
                else {"version": failed.version, "generation": failed.generation, "why": failed.why},
            }
        reported_s, before = self._reported
        if report != before or time.monotonic() - reported_s >= BEAT_S:
            self.shared.beat(self._node, report)
            self._reported = time.monotonic(), report

    def _lowest_seq(self) -> int | None:
        """The seq below which no request here reads."""
        lowest = self.model.publisher.lowest_seq()
        return self.model.state.log.last if lowest is None else lowest


def remote_rows_of(version: Version) -> RemoteRows:
    assert isinstance(version.rows, RemoteRows)  # its placement has opened it
    return version.rows
