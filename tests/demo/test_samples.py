"""What the demo concludes from the load generator's samples."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore.demo.clicklog import item_keys, user_keys
from tierstore.demo.report import DemoReport, LatencyWindow, Quality, TierCounter
from tierstore.demo.shop import MARKER_ROWS, marker, read_markers
from tierstore.demo.traffic import SAMPLE, Samples, Traffic, stale
from tierstore.errors import NotReady


@pytest.mark.parametrize("number", [0, 1, 999, 1_000, 20_261_120, 10**12 - 1])
def test_a_number_survives_float16(number: int) -> None:
    stored = marker(number).astype(np.float16).astype(np.float32)
    assert read_markers(stored[None]).tolist() == [number]


def test_markers_are_no_users_and_no_items() -> None:
    rows = np.arange(200_000)
    for keys_of in (user_keys, item_keys):
        assert not np.isin(keys_of(MARKER_ROWS), keys_of(rows)).any()


def samples(due: list[float], seq: list[int], failed: list[bool] | None = None) -> Samples:
    made = np.zeros(len(due), SAMPLE)
    made["due"], made["seq"], made["failed"] = due, seq, failed or False
    made["latency_s"] = np.arange(1, len(due) + 1) / 1000
    return made


def test_an_answer_without_a_delta_acknowledged_before_it_was_due_is_stale() -> None:
    acknowledged = [10.0, 20.0]
    assert stale(samples([5, 10, 15, 20, 25], [0, 0, 1, 1, 2]), acknowledged) == 0
    assert stale(samples([5, 10, 15, 20, 25], [1, 1, 2, 2, 2]), acknowledged) == 0, "sooner is fine"
    assert stale(samples([15, 25, 26], [0, 1, 2]), acknowledged) == 2
    assert stale(samples([15, 25], [-1, -1], [True, True]), acknowledged) == 0, "a failure is counted as a failure"


@pytest.mark.thorough
def test_a_load_generator_without_a_service_reports_its_error() -> None:
    keys = np.arange(10)
    with Traffic("http://127.0.0.1:1", keys, keys, 1) as traffic, pytest.raises(NotReady, match="no service answers"):
        traffic.wait_ready()


def test_a_window_counts_what_was_due_in_it_and_times_what_was_answered() -> None:
    seen = samples([1, 2, 3, 4], [0, 0, 0, 0], [False, False, True, False])
    window = LatencyWindow.of("middle", seen, 2, 4)
    assert (window.requests, window.failed, window.p50_ms, window.max_ms) == (2, 1, pytest.approx(2), pytest.approx(2))
    assert LatencyWindow.of("nothing", seen, 9, 10).requests == 0


def status(version: int, **counts: int) -> dict[str, object]:
    return {"active_version": version, "tables": {"item": {"lookup_keys": counts}}}


def test_tiers_are_counted_across_versions_and_a_reopened_one_starts_at_zero() -> None:
    tiers = TierCounter(status(1, host=100, disk=50))
    assert tiers.add(status(1, host=130, disk=60)) == {"host": 0.75, "disk": 0.25}
    assert tiers.add(status(2, host=10, disk=0)) == {"host": 0.8, "disk": 0.2}
    assert tiers.add(status(1, host=40, disk=10)) == {"host": 0.8, "disk": 0.2}, "40 and 10 since it was opened again"


def test_a_report_is_ok_only_if_nothing_went_wrong_and_the_deltas_helped() -> None:
    def report(**changes: object) -> DemoReport:
        fields = {
            "requests": 5,
            "quality": Quality(10, 0.2, daily=0.6, deltas=0.7, daily_old_items=0.6, deltas_old_items=0.7),
        }
        return DemoReport(**{**fields, **changes})  # type: ignore[arg-type]

    assert report().ok
    assert report().document()["ok"] is True
    for wrong in ("failed_requests", "mixed_answers", "stale_answers", "mismatches"):
        assert not report(**{wrong: 1}).ok
    assert not report(requests=0).ok
    assert not report(quality=Quality(10, 0.2, daily=0.7, deltas=0.7, daily_old_items=0.7, deltas_old_items=0.7)).ok
