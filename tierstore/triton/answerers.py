"""Answerers of a Triton model's requests: a store in this process, or a service that has the rows.

Triton's Python backend runs each instance of each model in a process of its own, and one process at a time may have a
data directory open. So the first instance that comes opens the directory, and serves it over HTTP too, for deltas,
versions and metrics; every other one, of whatever model, finds there who serves it, and asks that. Where
`tierstore serve` has the directory open, all of them ask that. When the process that served is gone, the next one that
wants something opens the directory.

An answerer belongs to the thread that executes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from tierstore.client import Client
from tierstore.client.environment import client_options
from tierstore.errors import ConfigError, Locked, NotReady, Unreachable

log = logging.getLogger(__name__)

Arrays = dict[str, npt.NDArray[Any]]
T = TypeVar("T")
START_S = 60.0  # that an instance waits for a service that starts
_POLL_S = 0.1


class Answerer(Protocol):
    """What answers requests to one model."""

    def answer(self, inputs: Arrays, outputs: Sequence[str], timeout_us: int | None, *, on_gpu: bool) -> Arrays:
        """The outputs of these names, by the inputs of a request. TierstoreError.

        `on_gpu`: rows are left on the GPU where the answerer is a store that has a device tier there.
        """

    def check(self) -> None:
        """Raise NotFound or NotReady unless the model is served."""

    def close(self) -> None: ...


class RemoteService:
    """A service, over its own client."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        self._client = Client(url, **client_options(url.split(",")))

    def answer(self, inputs: Arrays, outputs: Sequence[str], timeout_us: int | None, *, on_gpu: bool) -> Arrays:
        timeout_s = None if timeout_us is None else timeout_us / 1e6
        return self._client.predict(self._model, inputs, outputs=outputs, split_items=None, timeout_s=timeout_s)

    def check(self) -> None:
        if not self._client.model(self._model).ready:
            raise NotReady(f"model {self._model!r} has no active version: load a snapshot, and load this model again")

    def reached(self) -> RemoteService:
        """Itself. Unreachable where nothing answers."""
        try:
            self._client.ready()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        self._client.close()


class Directory:
    """A data directory, opened by this process or requested of the one that has it open."""

    def __init__(self, data: Path, model: str, settings: Mapping[str, Any]) -> None:
        self._data, self._model, self._settings = data, model, settings
        self._answerer: Answerer | None = self._find()

    def answer(self, inputs: Arrays, outputs: Sequence[str], timeout_us: int | None, *, on_gpu: bool) -> Arrays:
        if self._answerer is not None:
            try:
                return self._answerer.answer(inputs, outputs, timeout_us, on_gpu=on_gpu)
            except Unreachable as error:
                log.warning("%s: looking up which node has %s now", error, self._data)
                self.close()
        self._answerer = self._find()
        return self._answerer.answer(inputs, outputs, timeout_us, on_gpu=on_gpu)

    def check(self) -> None:
        assert self._answerer is not None
        self._answerer.check()

    def close(self) -> None:
        answerer, self._answerer = self._answerer, None
        if answerer is not None:
            answerer.close()

    def _find(self) -> Answerer:
        from tierstore.triton.embedded import Embedded

        def found() -> Answerer:
            try:
                return Embedded(self._data, self._model, self._settings)
            except Locked as error:
                if error.url is None:  # it is being opened, or closed
                    raise
                return RemoteService(error.url, self._model).reached()

        return until(found, (Locked, Unreachable))


def until(found: Callable[[], T], waits_for: type[Exception] | tuple[type[Exception], ...]) -> T:
    """What `found` returns once it does not raise `waits_for`; after START_S it is raised."""
    until_s = time.monotonic() + START_S
    while True:
        try:
            return found()
        except waits_for:
            if time.monotonic() > until_s:
                raise
            time.sleep(_POLL_S)


def answerer_of(parameters: Mapping[str, str], model: str) -> Answerer:
    """By the parameters of `model`: `url`, or `data` with settings of the store.

    ConfigError where neither or both are there.
    """
    settings = {name: value for name, value in parameters.items() if name not in ("data", "url", "model")}
    url, data = parameters.get("url"), parameters.get("data")
    if (url is None) == (data is None):
        raise ConfigError("config.pbtxt: expected the parameter `data`, a directory, or `url`, a service")
    if url is not None:
        return RemoteService(url, model)
    assert data is not None
    return Directory(Path(data), model, settings)
