"""The choice of a store's placement, by its settings. What other placements need is imported for them alone."""

from __future__ import annotations

from tierstore.engine.lifecycle.state import Shared
from tierstore.engine.operations.together import Models
from tierstore.engine.placement import Placement
from tierstore.engine.placements.following.directory import check_no_local_models
from tierstore.engine.placements.local.placement import LocalPlacement
from tierstore.errors import ConfigError


def choose_placement(shared: Shared, models: Models) -> Placement:
    """The placement. ConfigError for settings that contradict each other, or the data directory; other errors as the
    placement's.
    """
    remote, upstream = shared.settings.remote, shared.settings.upstream
    if remote is not None and upstream is not None:
        raise ConfigError("remote and upstream: rows are either in a cluster or on nodes upstream; set one of them")
    if remote is not None:
        check_no_local_models(models.root, "--remote")
        from tierstore.engine.placements.cluster.placement import ClusterPlacement

        return ClusterPlacement(shared, models, remote)
    if upstream is not None:
        check_no_local_models(models.root, "--upstream")
        from tierstore.engine.placements.upstream.placement import UpstreamPlacement

        return UpstreamPlacement(shared, models, upstream)
    return LocalPlacement(shared, models)
