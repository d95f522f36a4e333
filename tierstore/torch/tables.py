"""The tables of a module: its embeddings, by name. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from tierstore.errors import InvalidInput
from tierstore.types import check_name

BATCH_ROWS = 1 << 16  # rows that are copied at a time


def tables_of(module: nn.Module) -> dict[str, Any]:
    found = {}
    for path, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            found[check_name("table", path.replace(".", "_") or "embedding")] = part
    if not found:
        raise InvalidInput(f"{type(module).__name__} has no nn.Embedding and no nn.EmbeddingBag: expected at least one")
    return found


def checked_keys(keys: Mapping[str, Any] | None, tables: Mapping[str, Any]) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name, values in (keys or {}).items():
        if name not in tables:
            raise InvalidInput(f"keys: expected tables among {', '.join(tables)}, got {name!r}")
        arrays[name] = values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)
        if arrays[name].shape != (len(tables[name].weight),):
            raise InvalidInput(
                f"keys of table {name!r}: expected one per row, {len(tables[name].weight)}, got {list(arrays[name].shape)}"
            )
    return arrays
