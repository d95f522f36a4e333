"""The click log of the demo: the same for a seed, drifting, and honest about what is new and what is gone."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore.demo.clicklog import HISTORY, ClickLog, Events, WorldSize, item_keys, user_keys, zipf_ranks

SIZE = WorldSize(
    users=3_000,
    items=1_200,
    slot_events=4_000,
    day_slots=12,
    minutes=6,
    new_items=20,
    removed=5,
    newest_events=9_000,
)


def slots(seed: int = 3, size: WorldSize = SIZE) -> list[Events]:
    log = ClickLog(size, seed)
    return [log.next_slot() for _ in range(size.day_slots + size.minutes + 1)]


def test_the_same_seed_gives_the_same_log_and_another_seed_another() -> None:
    first, again, other = slots(), slots(), slots(seed=4)
    for a, b in zip(first, again, strict=True):
        for name in Events.__slots__:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert not np.array_equal(first[-1].items, other[-1].items)


def test_the_log_ends_after_the_newest_events() -> None:
    log = ClickLog(SIZE, 3)
    sizes = [len(log.next_slot()) for _ in range(SIZE.day_slots + SIZE.minutes + 1)]
    assert sizes == [4_000] * 18 + [9_000]
    with pytest.raises(IndexError, match="ends after slot 18"):
        log.next_slot()


def test_a_history_holds_the_users_own_latest_clicks_oldest_first() -> None:
    clicks: dict[int, list[int]] = {}
    for events in slots()[:4]:
        for e in range(len(events)):
            user = int(events.users[e])
            shown = events.history[events.starts[e] : events.starts[e + 1]].tolist()
            assert shown == clicks.get(user, [])[-HISTORY:]
            if events.clicked[e]:
                clicks.setdefault(user, []).append(int(events.items[e]))
    assert max(map(len, clicks.values())) > HISTORY, "some history must have been cut to its bound"


def test_new_items_appear_only_once_they_are_born_and_their_share_grows() -> None:
    log = slots()
    day, first, newest = log[: SIZE.day_slots], log[SIZE.day_slots], log[-1]
    assert all((events.items < SIZE.items).all() for events in day)
    assert 0 < first.items.max() - SIZE.items + 1 <= SIZE.new_items
    share = [(events.items >= SIZE.items).mean() for events in (first, newest)]
    assert share[0] < 0.1 < 0.2 < share[1] < 0.3
    assert newest.items.max() < SIZE.all_items


def test_a_removed_item_is_shown_no_more() -> None:
    log = ClickLog(SIZE, 3)
    log_slots = slots()
    shown_before = np.concatenate([events.items for events in log_slots[: SIZE.day_slots]])
    gone: list[int] = []
    for slot in range(SIZE.day_slots, SIZE.day_slots + SIZE.minutes + 1):
        gone += log.removed(slot).tolist()
        assert not np.isin(log_slots[slot].items, gone).any()
    assert len(set(gone)) == len(gone) == SIZE.minutes * SIZE.removed
    assert np.isin(gone, shown_before).any(), "at least one of them was shown before it went"


@pytest.mark.thorough
def test_taste_drifts_so_that_an_items_click_rate_moves() -> None:
    """The same pairs would be clicked at other rates later: compare the popular items' rates of two far slots."""
    size = WorldSize(users=2_000, items=1_000, slot_events=60_000, day_slots=80, minutes=1, new_items=1, removed=0)
    log = slots(size=size)
    parts = [log[0], log[1], log[79]]  # two next to each other tell what is noise

    def rates(events: Events) -> np.ndarray:
        shown = np.bincount(events.items, minlength=size.items)[: size.items]
        clicked = np.bincount(events.items, weights=events.clicked, minlength=size.items)[: size.items]
        return np.where(shown >= 150, clicked / np.maximum(shown, 1), np.nan)

    first, next_one, far = map(rates, parts)
    noise, drift = np.nanmean((first - next_one) ** 2), np.nanmean((first - far) ** 2)
    assert drift > 2 * noise


def test_activity_and_popularity_are_zipf() -> None:
    ranks = zipf_ranks(np.random.default_rng(0), 200_000, 10_000, 1.05)
    assert ranks.min() == 0
    assert ranks.max() < 10_000
    counts = np.bincount(ranks, minlength=10_000)
    top, middle = counts[9:11].mean(), counts[900:1100].mean()
    assert np.log(top / middle) / np.log(100) == pytest.approx(1.05, abs=0.1)


def test_no_two_rows_share_a_key_and_keys_cover_both_signs() -> None:
    rows = np.arange(200_000)
    for name in (user_keys, item_keys):
        keys = name(rows)
        assert keys.dtype == np.int64
        assert len(np.unique(keys)) == len(rows)
        assert 0.49 < (keys < 0).mean() < 0.51
