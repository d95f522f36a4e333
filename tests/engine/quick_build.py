"""Loads of models with a dense part without a process that tries the graph, for tests that load many of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tierstore.predict import sandbox


@contextmanager
def in_process() -> Iterator[None]:
    """Within the block graphs are not tried in a process of their own. Rows of a few MB are loaded in this one in any case."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "try_graph", lambda *_: None)
        yield
