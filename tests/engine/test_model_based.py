"""A store on this machine keeps what `docs/consistency.md` promises, whatever is done to it and wherever it is killed."""

from __future__ import annotations

from tests.engine.model_based import StoresAgainstHistory, check


def test_a_store_keeps_its_promises() -> None:
    check(StoresAgainstHistory, histories=40, steps=30)
