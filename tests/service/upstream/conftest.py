"""What tests of nodes in front begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.service.upstream.scenes import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


@pytest.fixture
def heads() -> ModuleType:
    """Models with several dense parts."""
    return pytest.importorskip("tests.engine.reads.test_heads", reason="needs the extra `dense`")  # type: ignore[no-any-return]
