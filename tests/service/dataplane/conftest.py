"""Tests of what is answered, over every protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.callers import CALLERS, Caller
from tierstore.service.server import ServerThread


@pytest.fixture(params=CALLERS, ids=lambda caller: caller.__name__)
def caller(request: pytest.FixtureRequest, server: ServerThread) -> Iterator[Caller]:
    """To the fixture `server`, which a file of tests may have of its own."""
    caller: Caller = request.param(server)
    yield caller
    caller.close()
