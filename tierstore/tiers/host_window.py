"""The host tier of another process: look-ups in its shared memory, nothing else.

Any number of threads may call anything. What is offered is dropped: the process that owns the table promotes rows
itself as it reads them on behalf of this one. Nothing survives either process.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from tierstore.errors import StorageError
from tierstore.tiers.host import _Reader
from tierstore.tiers.shared_mapping import SharedMapping
from tierstore.types import Keys, Rows, TableSpec


class HostWindow(_Reader):
    """The reading end of a `HostTable` that was made with `shared`; `spec` and `budget_bytes` are the table's own.

    Takes `fd` over and closes it. The mapping goes with the last reference to the window: a look-up that is under
    way in a table that was closed meanwhile reads zeros, which are empty sets.
    """

    rows_resident = 0  # is for the owner to say

    def __init__(self, spec: TableSpec, budget_bytes: int, fd: int, *, default_vector: np.ndarray) -> None:
        super().__init__(spec, budget_bytes, default_vector)
        try:
            if self._layout.sets:
                self._open(SharedMapping(fd, self._layout.size))
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot map the host tier of table {spec.name}: {error}") from error
        finally:
            os.close(fd)

    def insert(self, keys: Keys, rows: Rows, seq: int) -> int:
        return 0

    def insert_absent(self, keys: Keys, seq: int) -> int:
        return 0

    def stats(self) -> dict[str, Any]:
        return {"capacity_rows": self.capacity_rows, "bytes": self.bytes_in_use, "budget_bytes": self.budget_bytes}

    def close(self) -> None:
        """Let go of the mapping; look-ups under way end safely, later ones leave every key pending."""
        self._areas = None
