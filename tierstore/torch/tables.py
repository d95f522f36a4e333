"""The tables of a module: its embeddings, by name. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from tierstore.errors import InvalidInput
from tierstore.types import check_name

BATCH_ROWS = 1 << 16  # rows that are copied at a time


class Collection(NamedTuple):
    """A TorchRec collection in a module, told by what it has: TorchRec is not imported."""

    module: Any
    tables: list[
        tuple[Any, Any]
    ]  # a config (`name`, `feature_names`, perhaps `pooling`) with its nn.Embedding or nn.EmbeddingBag


def collections_of(module: nn.Module) -> list[Collection]:
    """Every EmbeddingBagCollection and EmbeddingCollection in a module, as one process has
    them before they are sharded.
    """
    found = []
    for part in module.modules():
        for configs, tables in (("embedding_bag_configs", "embedding_bags"), ("embedding_configs", "embeddings")):
            if callable(getattr(part, configs, None)) and isinstance(getattr(part, tables, None), nn.ModuleDict):
                of = getattr(part, tables)
                found.append(Collection(part, [(one, of[one.name]) for one in getattr(part, configs)()]))
    return found


def tables_of(module: nn.Module) -> dict[str, Any]:
    """The embeddings in a module by the names of their tables: their paths (`user.rows` is
    `user_rows`), or those of their configs.
    """
    configs = {id(table): config.name for one in collections_of(module) for config, table in one.tables}
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            name = check_name("table", configs.get(id(part), path.replace(".", "_") or "embedding"))
            if name in found:
                raise InvalidInput(f"two tables of {type(module).__name__} are named {name!r}: rename one of them")
            found[name] = part
    if not found:
        raise InvalidInput(f"{type(module).__name__} has no nn.Embedding and no nn.EmbeddingBag: expected at least one")
    return found


def check_mode(of: str, mode: str | None) -> None:
    """InvalidInput for a way of pooling that is not served; None is none."""
    if mode not in (None, "sum", "mean"):
        raise InvalidInput(f"{of}: mode {mode!r} is not served: expected sum or mean")


def checked_keys(keys: Mapping[str, Any] | None, tables: Mapping[str, Any]) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name, values in (keys or {}).items():
        if name not in tables:
            raise InvalidInput(f"keys: expected tables among {', '.join(tables)}, got {name!r}")
        arrays[name] = values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)
        if arrays[name].shape != (len(tables[name].weight),):
            raise InvalidInput(
                f"keys of table {name!r}: expected one per row, {len(tables[name].weight)}, got "
                f"{list(arrays[name].shape)}"
            )
    return arrays
