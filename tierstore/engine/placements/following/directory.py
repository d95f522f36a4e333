"""The data directory of a node whose rows are on other machines: it has only copies and caches."""

from __future__ import annotations

from tierstore import kernels
from tierstore.engine.data.disk_room import check_free
from tierstore.engine.lifecycle.state import Shared
from tierstore.errors import ConfigError
from tierstore.formats import files
from tierstore.formats.names import DataDirectory, ModelDirectory
from tierstore.tiers.ssd import index as ssd_index
from tierstore.tiers.ssd.cache import SsdCache


def check_no_local_models(root: DataDirectory, option: str) -> None:
    """ConfigError if it has models whose rows are on this machine; `option` is why there may be none."""
    for name in root.models_on_disk():
        where = root.model(name)
        for number, line in where.versions_on_disk():
            if files.exists(where.version(number, line).db):
                raise ConfigError(
                    f"{root.root} has version {number} of model {name!r}, whose rows are on this machine: with "
                    f"{option}, use a data directory of its own"
                )


def clear(where: ModelDirectory) -> None:
    """Remove what an earlier process has followed: the other machines report it again. Hot keys stay."""
    if not where.root.is_dir():
        return
    files.remove_file(where.log_end)
    files.remove_tree(where.log)


def open_ssd_cache(shared: Shared, root: DataDirectory) -> SsdCache | None:
    """The cache on the disk of the data directory; None if none is wanted."""
    settings, where = shared.settings, root.root
    if not settings.ssd_cache:
        return None
    if not kernels.awaited:  # otherwise look-ups do without it, until its kernels are there
        kernels.load(module=ssd_index.__name__)
    return SsdCache(
        where, settings.ssd_cache, shared.readers,
        lambda nbytes: check_free(where, settings.disk_reserve, "the cache on SSD", nbytes),
    )  # fmt: skip
