"""The trainer of the demo learns, says what it touched, and its AUC is the textbook's."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore.demo.clicklog import CONTEXT, ClickLog, Events, WorldSize
from tierstore.demo.scoring import auc
from tierstore.demo.trainer import DIM, Dense, Trainer

SIZE = WorldSize(
    users=3_000,
    items=1_200,
    slot_events=8_000,
    day_slots=25,
    minutes=4,
    new_items=20,
    removed=5,
    newest_events=20_000,
)


def bags(trainer: Trainer, events: Events) -> np.ndarray:
    pooled = np.zeros((len(events), DIM), np.float32)
    for e in range(len(events)):
        rows = events.history[events.starts[e] : events.starts[e + 1]]
        if len(rows):
            pooled[e] = trainer.item[rows].mean(axis=0)
    return pooled


def scores(trainer: Trainer, events: Events) -> np.ndarray:
    return trainer.dense.score(
        trainer.user[events.users], trainer.item[events.items], bags(trainer, events), events.context
    )


def test_it_learns_events_that_it_has_not_seen_and_goes_on_learning() -> None:
    log, trainer = ClickLog(SIZE, 5), Trainer(SIZE.users, SIZE.all_items, 5)
    losses = [trainer.train(log.next_slot()) for _ in range(SIZE.day_slots)]
    assert losses[-1] < losses[0] - 0.02
    upcoming = log.next_slot()
    assert auc(scores(trainer, upcoming), upcoming.clicked) > 0.68


def test_the_loss_that_it_reports_is_that_of_its_scores_before_learning() -> None:
    log, trainer = ClickLog(SIZE, 5), Trainer(SIZE.users, SIZE.all_items, 5)
    for _ in range(3):
        trainer.train(log.next_slot())
    events = log.next_slot()
    one = Events(events.users[:1], events.items[:1], events.context[:1], events.history[: events.starts[1]], events.starts[:2], events.clicked[:1])  # fmt: skip
    logit = float(scores(trainer, one)[0])
    sign = 1 if one.clicked[0] else -1
    assert trainer.train(one) == pytest.approx(np.log1p(np.exp(-sign * logit)), rel=1e-4)


def test_exactly_the_touched_rows_change() -> None:
    log, trainer = ClickLog(SIZE, 5), Trainer(SIZE.users, SIZE.all_items, 5)
    for _ in range(4):
        trainer.train(log.next_slot())
    trainer.pop_touched()
    user, item = trainer.user.copy(), trainer.item.copy()
    events = log.next_slot()
    trainer.train(events)
    users, items = trainer.pop_touched()
    np.testing.assert_array_equal(users, np.unique(events.users))
    np.testing.assert_array_equal(items, np.unique(np.concatenate([events.items, events.history])))
    assert set(np.flatnonzero((user != trainer.user).any(axis=1))) <= set(users)
    assert set(np.flatnonzero((item != trainer.item).any(axis=1))) <= set(items)
    assert [len(rows) for rows in trainer.pop_touched()] == [0, 0]


def test_a_removed_item_stays_zero_while_histories_still_hold_it() -> None:
    log, trainer = ClickLog(SIZE, 5), Trainer(SIZE.users, SIZE.all_items, 5)
    for _ in range(SIZE.day_slots):
        trainer.train(log.next_slot())
    gone = log.removed(SIZE.day_slots)
    events = log.next_slot()
    trainer.remove(gone)
    trainer.train(events)
    assert np.isin(events.history, gone).any(), "a history must still hold one, or this shows nothing"
    assert not trainer.item[gone].any()
    assert not np.isin(trainer.pop_touched()[1], gone).any()


def test_training_is_the_same_for_a_seed() -> None:
    rows = []
    for _ in range(2):
        log, trainer = ClickLog(SIZE, 9), Trainer(SIZE.users, SIZE.all_items, 9)
        trainer.train(log.next_slot())
        rows.append((trainer.user.copy(), trainer.item.copy(), trainer.dense.weights))
    for a, b in zip(*rows, strict=True):
        np.testing.assert_array_equal(a, b)


def test_scores_of_one_user_broadcast_over_candidates() -> None:
    draw = np.random.default_rng(1)
    dense = Dense(draw.standard_normal(1 + CONTEXT + DIM).astype(np.float32))
    user, bag, item = (draw.standard_normal((n, DIM)).astype(np.float32) for n in (1, 1, 5))
    context = draw.standard_normal((5, CONTEXT)).astype(np.float32)
    many = dense.score(np.repeat(user, 5, axis=0), item, np.repeat(bag, 5, axis=0), context)
    np.testing.assert_allclose(dense.score(user, item, bag, context), many, rtol=1e-5)


@pytest.mark.parametrize("levels", [3, 50, 10**6])
def test_auc_is_that_of_counting_every_pair(levels: int) -> None:
    draw = np.random.default_rng(levels)
    clicked = draw.random(400) < 0.3
    score = draw.integers(0, levels, 400) + 0.3 * levels * clicked
    score = np.floor(score).astype(np.float32)
    higher = score[clicked][:, None] - score[~clicked][None, :]
    naive = ((higher > 0).sum() + 0.5 * (higher == 0).sum()) / higher.size
    assert auc(score, clicked) == pytest.approx(naive, abs=1e-12)


def test_auc_needs_both_outcomes() -> None:
    with pytest.raises(ValueError, match="clicked and unclicked"):
        auc([0.1, 0.2], [1, 1])
