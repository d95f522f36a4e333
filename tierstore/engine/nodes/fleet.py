"""The models of a cluster on this node: found in the cluster, begun here, followed until the store closes.

Any thread. The data directory has only copies and caches: what it has of another kind of model keeps the store from opening.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tierstore import kernels
from tierstore.engine.cluster.base import PLACES_S, Place, RemoteBase
from tierstore.engine.cluster.commands import ClusterCommands
from tierstore.engine.cluster.shared_model import SharedModel, model_names
from tierstore.engine.lifecycle.state import Shared
from tierstore.engine.model import Model
from tierstore.engine.nodes.directory import check_directory, clear, open_ssd_cache
from tierstore.engine.nodes.member import Member
from tierstore.engine.nodes.upload import ClusterTarget
from tierstore.engine.versions.info import VersionInfo
from tierstore.errors import ClusterUnavailable, ConfigError, StorageError, TierstoreError, unknown_model
from tierstore.formats import files
from tierstore.formats.keys import partition_of
from tierstore.formats.names import DataDirectory
from tierstore.kernels import resp
from tierstore.tiers.remote.cluster import connect
from tierstore.tiers.remote.layout import slot_of
from tierstore.tiers.remote.options import Options
from tierstore.tiers.remote.tier import RemoteTable
from tierstore.tiers.remote.write import Writer
from tierstore.types import Keys, ProgressFn

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0  # for new models
REFRESH_EVERY_S = 10.0  # which servers there are: a replica that comes later is to be asked, too


class Fleet:
    """This node's part of a cluster. Raises as `connect`.

    `begin_model` makes a model of the store, `release` removes one that has no version, to be closed; None where it is needed.
    """

    def __init__(
        self, shared: Shared, root: DataDirectory, begin_model: Callable[[str], Model],
        release: Callable[[str], Model | None],
    ) -> None:  # fmt: skip
        settings = shared.settings
        assert settings.remote is not None
        check_directory(root, "--remote")
        # constant after construction
        self._settings, self._root, self._begin_model, self._release = settings, root, begin_model, release
        self._share = lambda: shared.throttle.share
        self.node = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.cluster = connect(settings.remote, Options(timeout_s=settings.remote_timeout_s))
        self._commands = ClusterCommands(self.cluster)
        self._thread = threading.Thread(target=self._run, name="tierstore-cluster", daemon=True)
        self._stopping = threading.Event()
        # guarded by _lock
        self._lock = threading.RLock()
        self._members: dict[str, Member] = {}
        self.problem: str | None = None
        self.ssd_cache = open_ssd_cache(shared, root)
        shared.open_remote = self.open_base

    def start(self) -> None:
        """Serve every model that the cluster has. StorageError where that cannot be."""
        kernels.load(module=resp.__name__)  # rather than within the time of the first look-up
        for name in model_names(self._commands):
            self.member(name)
        self._thread.start()

    def close(self) -> None:
        """Stop following, and report to the others that this node is gone; before the models are closed."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        for member in self._members.values():
            self._end(member)

    def _end(self, member: Member) -> None:
        member.close()
        try:
            member.shared.withdraw_node(self.node)
        except StorageError as error:
            log.warning("the cluster does not hear that this node ends: %s", error)

    def disconnect(self) -> None:
        """After the models are closed."""
        self.cluster.close()
        if self.ssd_cache is not None:
            self.ssd_cache.close()

    def _run(self) -> None:
        refreshed_s = time.monotonic()
        while not self._stopping.wait(LOOK_EVERY_S):
            if time.monotonic() - refreshed_s > REFRESH_EVERY_S:
                refreshed_s = time.monotonic()
                with contextlib.suppress(ClusterUnavailable, ConfigError):  # as if there were nothing new
                    self.cluster.refresh(deadline_s=refreshed_s + LOOK_EVERY_S)
            try:
                names = model_names(self._commands)
                for name in names:
                    if not self._stopping.is_set():
                        self.member(name)
                for name in self._members.keys() - set(names):
                    self._forget(name)
                self.problem = None
            except Exception as error:
                if str(error) != self.problem:
                    log.error(
                        "the cluster's models are not looked up: %s",
                        error,
                        exc_info=not isinstance(error, TierstoreError),
                    )
                self.problem = str(error)

    def member(self, name: str) -> Member:
        """A model, begun here if it is new."""
        with self._lock:
            member = self._members.get(name)
            if member is None:
                clear(self._root.model(name))
                model = self._begin_model(name)
                member = Member(model, SharedModel(self._commands, name), self.node, self._settings, self.open_writer)
                self._members[name] = member  # before it serves: then verbs find it
                try:
                    member.start()
                except BaseException:
                    del self._members[name]
                    raise
            return member

    def _forget(self, name: str) -> None:
        """End a model that is not on the cluster's list: its only load has failed. One that is served was lost from the list."""
        with self._lock:
            member = self._members[name]
            if member.follower.pointer.current is not None:
                member.shared.list_model()
                return
            model = self._release(name)
            if model is None:
                return
            log.info("model %s has no version in the cluster any more", name)
            del self._members[name]
            self._end(member)
            model.close()
            files.remove_tree(model.where.root)

    def existing(self, name: str) -> Member:
        """NotFound, naming those there are, for an unknown one."""
        member = self._members.get(name)
        if member is None:
            raise unknown_model(name, self._members)
        return member

    @property
    def unheard(self) -> str | None:
        """See `Elsewhere`. All models that the cluster had when this node began are here."""
        silent = [member.follower.silent for member in list(self._members.values())]
        why = next((why for why in (self.problem, *silent) if why is not None), None)
        return None if why is None else f"which models the cluster has is not known: {why}"

    @property
    def ready(self) -> bool:
        """See `Elsewhere`."""
        return True

    def target(self, name: str) -> ClusterTarget:
        """Where the rows of a load go."""
        member = self.member(name)

        def activate(number: int, report: ProgressFn) -> None:
            member.activate(number, progress=report)

        def tags() -> list[bytes]:
            return self.cluster.tags(self._settings.remote_tags)

        return ClusterTarget(member.shared, self.node, self._settings, tags, self.open_writer, self._share, activate)

    def open_base(self, name: str, info: VersionInfo) -> RemoteBase:
        """What reads the rows of a version."""
        tables = {
            info.tables[table]["id"]: RemoteTable(self.cluster, name, info.number, table, info.tags, spec.row_bytes)
            for table, spec in info.specs.items()
        }
        what = f"version {info.number} of {name!r}"
        base = RemoteBase(what, tables, info.watermark, self._settings.remote_on_failure, cache=self.ssd_cache)
        base.places = lambda table, codes, seq: self._places(base, info, table, codes, seq)
        return base

    def _places(self, base: RemoteBase, info: VersionInfo, table: str, codes: Keys, seq: int) -> list[Place]:
        """`FindPlaces`: each key is read from the server that has it."""
        until_s, count, spec = time.monotonic() + PLACES_S, len(info.tags), info.specs[table]
        places = [Place(partition=(part, count)) for part in partition_of(codes, count).tolist()]
        for place, code in zip(places, codes.tolist(), strict=True):
            try:
                place.node = str(self.cluster.master_of(slot_of(info.tags[place.partition[0]])))  # type: ignore[index]
                if time.monotonic() >= until_s:
                    raise ClusterUnavailable("not read: other keys took too long")
                place.peek = base.peek(info.tables[table]["id"], spec.row_bytes, code, seq)
            except TierstoreError as error:
                place.error = str(error)
        return places

    def open_writer(self, name: str, number: int, row_bytes: dict[str, int], tags: Sequence[bytes]) -> Writer:
        return Writer(self.cluster, name, number, row_bytes, tags)

    def add_status(self, document: dict[str, Any]) -> dict[str, Any]:
        """The status document of the store with what there is of the cluster in it."""
        for name, of_model in document["models"].items():
            if (member := self._members.get(name)) is not None:
                of_model["remote"] = member.status()
        return document | {"remote": self.status(), "ssd_cache": self.ssd_cache and self.ssd_cache.status()}

    def status(self) -> dict[str, Any]:
        """This node, and the cluster as it sees it."""
        members = self._members.copy()
        return {
            "node": self.node,
            "cluster": str(self.cluster.endpoints),
            "reachable": self.problem is None and all(one.follower.silent is None for one in members.values()),
            "problem": self.problem,
            **self.cluster.stats(),
        }
