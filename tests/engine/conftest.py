"""Stores that close themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tierstore
from tierstore.engine.store import Store


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Opens the store in tmp_path/data; call it again after closing to reopen. Closes what is left open."""
    opened: list[Store] = []

    def open_(**settings: object) -> Store:
        options = {"host_budget": "4MiB", "load_workers": 1, "disk_threads": 2, "fold_grace_s": 0.0} | settings
        opened.append(tierstore.open(tmp_path / "data", **options))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., Store]) -> Store:
    return open_store()
