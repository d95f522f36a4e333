"""Where the rows are, if not on this machine: in a cluster, or on nodes upstream. What a store needs of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tierstore.engine.lifecycle.state import Shared
from tierstore.engine.model import Model
from tierstore.engine.nodes.fleet import Fleet
from tierstore.engine.operations.load import Target
from tierstore.engine.operations.verbs import Verbs
from tierstore.engine.upstream.front import Front
from tierstore.errors import ClusterUnavailable, ConfigError, NotFound, unknown_model
from tierstore.formats.names import DataDirectory
from tierstore.tiers.ssd.cache import SsdCache


class Elsewhere(Protocol):
    """The models of other machines, as this node serves them."""

    ssd_cache: SsdCache | None  # of their rows, on this machine

    def start(self) -> None:
        """Serve them, and follow them."""

    def close(self) -> None:
        """Stop following; before the models are closed."""

    def disconnect(self) -> None:
        """After the models are closed."""

    def member(self, name: str) -> object:
        """Have a model, which is to be loaded."""

    def existing(self, name: str) -> Verbs:
        """NotFound for an unknown model."""

    def target(self, name: str) -> Target:
        """Where the rows of a load go."""

    def add_status(self, document: dict[str, Any]) -> dict[str, Any]: ...

    @property
    def unheard(self) -> str | None:
        """Why there may be models over there that are not here yet; None where all are here."""

    @property
    def ready(self) -> bool:
        """Whether requests are wanted here: a model is served, or all that there are over there are here."""


def no_model(name: str, there: Sequence[str], elsewhere: Elsewhere | None) -> NotFound | ClusterUnavailable:
    """What to raise for a model that is not among those `there`: nobody can say that there is none before all were heard."""
    if elsewhere is not None and (why := elsewhere.unheard) is not None:
        return ClusterUnavailable(why)
    return unknown_model(name, there)


def rows_elsewhere(
    shared: Shared, root: DataDirectory, begin_model: Callable[[str], Model], release: Callable[[str], Model | None]
) -> Elsewhere | None:
    """None where the rows are on this machine. ConfigError for settings that contradict each other."""
    if shared.settings.upstream is None:
        return None if shared.settings.remote is None else Fleet(shared, root, begin_model, release)
    if shared.settings.remote is not None:
        raise ConfigError("remote and upstream: rows are either in a cluster or on nodes upstream; set one of them")
    return Front(shared, root, begin_model)
