"""This node as a front: the models that the nodes upstream serve, begun here, followed until the store closes.

Any thread. The data directory has only copies and caches, as with a cluster.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from tierstore import kernels
from tierstore.engine.cluster.base import PLACES_S, Place, RemoteBase
from tierstore.engine.deltas.origin import Origin
from tierstore.engine.lifecycle.state import Shared
from tierstore.engine.model import Model
from tierstore.engine.nodes.directory import check_directory, clear, open_ssd_cache
from tierstore.engine.nodes.follower import Follower
from tierstore.engine.upstream.model import UpstreamModel
from tierstore.engine.upstream.watch import Watch
from tierstore.engine.versions.info import VersionInfo
from tierstore.errors import ClusterUnavailable, InvalidInput, TierstoreError, unknown_model
from tierstore.formats.delta.reader import Delta
from tierstore.formats.keys import partition_of
from tierstore.formats.names import DataDirectory
from tierstore.kernels import upstream_reads
from tierstore.tiers.base import Peek
from tierstore.tiers.upstream import wire
from tierstore.tiers.upstream.connections import Node
from tierstore.tiers.upstream.options import Options, check_token, parse_urls, tls_context
from tierstore.tiers.upstream.table import Nodes, Ownership, Source, UpstreamTable
from tierstore.types import DeltaResult, Keys, ProgressFn

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2  # for new models
_NOBODY = "no node that answers owns its partition"


class FrontModel:
    """One model of this front. It has the verbs of a model, and refuses all of them."""

    def __init__(self, model: Model, upstream: UpstreamModel, node: str, refuse: Callable[[str], NoReturn]) -> None:
        self.model, self.upstream, self._refuse = model, upstream, refuse
        self.follower = Follower(model, upstream, node)

    @property
    def leads(self) -> bool:
        return False

    def apply_delta(self, delta: Delta, data: bytes | memoryview, origin: Origin | None = None) -> DeltaResult:
        self._refuse("a delta")

    def activate(self, number: int, *, force: bool, expected_active: int | None, progress: ProgressFn) -> None:
        self._refuse("a switch")

    def rollback(self, *, force: bool, expected_active: int | None, progress: ProgressFn) -> int:
        self._refuse("a rollback")

    def rollback_to(self, seq: int, *, expected_active: int | None, progress: ProgressFn) -> int:
        self._refuse("a rollback")

    def canary(self, number: int, share: float, *, force: bool, progress: ProgressFn) -> None:
        self._refuse("a canary")

    def promote(self) -> int:
        self._refuse("a canary")

    def withdraw(self) -> int:
        self._refuse("a canary")

    def label(self, name: str, number: int) -> None:
        self._refuse("a label")

    def unlabel(self, name: str) -> None:
        self._refuse("a label")

    def deactivate(self) -> None:
        self._refuse("a switch")

    def drop(self, number: int) -> None:
        self._refuse("a drop")

    def status(self) -> dict[str, Any]:
        """What this front knows of the model upstream, without asking anybody."""
        pointer = self.follower.pointer
        return {
            "reachable": self.follower.silent is None,
            "problem": self.follower.silent,
            "current": pointer.current,
            "wanted": pointer.wanted,
            "seq": pointer.seq,
            "watermarks": {str(number): mark for number, mark in sorted(pointer.marks.items())},
            "partitions": self.upstream.coverage(),
        }


def _fill(node: Node, target: str, request: bytes, places: list[Place], timeout_s: float) -> None:
    """Fill in what a node says of some keys, or why it does not."""
    for place in places:
        place.node = str(node)
    try:
        reply = node.request("POST", target, request, timeout_s=timeout_s)
        if reply.status != 200:
            raise ClusterUnavailable(f"{node} answers {reply.status}: {reply.problem}")
        for place, entry in zip(places, json.loads(bytes(reply.body))["keys"], strict=True):
            if entry["tier"] is None:
                place.error = f"{node}: {entry['why']}"
                continue
            stored = entry.pop("stored")
            place.peek = Peek(absent=True) if stored is None else Peek(bytes.fromhex(stored))
            place.error, place.explained = None, entry
    except (TierstoreError, ValueError, KeyError, TypeError) as error:
        for place in places:
            place.error = str(error)


class Front:
    """`begin_model` makes a model of the store. ConfigError for addresses that are none."""

    def __init__(self, shared: Shared, root: DataDirectory, begin_model: Callable[[str], Model]) -> None:
        settings = shared.settings
        assert settings.upstream is not None
        check_directory(root, "--upstream")
        # constant after construction
        self._settings, self._root, self._begin_model = settings, root, begin_model
        self.node = f"{socket.gethostname()}-{secrets.token_hex(3)}"
        addresses = parse_urls(settings.upstream)
        if settings.upstream_token is not None and not settings.upstream_allow_insecure_token:
            check_token(addresses)
        options = Options(
            timeout_s=settings.remote_timeout_s,
            token=settings.upstream_token,
            tls=tls_context(addresses, None if settings.upstream_ca is None else str(settings.upstream_ca)),
        )
        self.nodes = Nodes([Node(address, options) for address in addresses], options)
        self.watches = [Watch(node, self.node, self._served, self._wake) for node in self.nodes.nodes]
        self._thread = threading.Thread(target=self._run, name="tierstore-front", daemon=True)
        self._stopping = threading.Event()
        # guarded by _lock
        self._lock = threading.RLock()
        self._members: dict[str, FrontModel] = {}
        self._complete = False  # whether every node has answered once, and the models that there were then are begun
        self.ssd_cache = open_ssd_cache(shared, root)
        shared.open_remote = self.open_base

    # --- start and stop

    def start(self) -> None:
        """Serve what the nodes that answer have. Where none does, it is found once one does."""
        kernels.load(module=upstream_reads.__name__)  # rather than within the time of the first look-up
        for watch in self.watches:
            watch.start()
        until_s = time.monotonic() + self.nodes.options.connect_timeout_s + 0.5
        for watch in self.watches:
            watch.first.wait(max(0.0, until_s - time.monotonic()))
        self._find()
        self._thread.start()

    def close(self) -> None:
        """Stop following; before the models are closed."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        for member in self._members.values():
            member.follower.close()
        for watch in self.watches:
            watch.close()

    def disconnect(self) -> None:
        """After the models are closed."""
        self.nodes.close()
        if self.ssd_cache is not None:
            self.ssd_cache.close()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            self._find()

    def _find(self) -> None:
        """Begin the models that are new upstream."""
        heard = all(watch.heard for watch in self.watches)
        for name in sorted({name for watch in self.watches for name in watch.models()} - self._members.keys()):
            if self._stopping.is_set():
                return
            try:
                self._begin(name)
            except Exception as error:
                log.error("model %s is not begun: %s", name, error, exc_info=not isinstance(error, TierstoreError))
        self._complete = self._complete or heard

    def _begin(self, name: str) -> None:
        with self._lock:
            clear(self._root.model(name))
            model = self._begin_model(name)
            upstream = UpstreamModel(name, self.watches, lambda: model.active_version)
            member = FrontModel(model, upstream, self.node, self._refuse)
            self._members = self._members | {name: member}  # before it serves: then it is found by its reads
            member.follower.start()

    def _served(self) -> dict[str, tuple[int, int]]:
        """(the version that is served here, the lowest seq that is read) by model: nodes hold for this front what it needs."""
        served = {}
        for name, member in self._members.items():
            number, seq = member.model.active_version, member.model.publisher.lowest_seq()
            if number is not None and seq is not None:
                served[name] = number, seq
        return served

    def _wake(self) -> None:
        for member in self._members.values():
            member.follower.wake()

    # --- for the store

    def _refuse(self, what: str) -> NoReturn:
        nodes = ",".join(str(watch.node) for watch in self.watches)
        raise InvalidInput(
            f"{what} is for the nodes that have the rows, and this node is in front of them: load and switch with `tierstore rollout "
            f"SNAPSHOT --nodes {nodes}`, and send deltas to each of these nodes"
        )

    def member(self, name: str) -> NoReturn:
        self._refuse("a load")

    def target(self, name: str) -> NoReturn:
        self._refuse("a load")

    def existing(self, name: str) -> FrontModel:
        """NotFound, naming those there are, for an unknown one."""
        member = self._members.get(name)
        if member is None:
            raise unknown_model(name, self._members)
        return member

    @property
    def unheard(self) -> str | None:
        """See `Elsewhere`."""
        if self._complete:
            return None
        silent = [watch for watch in self.watches if not watch.heard]
        if not silent:
            return "the models of the nodes upstream are being opened"
        whose = "no node" if len(silent) == len(self.watches) else "not every node"
        why = "; ".join(watch.problem or f"{watch.node} is silent" for watch in silent[:3])
        return f"{whose} upstream has answered yet: {why}"

    @property
    def ready(self) -> bool:
        """See `Elsewhere`."""
        return self._complete or any(member.model.active_version is not None for member in self._members.values())

    def open_base(self, name: str, info: VersionInfo) -> RemoteBase:
        """What reads the rows of a version."""
        member = self.existing(name)
        upstream, number = member.upstream, info.number
        line = upstream.line(number)
        source = Source(
            lambda: upstream.ownership(number, line), upstream.refresh, lambda: member.model.state.log.last or 0
        )
        tables = {
            info.tables[table]["id"]: UpstreamTable(self.nodes, name, number, table, spec.row_bytes, source)
            for table, spec in info.specs.items()
        }
        what, on_failure = f"version {number} of {name!r}", self._settings.remote_on_failure
        base = RemoteBase(
            what, tables, info.watermark, on_failure,
            where="a node upstream", line=line, cache=self.ssd_cache,
        )  # fmt: skip
        base.places = lambda table, codes, seq: self._places(
            source.ownership(), wire.explain_path(name, number, table), codes, seq
        )
        return base

    def _places(self, owned: Ownership, target: str, codes: Keys, seq: int) -> list[Place]:
        """`FindPlaces`: each key is explained by a node that owns it."""
        count, until_s = owned.owns.shape[1], time.monotonic() + PLACES_S
        parts = partition_of(codes, count).tolist()
        places = [Place(partition=(part, count), error=_NOBODY) for part in parts]
        for number, node in enumerate(self.nodes.nodes):
            at = [i for i, part in enumerate(parts) if owned.owns[number, part] and places[i].peek is None]
            if at and (left_s := until_s - time.monotonic()) > 0:
                request = {"line": owned.line, "upto": seq, "codes": codes[at].tolist()}
                _fill(node, target, json.dumps(request).encode(), [places[i] for i in at], left_s)
        return places

    def add_status(self, document: dict[str, Any]) -> dict[str, Any]:
        """The status document of the store with what there is upstream in it."""
        for name, of_model in document["models"].items():
            if (member := self._members.get(name)) is not None:
                of_model["upstream"] = member.status()
        return document | {"upstream": self.status(), "ssd_cache": self.ssd_cache and self.ssd_cache.status()}

    def status(self) -> dict[str, Any]:
        """The nodes as this front sees them."""
        return {
            "nodes": {
                str(watch.node): {
                    "reachable": watch.answers,
                    "problem": watch.problem,
                    "connections_opened": watch.node.opened,
                }
                for watch in self.watches
            }
        }
