"""The followed models of a store: each is begun once, found by its name, and followed until the store closes.

Any thread. One thread looks for new models. The data directory has only copies and caches.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from tierstore.engine.lifecycle.state import Shared
from tierstore.engine.model import Model
from tierstore.engine.operations.together import Models
from tierstore.engine.placement import ModelVerbs
from tierstore.engine.placements.following.directory import clear, open_ssd_cache
from tierstore.errors import unknown_model
from tierstore.threads import Thread


class FollowedModel(Protocol):
    """A model with its follower."""

    placement: ModelVerbs

    def start(self) -> None:
        """Serve it as the other machines do, and follow it."""

    def close(self) -> None:
        """Stop following; before the model is closed."""

    def status(self) -> dict[str, Any]: ...


M = TypeVar("M", bound=FollowedModel)


class FollowedModels(Generic[M]):
    """The followers of one store's models.

    `make` gives a new model its follower; `look` is called every `every_s` seconds, by the thread `name`.
    """

    def __init__(
        self, shared: Shared, models: Models, make: Callable[[Model], M], look: Callable[[], None], every_s: float,
        name: str
    ) -> None:  # fmt: skip
        # constant after construction
        self.models, self._make, self._look, self._every_s = models, make, look, every_s
        self.ssd_cache = open_ssd_cache(shared, models.root)
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self.stopping = threading.Event()
        # guarded by lock; replaced in one step
        self.lock = threading.RLock()
        self.by_name: dict[str, M] = {}

    def start(self) -> None:
        """Begin to look for new models."""
        self._thread.start()

    def _run(self) -> None:
        while not self.stopping.wait(self._every_s):
            self._look()

    def member(self, name: str) -> M:
        """A model, begun here if it is new."""
        with self.lock:
            if name not in self.by_name:
                clear(self.models.root.model(name))
                member = self._make(self.models.begin(name))
                self.by_name = self.by_name | {name: member}  # before it serves: then verbs and reads find it
                try:
                    member.start()
                except BaseException:
                    self.remove(name)
                    raise
            return self.by_name[name]

    def remove(self, name: str) -> M:
        """Stop following a model; `close` the result."""
        with self.lock:
            member = self.by_name[name]
            self.by_name = {other: of for other, of in self.by_name.items() if other != name}
            return member

    def existing(self, name: str) -> M:
        """A followed model. NotFound names the existing ones."""
        member = self.by_name.get(name)
        if member is None:
            raise unknown_model(name, self.by_name)
        return member

    def add_status(self, document: dict[str, Any], key: str, status: dict[str, Any]) -> dict[str, Any]:
        """The status document of the store with `status`, and that of each model, under `key`."""
        for name, of_model in document["models"].items():
            if (member := self.by_name.get(name)) is not None:
                of_model[key] = status_of = member.status()
                of_model["rollback_to"] = status_of.get("rollback_to")
        return document | {key: status, "ssd_cache": self.ssd_cache and self.ssd_cache.status()}

    def close(
        self, close_models: Callable[[], None], disconnect: Callable[[], None], *watched: Callable[[], None]
    ) -> None:
        """Stop following, end what is `watched`, close the models, then the readers of their rows.

        An error leaves nothing else open.
        """
        self.stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        with contextlib.ExitStack() as stack:
            if self.ssd_cache is not None:
                stack.callback(self.ssd_cache.close)
            for close in (disconnect, close_models, *watched, *(member.close for member in self.by_name.values())):
                stack.callback(close)
