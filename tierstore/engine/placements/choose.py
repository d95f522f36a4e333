"""Which placement a store has, by its settings; and what is said of a model that it does not have."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.engine.lifecycle.state import Shared
from tierstore.engine.operations.together import Models
from tierstore.engine.placement import Placement
from tierstore.engine.placements.cluster.placement import ClusterPlacement
from tierstore.engine.placements.following.directory import check_directory
from tierstore.engine.placements.local.placement import LocalPlacement
from tierstore.engine.placements.upstream.placement import UpstreamPlacement
from tierstore.errors import ConfigError, NotFound, RemoteUnavailable, unknown_model


def choose(shared: Shared, models: Models) -> Placement:
    """ConfigError for settings that contradict each other, or the data directory; else raises as the placement does."""
    remote, upstream = shared.settings.remote, shared.settings.upstream
    if remote is not None and upstream is not None:
        raise ConfigError("remote and upstream: rows are either in a cluster or on nodes upstream; set one of them")
    if remote is not None:
        check_directory(models.root, "--remote")
        return ClusterPlacement(shared, models, remote)
    if upstream is not None:
        check_directory(models.root, "--upstream")
        return UpstreamPlacement(shared, models, upstream)
    return LocalPlacement(shared, models)


def no_model(name: str, there: Sequence[str], placement: Placement) -> NotFound | RemoteUnavailable:
    """What to raise for a model that is not among those `there`: nobody can say that there is none before all were heard."""
    return unknown_model(name, there) if (why := placement.unheard) is None else RemoteUnavailable(why)
