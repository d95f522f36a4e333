"""`rollout`: one snapshot on several nodes, switched to when all have it ready, and taken back everywhere if one fails.

On request the version first gets a share of the requests on all nodes, and one verdict on all of these decides.

Nothing is remembered between runs, and only the public interface is used: a run that was broken off is simply started
again, and does what is still to be done. The version is made ready as a canary that gets no requests: opened, caught up
and warm, so that the switch itself is one step and what is checked before it is what will serve.

The calling thread waits; one thread a node carries its requests.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tierstore.client.base import parse_addresses
from tierstore.client.identify import snapshot_model, snapshot_version
from tierstore.client.replicas import compare_rows
from tierstore.client.sync import Client
from tierstore.errors import (
    FAULTS,
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    NotReady,
    RolloutFailed,
    SnapshotError,
    TierstoreError,
    explained,
)
from tierstore.threads import Pool
from tierstore.types import model_and_head
from tierstore.verdicts import CanaryTrial, Requests, judge

Policy = Literal["one-by-one", "all-at-once"]
POLICIES: tuple[Policy, ...] = ("one-by-one", "all-at-once")
POLL_S = 0.2
_LINE_EVERY_S = 5.0  # of progress, a node
TRIAL_POLL_S = 1.0
_REQUESTS = re.compile(r"^tierstore_model_requests_total\{(.*)\} (\S+)$", re.MULTILINE)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """`before`: what each node served. `loaded`, `switched`: nodes that this run changed.

    `seq`: at which rows were equal.
    """

    model: str
    version: int
    before: dict[str, int | None]
    loaded: list[str]
    switched: list[str]
    seq: int | None
    seconds: float


@dataclass(slots=True)
class _Node:
    """One node. `waiting` is for calls that last: it has a longer deadline."""

    url: str
    client: Client
    waiting: Client
    active: int | None = None  # before
    share: float | None = None  # of the version as a canary, before
    loaded: bool = False
    switched: bool = False
    problems: list[str] = field(default_factory=list)


def rollout(
    snapshot: str | Path,
    nodes: str | Sequence[str],
    *,
    model: str | None = None,
    version: int | None = None,
    policy: Policy = "one-by-one",
    max_wait_s: float = 3600.0,
    check_s: float = 10.0,
    canary: float | None = None,
    canary_s: float = 600.0,
    say: Say | None = None,
    **options: Any,
) -> RolloutReport:
    """Load a snapshot on all nodes, wait until all have it ready, switch, check, and take it
    back everywhere if one fails.

    Args:
        snapshot: directory or URL of a snapshot or built version, as the nodes see it.
        nodes: their URLs, each reached directly and not through a load balancer.
        model: name of the model; read from the snapshot where that can be read here.
        version: number of the version; likewise.
        policy: switch `one-by-one`, each checked before the next; or `all-at-once`.
        max_wait_s: for the load, and again until all are caught up and warm.
        check_s: for how long errors are counted after a switch.
        canary: share of the requests, 0 to 1, that the version gets on every node before any switches; None: no trial.
        canary_s: seconds of that trial without more failed requests, over all nodes, than of the versions that serve.
        say: called with a line of progress now and then, from several threads.
        options: of each node's `Client`: `token`, `ca`, …

    Raises RolloutFailed, whose `restored` says whether all nodes serve what they served before, and InvalidInput before
    anything was changed. A version that was loaded stays on the nodes, not active.
    """
    if policy not in POLICIES:
        raise InvalidInput(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    if canary is not None and not 0 < canary <= 1:
        raise InvalidInput(f"canary: expected a share above 0 and up to 1, got {canary}")
    urls = [address.url for address in parse_addresses(nodes)]
    source = str(Path(snapshot).resolve()) if Path(snapshot).is_dir() else str(snapshot)
    model = model or snapshot_model(source)
    version = version or snapshot_version(source)
    waiting = options | {"timeout_s": max(max_wait_s, 1.0)}
    members = [_Node(url, Client(url, **options), Client(url, **waiting)) for url in urls]
    with Pool(len(members), "tierstore-rollout") as threads:
        run = _Rollout(members, threads, source, model, version, max_wait_s, check_s, say or _silent)
        try:
            return run.run(policy, canary, canary_s)
        finally:
            for node in members:
                node.client.close()
                node.waiting.close()


class _Rollout:
    """One run."""

    def __init__(
        self,
        nodes: list[_Node],
        threads: Pool,
        source: str,
        model: str,
        version: int,
        max_wait_s: float,
        check_s: float,
        say: Say,
    ) -> None:
        self._nodes, self._threads, self._say = nodes, threads, say
        self._source, self._model, self._version = source, model, version
        self._max_wait_s, self._check_s = max_wait_s, check_s
        self._stopped = False  # a node has failed: the others need not finish

    def run(self, policy: Policy, canary: float | None = None, canary_s: float = 0.0) -> RolloutReport:
        started_s = time.monotonic()
        self._each(self._nodes, self._inspect)
        try:
            self._each(self._nodes, self._load)
            self._each(self._nodes, self._prepare)
            self._compare([node for node in self._nodes if node.active is not None])
            if canary is not None:
                self._try(canary, canary_s)
            for group in [self._nodes] if policy == "all-at-once" else [[node] for node in self._nodes]:
                self._each(group, self._activate)
                self._each(group, self._check)
            seq = self._compare(self._nodes)
        except BaseException as error:
            self._restore(error)
            raise
        return RolloutReport(
            self._model,
            self._version,
            {node.url: node.active for node in self._nodes},
            [node.url for node in self._nodes if node.loaded],
            [node.url for node in self._nodes if node.switched],
            seq,
            time.monotonic() - started_s,
        )

    # --- steps of one node, each on its thread; raise TierstoreError

    def _inspect(self, node: _Node) -> None:
        """Note what the node serves. Refuse one that another change is under way on."""
        if not node.client.ready():
            raise NotReady("the node is not ready: it starts or stops")
        try:
            node.client.metrics()
        except Forbidden as error:  # now, and not after the switch
            error.add_note("a rollout counts failed requests by /metrics, so it takes a token for all models")
            raise
        status = self._status(node)
        canary = status["canary"]
        node.active = status["active_version"]
        if canary is not None:
            if canary["version"] != self._version:
                raise Conflict(f"version {canary['version']} is the canary; promote or withdraw it first")
            node.share = canary["share"]
        if self._state(status) == "stale":
            raise Conflict(f"version {self._version} is there and stale; drop it first, or roll out a newer snapshot")

    def _load(self, node: _Node) -> None:
        until = time.monotonic() + self._max_wait_s
        while (state := self._state(self._status(node))) == "loading":  # an earlier run began it
            self._wait(until, "the load")
        if state is not None:
            return
        job = node.client.start_load(self._source, model=self._model, activate=False)
        shown_s = 0.0
        try:
            while (document := node.client.job(job))["state"] == "running":
                if time.monotonic() - shown_s > _LINE_EVERY_S:
                    shown_s = time.monotonic()
                    amount = f" {document['done']:,} of {document['total']:,}" if document.get("total") else ""
                    self._say(f"{node.url}: load: {document.get('phase') or 'waits'}{amount}")
                self._wait(until, "the load")
        except BaseException:
            with contextlib.suppress(TierstoreError):
                node.client.cancel(job)
            raise
        if document["state"] == "failed":
            raise SnapshotError(str(document.get("error") or "the load failed"))
        node.loaded = True
        self._say(f"{node.url}: version {self._version} is loaded")

    def _prepare(self, node: _Node) -> None:
        """Open the version beside the active one, caught up and warm. Without an active one the switch does that."""
        if node.active in (None, self._version):
            return
        if node.share is None:
            node.waiting.canary(self._model, self._version, 0.0)
        until = time.monotonic() + self._max_wait_s
        wanted = self._status(node)["watermark"]
        while (canary := self._status(node)["canary"]) is None or canary["watermark"] < wanted:
            if canary is None:
                raise Conflict(f"version {self._version} was withdrawn by somebody else")
            self._wait(until, "the catch-up")
        self._say(f"{node.url}: version {self._version} is ready")

    def _activate(self, node: _Node) -> None:
        if node.active == self._version:
            return
        node.switched = True  # from here on it may have happened
        node.waiting.activate(self._model, self._version, expected_active=node.active)
        self._say(f"{node.url}: version {self._version} is active")

    def _check(self, node: _Node) -> None:
        """The version serves, and for a time no more of its requests fail than of the one before it."""
        counted, until = self._requests(node), time.monotonic() + self._check_s
        old = counted[node.active]
        while True:
            status = self._status(node)
            if status["active_version"] != self._version:
                raise Conflict(f"expected version {self._version} to be active, got {status['active_version']}")
            if status["problem"]:
                raise NotReady(str(status["problem"]))
            new = self._requests(node)[self._version].since(counted[self._version])
            if judge(new, old) == "bad":
                raise NotReady(f"{new} requests of version {self._version} failed, of those before {old}")
            if time.monotonic() >= until:
                return
            self._wait(until, "")

    # --- all nodes

    def _try(self, share: float, seconds: float) -> None:
        """Give the version a share of the requests on every node, until there is a verdict on all nodes together."""
        nodes = [node for node in self._nodes if node.active not in (None, self._version)]
        if not nodes:
            return
        self._each(nodes, lambda node: node.waiting.canary(self._model, self._version, share))
        self._say(f"version {self._version} gets {share:.3g} of the requests on {len(nodes)} nodes")
        trial, until = CanaryTrial(*self._counted(nodes)), time.monotonic() + seconds + self._max_wait_s
        while (look := trial.look(*self._counted(nodes), seconds / 60))[0] == "doubtful":
            if time.monotonic() >= until:
                raise NotReady(f"no verdict on the canary within {seconds + self._max_wait_s:g} s: {look[1]}")
            time.sleep(min(TRIAL_POLL_S, max(seconds, POLL_S)))
        if look[0] == "bad":
            raise Conflict(f"the canary: {look[1]}")
        self._say(f"the canary: {look[1]}")

    def _counted(self, nodes: Sequence[_Node]) -> tuple[Requests, Requests]:
        """Requests of the version as a canary and of those that serve, of all nodes.

        Conflict where it is no canary any more.
        """
        new, old = Requests(), Requests()
        for node, (canary, counted) in zip(nodes, self._threads.map(self._canary_and_requests, nodes), strict=True):
            if canary is None or canary["version"] != self._version:
                raise Conflict(f"{node.url}: version {self._version} was withdrawn or promoted by somebody else")
            new, old = new + counted[self._version], old + counted[node.active]
        return new, old

    def _canary_and_requests(self, node: _Node) -> tuple[Any, Mapping[int | None, Requests]]:
        try:
            return self._status(node)["canary"], self._requests(node)
        except TierstoreError as error:
            error.add_note(f"node {node.url}")
            raise

    def _compare(self, nodes: list[_Node]) -> int | None:
        if len(nodes) < 2:
            return None
        rows = compare_rows({node.url: node.client for node in nodes}, self._model, self._version, wait_s=30.0)
        if rows.problems:
            raise Conflict("; ".join(rows.problems))
        self._say(f"{rows.keys:,} sampled rows are equal on {len(nodes)} nodes at seq {rows.seq}")
        return rows.seq

    def _restore(self, error: BaseException) -> None:
        """Bring every node back to what it served, and raise RolloutFailed; what is no
        TierstoreError is the caller's.
        """
        self._stopped = True
        self._say(f"the rollout failed, going back: {explained(error)}")
        failures = []
        for node in reversed(self._nodes):
            try:
                self._restore_node(node)
            except TierstoreError as failure:
                failures.append(f"{node.url}: {explained(failure)}")
        if not failures and not isinstance(error, TierstoreError):
            return
        nodes = "; ".join(failures)
        outcome = (
            f"NOT every node serves what it did before: {nodes}" if failures else "every node serves what it did before"
        )
        raise RolloutFailed(f"{explained(error)}; {outcome}", restored=not failures) from error

    def _restore_node(self, node: _Node) -> None:
        """Go by what the node says it serves: a switch whose answer was lost may have happened."""
        status = self._status(node)
        if status["active_version"] == self._version != node.active:
            if node.active is None:
                node.waiting.deactivate(self._model)
            elif status.get("rollback_to") == node.active:  # so that no later rollback goes to what has failed here
                node.waiting.rollback(self._model, expected_active=self._version)
            else:
                node.waiting.activate(self._model, node.active, expected_active=self._version)
            self._say(f"{node.url}: serves version {node.active} again")
            status = self._status(node)
        canary = status["canary"]
        if canary is not None and canary["version"] != self._version:
            return  # somebody else's
        if canary is not None and not node.share:
            node.client.withdraw(self._model)
        elif node.share and (canary is None or canary["share"] != node.share):
            node.waiting.canary(self._model, self._version, node.share)

    def _each(self, nodes: Sequence[_Node], step: Callable[[_Node], None]) -> None:
        """Do a step on each node at once, and wait for all. Raises one error that names every node that failed."""
        self._stopped = False
        futures = {node.url: self._threads.submit(self._guarded, node, step) for node in nodes}
        try:
            failures = {url: failure for url, future in futures.items() if (failure := future.result()) is not None}
        except BaseException:  # Ctrl-C: no thread goes on changing a node
            self._stopped = True
            for future in futures.values():
                future.exception()
            raise
        if failures:
            raise TierstoreError("; ".join(f"{url}: {explained(failure)}" for url, failure in failures.items()))

    def _guarded(self, node: _Node, step: Callable[[_Node], None]) -> TierstoreError | None:
        try:
            step(node)
        except TierstoreError as error:
            self._stopped = True
            return error
        return None

    def _wait(self, until: float, what: str) -> None:
        if self._stopped:
            raise NotReady("stopped, as another node failed")
        if what and time.monotonic() >= until:
            raise NotReady(f"{what} did not end within {self._max_wait_s:g} s")
        time.sleep(POLL_S)

    def _status(self, node: _Node) -> Mapping[str, Any]:
        try:
            return node.client.status(self._model)["models"][self._model]
        except NotFound:
            return {"active_version": None, "watermark": None, "canary": None, "problem": None, "versions": []}

    def _state(self, status: Mapping[str, Any]) -> str | None:
        """The state of a version on a node; None where the node does not have it."""
        return next((one["state"] for one in status["versions"] if one["version"] == self._version), None)

    def _requests(self, node: _Node) -> Mapping[int | None, Requests]:
        """Requests by version, of the model and all its heads, and how many of them failed by its fault."""
        found: dict[int | None, Requests] = defaultdict(Requests)
        for labels, value in _REQUESTS.findall(node.client.metrics()):
            named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if model_and_head(named["model"])[0] == self._model:
                count = int(float(value))
                found[int(named["version"])] += Requests(count, count if named["outcome"] in FAULTS else 0)
        return found


def _silent(_: str) -> None:
    pass
