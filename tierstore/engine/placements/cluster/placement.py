"""The placement of rows in a cluster: its models are found there, begun here, and followed until the store closes.

Any thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tierstore import kernels
from tierstore.engine.deltas.incoming import DecodedDeltas
from tierstore.engine.lifecycle.state import Shared
from tierstore.engine.model import Model
from tierstore.engine.operations.together import Models
from tierstore.engine.placement import ModelVerbs, Refusals
from tierstore.engine.placements.cluster.model import ClusterModel
from tierstore.engine.placements.cluster.shared_model import line_text, model_names
from tierstore.engine.placements.cluster.target import ClusterTarget, owner_of
from tierstore.engine.placements.following.models import FollowedModels
from tierstore.engine.placements.following.rows import PLACES_S, RemoteRows
from tierstore.engine.placements.refusals import refusals_of
from tierstore.engine.versions.info import VersionInfo
from tierstore.engine.versions.rows import Place
from tierstore.errors import ConfigError, RemoteUnavailable, TierstoreError
from tierstore.formats import files
from tierstore.formats.keys import partition_of
from tierstore.tiers.cluster.engines import Inspection
from tierstore.tiers.cluster.redis_keys import slot_of
from tierstore.tiers.cluster.table import ClusterTable
from tierstore.tiers.cluster.topology import connect
from tierstore.tiers.cluster.write import Writer
from tierstore.tiers.connection_pools import Options
from tierstore.types import Keys, ProgressFn
from tierstore.wire import resp

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0  # for new models
REFRESH_EVERY_S = 10.0  # of the list of servers: a replica that comes later should be used too


class ClusterPlacement:
    """The `Placement` of a node that uses the cluster at `urls`. Raises as `connect`."""

    ready = True

    def __init__(self, shared: Shared, models: Models, urls: str) -> None:
        # constant after construction
        self._settings = settings = shared.settings
        self.refusals, self.log_retention_s = Refusals(refusals_of("cluster")), settings.log_kept_s
        self._share, self._decoded = lambda: shared.throttle.share, DecodedDeltas()
        self.node = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._owner = owner_of(models.root.lock, self.node)
        self.cluster = connect(urls, Options(timeout_s=settings.remote_timeout_s))
        self.followed = FollowedModels(shared, models, self._member, self._look, LOOK_EVERY_S, "tierstore-cluster")
        # written by the thread that looks for models; others may read
        self._refreshed_s = time.monotonic()
        self.problem: str | None = None
        self.inspection = Inspection((), None, ())
        self._inspect()

    def _member(self, model: Model) -> ClusterModel:
        return ClusterModel(
            model, self.cluster, self.node, self._owner, self._settings, self.open_writer, self.refusals,
            self._new_target, self._decoded,
        )  # fmt: skip

    def start(self) -> None:
        """StorageError if the cluster cannot be asked for its models."""
        kernels.load(module=resp.__name__)  # now, not during the first look-up
        for name in model_names(self.cluster):
            self.followed.member(name)
        self.followed.start()

    def close(self, close_models: Callable[[], None]) -> None:
        """Stop; the other nodes are told that this node is gone."""
        self.followed.close(close_models, self.cluster.close)

    def _look(self) -> None:
        if time.monotonic() - self._refreshed_s > REFRESH_EVERY_S:
            self._refreshed_s = time.monotonic()
            with contextlib.suppress(RemoteUnavailable, ConfigError):  # as if there were nothing new
                self.cluster.refresh(deadline_s=self._refreshed_s + LOOK_EVERY_S)
            self._inspect()
        try:
            names = model_names(self.cluster)
            for name in names:
                if not self.followed.stopping.is_set():
                    self.followed.member(name)
            for name in self.followed.by_name.keys() - set(names):
                self._forget(name)
            self.problem = None
        except Exception as error:
            if str(error) != self.problem:
                log.error(
                    "the cluster's models are not looked up: %s", error, exc_info=not isinstance(error, TierstoreError)
                )
            self.problem = str(error)

    def _inspect(self) -> None:
        """Look at what the servers run; what is new and bad of it is logged."""
        before, self.inspection = self.inspection, self.cluster.inspect(time.monotonic() + LOOK_EVERY_S)
        for text in filter(None, (self.inspection.problem, *self.inspection.warnings)):
            if text not in (before.problem, *before.warnings):
                log.warning("%s", text)

    def _forget(self, name: str) -> None:
        """End a model that is not on the cluster's list, because its only load has failed.

        A served or deactivated model that is missing was lost from the list, and is kept.
        """
        with self.followed.lock:
            member = self.followed.existing(name)
            pointer = member.follower.pointer
            if pointer.current is not None or pointer.deactivated:
                member.shared.list_model()
                return
            model = self.followed.models.release(name)
            if model is None:
                return
            log.info("model %s has no version in the cluster any more", name)
            self.followed.remove(name).close()
            model.close()
            files.remove_tree(model.where.root)

    def loading(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Keep a model during a load. When the cluster's list lacks a model that has nothing, every node forgets it."""
        return self.followed.models.loading(name, self.followed.member)

    def adopt(self, name: str, directory: Path) -> None:
        self.refusals.check("adopt")

    def existing(self, name: str) -> ModelVerbs:
        return self.followed.existing(name).placement

    @property
    def unheard(self) -> str | None:
        """Why models of the cluster may be missing here; None once all that it had at the start are here."""
        silent = [member.follower.silent for member in self.followed.by_name.values()]
        why = next((why for why in (self.problem, *silent) if why is not None), None)
        return None if why is None else f"which models the cluster has is not known: {why}"

    def _new_target(self, member: ClusterModel) -> ClusterTarget:
        """The target of a load."""

        def activate(number: int, report: ProgressFn) -> None:
            member.activate(number, progress=report)

        def tags() -> list[bytes]:
            return self.cluster.tags(self._settings.remote_tags)

        return ClusterTarget(
            member.shared, member.open_load, self._settings, tags, member.open_writer, self._share, activate
        )  # fmt: skip

    def open_rows(self, name: str, info: VersionInfo) -> RemoteRows:
        line = self.followed.existing(name).follower.pointer.undone.line(info.number)
        tables = {
            info.tables[table]["id"]: ClusterTable(
                self.cluster, name, info.number, table, info.tags, spec.row_bytes, line
            )
            for table, spec in info.specs.items()
        }
        rows = RemoteRows(
            f"version {info.number} of {name!r}", tables, info.watermark, self._settings.remote_on_failure,
            line=line_text(line), cache=self.followed.ssd_cache,
            rows={table["id"]: table["rows"] for table in info.tables.values()},
            find_places=lambda table, codes, seq: self._places(rows, info, table, codes, seq),
        )  # fmt: skip
        return rows

    def _places(self, rows: RemoteRows, info: VersionInfo, table: str, codes: Keys, seq: int) -> list[Place]:
        """`FindPlaces`: each key is read from its server."""
        until_s, count, spec = time.monotonic() + PLACES_S, len(info.tags), info.specs[table]
        places = [Place(partition=(part, count)) for part in partition_of(codes, count).tolist()]
        for place, code in zip(places, codes.tolist(), strict=True):
            try:
                place.node = str(self.cluster.master_of(slot_of(info.tags[place.partition[0]])))  # type: ignore[index]
                if time.monotonic() >= until_s:
                    raise RemoteUnavailable("not read: other keys took too long")
                place.peek = rows.peek(info.tables[table]["id"], spec.row_bytes, code, seq)
            except TierstoreError as error:
                place.error = str(error)
        return places

    def open_writer(
        self, name: str, number: int, row_bytes: dict[str, int], tags: Sequence[bytes], *, line: int = 0,
        load: str = "", is_on: Callable[[], bool] = lambda: False,
    ) -> Writer:  # fmt: skip
        return Writer(self.cluster, name, number, row_bytes, tags, line=line, load=load, is_on=is_on)

    def add_status(self, document: dict[str, Any]) -> dict[str, Any]:
        return self.followed.add_status(document, "remote", self.status())

    def status(self) -> dict[str, Any]:
        """The status of this node, and of the cluster as it sees it."""
        members = self.followed.by_name.values()
        return {
            "node": self.node,
            "cluster": str(self.cluster.endpoints),
            "reachable": self.problem is None and all(one.follower.silent is None for one in members),
            "problem": self.problem or self.inspection.problem,
            "engines": [str(engine) for engine in self.inspection.engines],
            "warnings": list(self.inspection.warnings),
            **self.cluster.stats(),
        }
