"""A host table as look-ups have it: without overlays over it, and with bags pooled out of it."""

from __future__ import annotations

import numpy as np

from tierstore.kernels.codec import address_of
from tierstore.kernels.pool import combiner_code
from tierstore.lookup import table_rows
from tierstore.lookup.plans import TABLE
from tierstore.tiers.host.table import HostTable
from tierstore.types import Combiner

NO_WEIGHTS = np.empty(0, np.float32)


def pool(
    table: HostTable,
    keys: np.ndarray,
    starts: np.ndarray,
    weights: np.ndarray | None,
    combiner: Combiner,
    out: np.ndarray,
    state: np.ndarray,
    padding: int | None = None,
) -> int:
    """`table_rows.pool`."""
    words = TABLE.make(
        host=table.words_at, default_at=address_of(table._defaults[0]), dim=table.spec.dim,
        code=table.spec.dtype.code, row_bytes=table.spec.row_bytes,
    )  # fmt: skip
    return int(
        table_rows.pool(
            address_of(words), keys, state, padding is not None, padding or 0, starts,
            NO_WEIGHTS if weights is None else weights, combiner_code(combiner), int(out.dtype == np.float16),
            out.view(np.uint8),
        )
    )  # fmt: skip
