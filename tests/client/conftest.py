"""Both clients with the same blocking verbs, and the scripted service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.client.fake_service import FakeService
from tierstore.client import AsyncClient, Client


class Blocking:
    """An `AsyncClient` whose verbs block, so that one suite serves both clients."""

    def __init__(self, url: str, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        self.client = AsyncClient(url, **settings)

    def __getattr__(self, name: str) -> Any:
        return self._waiting(getattr(self.client, name))

    def model(self, name: str) -> Any:
        return _Model(self, self.client.model(name))

    def close(self) -> None:
        self._runner.run(self.client.close())
        self._runner.close()

    def figures(self) -> Any:
        return self.client.figures()

    def together(self, calls: list[Callable[[Any], Any]]) -> list[Any]:
        """All calls at once; each is given the client and returns something to await."""

        async def gathered() -> list[Any]:
            return await asyncio.gather(*(call(self.client) for call in calls), return_exceptions=True)

        return self._runner.run(gathered())

    def _waiting(self, verb: Any) -> Any:
        return lambda *arguments, **options: self.wait(verb(*arguments, **options))

    def wait(self, waiting: Any) -> Any:
        async def awaited() -> Any:
            return await waiting

        return self._runner.run(awaited())


class _Model:
    def __init__(self, outer: Blocking, model: Any) -> None:
        self._outer, self._model = outer, model

    @property
    def ready(self) -> Any:
        return self._outer.wait(self._model.ready)

    def __getattr__(self, name: str) -> Any:
        return self._outer._waiting(getattr(self._model, name))


Make = Callable[..., Any]


def same(left: Any, right: Any) -> None:
    """Both arrays are equal, and of one dtype."""
    np.testing.assert_array_equal(left, right)
    assert left.dtype == right.dtype


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes a client of either kind; all are closed at the end."""
    made: list[Any] = []

    def client(url: str, **settings: Any) -> Any:
        made.append((Client if request.param == "sync" else Blocking)(url, **settings))
        return made[-1]

    client.kind = request.param  # type: ignore[attr-defined]
    yield client
    for one in made:
        one.close()


@contextmanager
def fake() -> Iterator[FakeService]:
    with FakeService() as service:
        yield service


@pytest.fixture
def service() -> Iterator[FakeService]:
    with FakeService() as service:
        yield service
