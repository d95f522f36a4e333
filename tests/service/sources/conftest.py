"""Nodes for the tests of peers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tierstore.service.sources import peers

from ..upstream.scenes import Scene


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(peers, "POLL_S", 0.02)
    made = Scene(tmp_path)
    try:
        yield made
    finally:
        made.close()
