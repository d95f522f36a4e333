"""Tests of what is answered, through every door."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.doors import DOORS, Door
from tierstore.service.server import ServerThread


@pytest.fixture(params=DOORS, ids=lambda door: door.__name__)
def door(request: pytest.FixtureRequest, server: ServerThread) -> Iterator[Door]:
    """To the fixture `server`, which a file of tests may have of its own."""
    door: Door = request.param(server)
    yield door
    door.close()
