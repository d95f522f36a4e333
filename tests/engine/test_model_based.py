"""A store on this machine keeps what `docs/consistency.md` promises, whatever is done to it and wherever it is killed."""

from __future__ import annotations

import pytest

from tests.counts import few_or_many
from tests.engine.model_based import StoresAgainstHistory, check


@pytest.mark.counted
def test_a_store_keeps_its_promises() -> None:
    check(StoresAgainstHistory, histories=few_or_many(8, 40), steps=30)
