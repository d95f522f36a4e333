"""For all tests: helper processes of bulk loads are kept from one test to the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import warm_helpers


@pytest.fixture(scope="session", autouse=True)
def _kept_helpers() -> Iterator[None]:
    with warm_helpers.kept():
        yield


@pytest.fixture
def own_helpers() -> Iterator[None]:
    """For tests that are about helper processes: each load starts its own, and ends them."""
    with warm_helpers.not_kept():
        yield
