"""A stop while predictions are under way: what they have in memory is freed once, and nobody reads what is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tierstore.lookup import cold_reads
from tierstore.service.reactor import predictions


class _FewJobs:
    """Predictions over jobs of this test, of one reactor, and which blocks of them were freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.freed: list[int] = []
        self.jobs = cold_reads.JOB.new(count)
        self.jobs["announced"] = self.jobs["scoring"] = self.jobs["queued_ns"] = 1
        self.jobs["outcome"] = cold_reads.FOR_PYTHON
        self.jobs["block"] = np.arange(1, count + 1)
        self.jobs["stream"] = 1  # their requests are their own
        service: Any = SimpleNamespace(
            lookup_pool=SimpleNamespace(jobs_done=lambda count: None), settings=SimpleNamespace(batch_max_items=0)
        )
        readers: Any = SimpleNamespace(jobs=self.jobs, done_at=np.zeros(1, np.int64))
        scoring: Any = SimpleNamespace(inputs=[], outputs=[])
        pipes: Any = None
        monkeypatch.setattr(predictions, "free", lambda block: self.freed.append(block) if block else None)
        monkeypatch.setattr(predictions.Predictions, "_request", lambda self, words: b"")
        monkeypatch.setattr(
            predictions, "_Job", lambda number, words, scoring: SimpleNamespace(number=number, words=words)
        )
        self.of = predictions.Predictions(service, {1: scoring}, pipes, readers, {})


def test_what_a_job_has_in_memory_is_freed_once_whenever_its_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the reactors are closed, afterwards, or never begun."""
    few = _FewJobs(monkeypatch, 3)
    early, late = few.of._begin(0), few.of._begin(1)
    assert early is not None
    assert late is not None
    assert len(few.of.cut_off()) == 3
    few.of._give_back(early, cold_reads.DONE)
    few.of.close()
    few.of._give_back(late, cold_reads.DONE)
    assert sorted(few.freed) == [1, 2, 3]


def test_a_job_that_readers_of_cold_rows_are_at_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read the request, which goes with its connection once it is answered."""
    few = _FewJobs(monkeypatch, 3)
    few.jobs["cold"][1:] = 1
    few.jobs["queued_ns"][1] = 0  # its rows are being read; those of the last one are there, and a thread has it
    few.of._begin(2)
    assert [words["block"] for words, _ in few.of.cut_off()] == [1, 3]
    few.of.close()
    assert few.freed == [1, 2]
