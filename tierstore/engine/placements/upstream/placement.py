"""The placement of rows on upstream nodes: this node is a front, which begins and follows the models that the nodes
serve.

Any thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierstore import kernels
from tierstore.engine.lifecycle.state import Shared
from tierstore.engine.model import Model
from tierstore.engine.operations.together import Models
from tierstore.engine.placement import ModelVerbs, Refusals
from tierstore.engine.placements.following.follower import Follower
from tierstore.engine.placements.following.models import FollowedModels
from tierstore.engine.placements.following.rows import PLACES_S, RemoteRows
from tierstore.engine.placements.refusals import refusals_of
from tierstore.engine.placements.upstream.model import UpstreamModel
from tierstore.engine.placements.upstream.watch import Watch
from tierstore.engine.versions.info import VersionInfo
from tierstore.engine.versions.rows import Place
from tierstore.errors import RemoteUnavailable, TierstoreError
from tierstore.formats.delta.reader import read_delta
from tierstore.formats.keys import partition_of
from tierstore.tiers.answers import reading
from tierstore.tiers.base import Peek
from tierstore.tiers.connection_pools import ConnectionPools, Options
from tierstore.tiers.upstream import reads as upstream_reads
from tierstore.tiers.upstream import wire
from tierstore.tiers.upstream.connections import NodeConnection, UpstreamNode
from tierstore.tiers.upstream.options import NodeAddress, check_token, parse_node_urls, tls_context
from tierstore.tiers.upstream.table import Nodes, Ownership, OwnerSource, UpstreamTable
from tierstore.types import Keys

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2  # for new models
_NOBODY = "no node that answers owns its partition"


class FrontModel:
    """One model of this front. It has no verbs: see `refusals`."""

    def __init__(self, model: Model, upstream: UpstreamModel, node: str, refusals: Refusals) -> None:
        self.model, self.upstream = model, upstream
        self.follower = Follower(model, upstream, node, lambda data, _: read_delta(data))
        self.start, self.close = self.follower.start, self.follower.close
        self.placement = ModelVerbs(leads=lambda: False, **refusals.verbs(model.name))

    def status(self) -> dict[str, Any]:
        """What this front knows of the upstream model, without asking a node."""
        pointer, problems = self.follower.pointer, (self.follower.silent, self.follower.unready)
        return {
            "reachable": self.follower.silent is None,
            "problem": "; ".join(filter(None, problems)) or None,
            "current": pointer.current,
            "wanted": pointer.wanted,
            "seq": pointer.seq,
            "watermarks": {str(number): mark for number, mark in sorted(pointer.marks.items())},
            "partitions": self.upstream.coverage(),
        }


def _fill(
    node: UpstreamNode, target: str, request: bytes, places: list[Place], row_bytes: int, timeout_s: float
) -> None:
    """Fill in what a node says of some keys, or why it does not answer."""
    for place in places:
        place.node = str(node)
    try:
        reply = node.request("POST", target, request, timeout_s=timeout_s)
        if reply.status != 200:
            raise RemoteUnavailable(f"{node} answers {reply.status}: {reply.problem}")
        with reading(f"what {node} says of the keys"):
            for place, entry in zip(places, json.loads(bytes(reply.body))["keys"], strict=True):
                if entry["tier"] is None:
                    place.error = f"{node}: {entry['why']}"
                    continue
                stored = entry.pop("stored")
                row = None if stored is None else bytes.fromhex(stored)
                if row is not None and len(row) != row_bytes:
                    raise ValueError(f"expected rows of {row_bytes} bytes, got {len(row)}")
                place.peek = Peek(absent=True) if row is None else Peek(row)
                place.error, place.explained = None, entry
    except TierstoreError as error:
        for place in places:
            place.error, place.peek = str(error), None


class UpstreamPlacement:
    """The `Placement` of a front for the nodes at `urls`. ConfigError for malformed addresses."""

    def __init__(self, shared: Shared, models: Models, urls: str) -> None:
        # constant after construction
        self._settings = settings = shared.settings
        self.node = f"{socket.gethostname()}-{secrets.token_hex(3)}"
        addresses = parse_node_urls(urls)
        if settings.upstream_token is not None and not settings.upstream_allow_insecure_token:
            check_token(addresses)
        pools: ConnectionPools[NodeAddress, NodeConnection] = ConnectionPools(
            Options(timeout_s=settings.remote_timeout_s), "the front"
        )
        tls = tls_context(addresses, None if settings.upstream_ca is None else str(settings.upstream_ca))
        self.nodes = Nodes([UpstreamNode(one, pools, settings.upstream_token, tls) for one in addresses], pools)
        self.refusals = Refusals(refusals_of("upstream"), nodes=",".join(map(str, self.nodes.nodes)))
        self.log_retention_s = settings.log_kept_s
        self.watches = [Watch(node, self.node, self._served, self._wake) for node in self.nodes.nodes]
        self.followed = FollowedModels(shared, models, self._member, self._look, LOOK_EVERY_S, "tierstore-front")
        # written by the thread that looks for models; others may read
        self._complete = False  # whether every node has answered once, and the models of that moment have begun

    def _member(self, model: Model) -> FrontModel:
        upstream = UpstreamModel(model.name, self.watches, lambda: model.active_version, int(self._settings.max_delta))
        return FrontModel(model, upstream, self.node, self.refusals)

    def start(self) -> None:
        """Start. If no node answers, the models are found once one does."""
        kernels.load(module=upstream_reads.__name__)  # now, not during the first look-up
        for watch in self.watches:
            watch.start()
        until_s = time.monotonic() + self.nodes.pools.options.connect_timeout_s + 0.5
        for watch in self.watches:
            watch.first.wait(max(0.0, until_s - time.monotonic()))
        self._look()
        self.followed.start()

    def close(self, close_models: Callable[[], None]) -> None:
        self.followed.close(close_models, self.nodes.pools.close, *(watch.close for watch in self.watches))

    def _look(self) -> None:
        """Begin models that are new upstream."""
        heard = all(watch.heard for watch in self.watches)
        for name in sorted({name for watch in self.watches for name in watch.models()} - self.followed.by_name.keys()):
            if self.followed.stopping.is_set():
                return
            try:
                self.followed.member(name)
            except Exception as error:
                log.error("model %s is not begun: %s", name, error, exc_info=not isinstance(error, TierstoreError))
        self._complete = self._complete or heard

    def _served(self) -> dict[str, tuple[int, int]]:
        """By model, the version that is served here and the lowest seq that is read: nodes hold what this front
        needs.
        """
        served = {}
        for name, member in self.followed.by_name.items():
            number, seq = member.model.active_version, member.model.publisher.lowest_seq()
            if number is not None and seq is not None:
                served[name] = number, seq
        return served

    def _wake(self) -> None:
        for member in self.followed.by_name.values():
            member.follower.wake()

    def loading(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Nothing: there are no loads here."""
        return contextlib.nullcontext()

    def adopt(self, name: str, directory: Path) -> None:
        self.refusals.check("adopt")

    def existing(self, name: str) -> ModelVerbs:
        return self.followed.existing(name).placement

    @property
    def unheard(self) -> str | None:
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
        return self._complete or any(of.model.active_version is not None for of in self.followed.by_name.values())

    def open_rows(self, name: str, info: VersionInfo) -> RemoteRows:
        member = self.followed.existing(name)
        upstream, number = member.upstream, info.number
        line = upstream.line(number, info.loaded_at_s)
        source = OwnerSource(
            lambda: upstream.ownership(number, line), upstream.refresh, lambda: member.model.state.log.last or 0
        )
        tables = {
            info.tables[table]["id"]: UpstreamTable(self.nodes, name, number, table, spec.row_bytes, source)
            for table, spec in info.specs.items()
        }
        return RemoteRows(
            f"version {number} of {name!r}", tables, info.watermark, self._settings.remote_on_failure,
            where="a node upstream", line=line, cache=self.followed.ssd_cache,
            rows={table["id"]: table["rows"] for table in info.tables.values()},
            find_places=lambda table, codes, seq: self._places(
                source.ownership(), wire.explain_path(name, number, table), codes, seq, info.specs[table].row_bytes
            ),
        )  # fmt: skip

    def _places(self, owned: Ownership, target: str, codes: Keys, seq: int, row_bytes: int) -> list[Place]:
        """`FindPlaces`: each key is explained by a node that owns it."""
        count, until_s = owned.owns.shape[1], time.monotonic() + PLACES_S
        parts = partition_of(codes, count).tolist()
        places = [Place(partition=(part, count), error=_NOBODY) for part in parts]
        for number, node in enumerate(self.nodes.nodes):
            at = [i for i, part in enumerate(parts) if owned.owns[number, part] and places[i].peek is None]
            if at and (left_s := until_s - time.monotonic()) > 0:
                request = {"line": owned.line, "upto": seq, "codes": codes[at].tolist()}
                _fill(node, target, json.dumps(request).encode(), [places[i] for i in at], row_bytes, left_s)
        return places

    def add_status(self, document: dict[str, Any]) -> dict[str, Any]:
        return self.followed.add_status(document, "upstream", self.status())

    def status(self) -> dict[str, Any]:
        """The nodes as this front sees them."""
        return {
            "nodes": {
                str(watch.node): {
                    "reachable": watch.answers,
                    "problem": watch.problem,
                    "connections_opened": self.nodes.pools.opened(watch.node.address),
                }
                for watch in self.watches
            }
        }
