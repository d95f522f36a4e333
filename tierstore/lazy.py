"""NumPy, imported when something of it is first used: a command that only asks a service starts sooner without it.

    if TYPE_CHECKING:
        import numpy as np
    else:
        from tierstore.lazy import np

Any thread may use it.
"""

from __future__ import annotations

from typing import Any


class _NumPy:
    def __getattr__(self, name: str) -> Any:
        import numpy

        value = getattr(numpy, name)
        setattr(self, name, value)  # not asked for again
        return value


np = _NumPy()
