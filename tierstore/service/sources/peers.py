"""Catching up from peers: nodes that serve the same models.

One thread reads the state of all peers' logs once a second. When the node starts, models that are not here are copied,
until it has caught up; deltas are fetched whenever a peer has more of them, in the order of their seqs, and what a
peer has undone is undone. A peer whose deltas or rollbacks differ from this node's is refused, and named.

After a crash: applied deltas are in the log, and a copy goes on from the files that it has read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from prometheus_client.core import Metric

from tierstore.config import Settings
from tierstore.engine.events.changes import REQUESTER
from tierstore.engine.model import Model
from tierstore.engine.operations.from_peers import copies_of, copy_model, follow_delta, follow_undone
from tierstore.engine.serving.undone import Rollbacks, Undone
from tierstore.engine.store import Store
from tierstore.errors import Conflict, RemoteUnavailable, TierstoreError
from tierstore.formats import files
from tierstore.service.error_status import log_failure, message_of
from tierstore.service.families import counter, gauge
from tierstore.threads import Thread
from tierstore.tiers.connection_pools import ConnectionPools, Options
from tierstore.tiers.upstream.connections import NodeConnection, UpstreamNode
from tierstore.tiers.upstream.options import NodeAddress, check_token, parse_node_urls, tls_context
from tierstore.tiers.upstream.peer import Peer, PeerLog, PeerLogs
from tierstore.types import Progress

logger = logging.getLogger(__name__)

POLL_S = 1.0
RECENT_S = 2.0  # the most age of a look at the peers' logs for their content then to count as all
MOST_SLOW = 3  # slower rounds: then deltas come as fast as they are fetched
PATIENCE_S = 60.0  # after which a node with models goes on with what it has, if nothing comes though peers answer
BATCH = 256  # deltas requested at once; a peer sends some megabytes of them


class Differs(Conflict):
    """A peer's log differs from this node's: nothing is taken from it."""


class TooFarBehind(TierstoreError):
    """This node lacks deltas that no peer has any more."""


def make_peers(settings: Settings) -> list[Peer]:
    """The peers that the settings name. ConfigError."""
    addresses = parse_node_urls(",".join(settings.peer), "peer")
    if settings.upstream_token is not None and not settings.upstream_allow_insecure_token:
        check_token(addresses)
    pools: ConnectionPools[NodeAddress, NodeConnection] = ConnectionPools(Options(connections=1), "the node")
    tls = tls_context(addresses, None if settings.upstream_ca is None else str(settings.upstream_ca))
    return [Peer(UpstreamNode(address, pools, settings.upstream_token, tls)) for address in addresses]


class Peers:
    """Follows the peers until closed.

    Attributes without an underscore, `status` and `families` may be read from any thread.
    """

    def __init__(self, store: Store, settings: Settings, own: str) -> None:
        """`own`: this node's name for peers."""
        self._store, self._settings, self._own = store, settings, own
        self._peers = make_peers(settings)
        self._stop = threading.Event()
        # only written by the thread
        self.copying = True  # until it is known which models to copy, and while they are copied
        self.caught_up = False  # once it is, it stays so
        self.applied = self.copied = self.errors = 0
        self._slow_rounds = 0  # in which all was fetched, but not within RECENT_S
        self._progress_s = time.monotonic()  # when something was last fetched
        self._copies: dict[str, Progress] = {}  # model → progress of its copy
        self._problems: dict[str, str] = {}  # by peer, or by peer and model, in the last round
        self._complete = False  # once all models of peers are here: after that others come only by loads
        self._equal: dict[tuple[str, str], _Compared] = {}  # by peer and model
        self._thread = Thread(target=self._run, name="tierstore-peers", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Whether the node has caught up, what was fetched, what is being copied, and faults."""
        return {
            "peers": [str(peer) for peer in self._peers],
            "caught_up": self.caught_up,
            "applied": self.applied,
            "copied": self.copied,
            "errors": self.errors,
            "copying": {name: asdict(step) for name, step in self._copies.copy().items()},
            "problems": list(self._problems.values()),
        }

    def families(self) -> Iterator[Metric]:
        """The metrics of this part, for Prometheus."""
        yield counter("tierstore_peer_deltas", "Deltas fetched from peers.", self.applied)
        yield counter("tierstore_peer_copies", "Models copied from peers.", self.copied)
        yield counter("tierstore_peer_errors", "Failed attempts to fetch something from a peer.", self.errors)
        yield gauge(
            "tierstore_peer_caught_up", "Whether the node has caught up with its peers since its start.", self.caught_up
        )

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish the delta that is being applied, and end; a copy goes on at the next start."""
        self._stop.set()
        self._thread.join(timeout_s)

    # --- the thread

    def _run(self) -> None:
        REQUESTER.set("peer")
        while not self._stop.is_set():
            problems: dict[str, str] = {}
            try:
                self._round(problems)
            except Exception as error:  # noqa: BLE001 - the thread must outlive whatever it meets
                self._note(problems, "peers", "peers", error)
            self._problems = problems
            self._stop.wait(POLL_S)

    def _note(self, problems: dict[str, str], key: str, whose: str, error: Exception) -> None:
        """Note a problem of a peer, `whose`, by its name."""
        text = message_of(error)
        text = text if isinstance(error, TierstoreError) else f"{whose}: {text}"
        problems[key] = text
        if self._stop.is_set():
            return
        self.errors += 1
        if self._problems.get(key) != text:
            if not isinstance(error, TierstoreError):
                log_failure(error, "following peers")
            logger.warning("peers: %s", text)

    def _round(self, problems: dict[str, str]) -> None:
        """Fetch everything that is available now."""
        began_s = time.monotonic()
        found: dict[Peer, PeerLogs] = {}
        for peer in self._peers:
            try:
                logs = peer.logs()
                if logs.node != self._own:  # a list that is the same on all nodes includes this node
                    found[peer] = logs
            except Exception as error:  # noqa: BLE001 - whatever one peer causes is no other's
                self._note(problems, str(peer), str(peer), error)
        before, copied = self.applied, self.copied
        if not self._complete:
            self._complete = self._copy_all(found, problems)
        followed = [self._follow(name, found, problems) for name in self._store.models()]
        now_s = time.monotonic()
        if (self.applied, self.copied) != (before, copied):
            self._progress_s = now_s
        if self.caught_up:
            return
        is_even = bool(found) and self._complete and all(followed) and copied == self.copied
        self._slow_rounds += is_even and now_s - began_s >= RECENT_S
        if is_even and (now_s - began_s < RECENT_S or self._slow_rounds >= MOST_SLOW):
            self.caught_up = True
            logger.info("peers: caught up")
        elif (not found or now_s - self._progress_s > PATIENCE_S) and any(
            self._store.model(name).ready for name in self._store.models()
        ):
            self.caught_up = True  # others may be down for long
            logger.warning("peers: not caught up; this node serves what it has, and keeps trying")

    # --- models

    def _copy_all(self, found: dict[Peer, PeerLogs], problems: dict[str, str]) -> bool:
        """Copy the models that are not here. Returns whether all are here, by the lists of peers that have all of
        theirs.
        """
        names = {name for logs in found.values() for name, log in logs.models.items() if log.active is not None}
        missing = sorted(names - set(self._store.models()))
        for name in missing:
            havers = {peer: log for peer, logs in found.items() if (log := logs.models.get(name)) is not None}
            for peer in sorted(havers, key=lambda peer: -(havers[peer].last or 0)):
                try:
                    self._copy(peer, name)
                    break
                except Exception as error:  # noqa: BLE001 - as above
                    self._note(problems, f"{peer} {name}", str(peer), error)
                finally:
                    self._copies.pop(name, None)
        self.copying = bool(names - set(self._store.models()))
        if not found or self.copying or any(logs.copying for logs in found.values()):
            return False
        for path in copies_of(self._store.root.root):  # of models that came another way
            files.remove_tree(path)
        return True

    def _copy(self, peer: Peer, name: str) -> None:
        began_s = time.monotonic()

        def report(step: Progress) -> None:
            self._copies[name], self._progress_s = step, time.monotonic()

        logger.info("model %s: copied from %s, from now on", name, peer)
        where = copy_model(peer, name, self._store.root, self._settings.disk_reserve, report, self._stop)
        self._store.adopt(name, where)
        self.copied += 1
        logger.info("model %s: copied from %s in %.1f s", name, peer, time.monotonic() - began_s)

    # --- deltas

    def _follow(self, name: str, found: dict[Peer, PeerLogs], problems: dict[str, str]) -> bool:
        """Fetch the deltas of a model that is here. Returns whether no missing delta is available."""
        done = True
        logs = {peer: log for peer, of in found.items() if (log := of.models.get(name)) is not None}
        for peer in sorted(logs, key=lambda peer: -(logs[peer].last or 0)):
            try:
                self._follow_one(self._store.model(name), peer, logs[peer])
            except Exception as error:  # noqa: BLE001 - as above
                self._note(problems, f"{peer} {name}", str(peer), error)
                done = done and isinstance(error, (Differs, TooFarBehind))  # other errors may pass
        return done

    def _follow_one(self, model: Model, peer: Peer, theirs: PeerLog) -> None:
        log = model.log
        if theirs.damage is not None:
            raise TooFarBehind(f"{peer}: its log of {model.name!r} is damaged: {theirs.damage}")
        if None in (theirs.start, theirs.last, log.start, log.last, model.active_version):
            return  # nothing to compare; the model's own problem reports the fault
        ours, there = (log.start or 0, log.last or 0), (theirs.start or 0, theirs.last or 0)
        if there[0] > ours[1]:
            raise TooFarBehind(
                f"model {model.name!r} lacks delta {ours[1] + 1}, and the log of {peer} begins after {there[0]}: load "
                f"a newer snapshot, or stop this node, move {model.where.root} away, and start it: the model is then "
                "copied from there"
            )
        self._compare(model, peer, theirs.rollbacks, ours, there)
        while (last := log.last or 0) < there[1]:
            entries = peer.deltas(model.name, last, BATCH, int(self._settings.max_delta))
            if not entries:
                raise RemoteUnavailable(
                    f"{peer} does not give delta {last + 1} of {model.name!r}: it has just forgotten it"
                )
            for entry in entries:
                if self._stop.is_set():
                    return
                follow_delta(model, entry.data, entry.seq)
                self.applied += 1

    def _compare(
        self, model: Model, peer: Peer, rollbacks: Rollbacks, ours: tuple[int, int], theirs: tuple[int, int]
    ) -> None:
        """Undo what the peer has undone since. Differs if its log is not this model's, as far as both go.

        `ours` and `theirs`: (start, last) of both logs.
        """
        log, key = model.log, (str(peer), model.name)
        compared = _Compared(model, log.undone, ours, theirs, rollbacks)
        before = self._equal.get(key)
        if before == compared:
            return
        begin, end = max(ours[0], theirs[0]), min(ours[1], theirs[1])
        if end > begin and peer.digest(model.name, begin, end) != log.digest_of(begin, end):
            self._name_difference(model, peer, begin, end)
        here, there = (tuple(each for each in of if each[1] > begin) for of in (log.undone.rollbacks, rollbacks))
        if here != there:
            is_unmoved = before is not None and before.undone is log.undone
            if not (_extends(there, here) or (is_unmoved and _corrects(there, here))):
                if _extends(here, there) and theirs[1] <= ours[1]:
                    return  # it should follow this node
                raise Differs(
                    f"{peer}: its rollbacks of {model.name!r} are others than here: it went back {_shown(there)}, and "
                    f"this node {_shown(here)}. Nothing is taken from it; `tierstore rollback --to-seq` on one of "
                    "both makes them equal, or a newer snapshot on both"
                )
            logger.warning("model %s: %s went back %s, and so does this node", model.name, peer, _shown(there))
            older = tuple(each for each in log.undone.rollbacks if each[1] <= begin)
            follow_undone(model, older + there)
            compared = compared._replace(undone=log.undone)
        self._equal[key] = compared

    def _name_difference(self, model: Model, peer: Peer, begin: int, end: int) -> None:
        """Raise Differs, naming the first delta that differs there.

        RemoteUnavailable if one of the logs has just forgotten some.
        """
        low, high, at = begin, end, end  # up to `low` they are equal, up to `high` not
        while True:
            theirs, ours = peer.digest(model.name, begin, at), model.log.digest_of(begin, at)
            if theirs is None or ours is None:
                raise RemoteUnavailable(
                    f"{peer}: the log of {model.name!r} was pruned while it was compared; it is compared again"
                )
            low, high = (at, high) if theirs == ours else (low, at)
            if high - low <= 1:
                break
            at = (low + high) // 2
        raise Differs(
            f"{peer}: delta {high} of {model.name!r} is another one there than here. Nothing is taken from it; load a "
            f"snapshot whose delta_seq is {end} or larger on both, or stop the node that is wrong, move "
            f"{model.where.root} away there, and start it with --peer"
        )


class _Compared(NamedTuple):
    """Two logs of a model that were found equal, as far as both go: this node's, and a peer's."""

    model: Model
    undone: Undone
    ours: tuple[int, int]
    theirs: tuple[int, int]
    rollbacks: Rollbacks


def _extends(longer: Rollbacks, shorter: Rollbacks) -> bool:
    """Whether one list of rollbacks is the other one with more added."""
    return longer[: len(shorter)] == shorter


def _corrects(new: Rollbacks, old: Rollbacks) -> bool:
    """Whether the last of the old rollbacks was followed by one to another delta, before any delta came."""
    last = len(old) - 1
    return last >= 0 and len(new) > last and new[:last] == old[:last] and new[last][1] == old[last][1]


def _shown(rollbacks: Rollbacks) -> str:
    return ", ".join(f"from {last} to {to}" for to, last in rollbacks) or "nowhere"
