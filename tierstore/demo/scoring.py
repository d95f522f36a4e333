"""Scores and checks from what the service answered: nothing here reads the trainer's tables to score.

Free functions; any thread may call them with a client of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierstore.client import RemoteModel
from tierstore.demo.clicklog import Events, WorldSize, item_keys, user_keys
from tierstore.demo.export import CLICKED, ITEM, USER
from tierstore.demo.graph import CONTEXT_INPUT, LOGIT
from tierstore.demo.report import Quality
from tierstore.demo.trainer import Dense, Trainer, auc

BATCH = 4_096  # events or keys a request


def predicted(model: RemoteModel, events: Events) -> npt.NDArray[np.float32]:
    """Logits float32[n] of `events`, by the service: rows and dense part of each request are of one moment."""
    parts = []
    for first in range(0, len(events), BATCH):
        last = min(first + BATCH, len(events))
        starts = events.starts[first : last + 1]
        inputs = {
            USER: user_keys(events.users[first:last]),
            ITEM: item_keys(events.items[first:last]),
            CLICKED: (item_keys(events.history[starts[0] : starts[-1]]), starts[:-1] - starts[0]),
            CONTEXT_INPUT: events.context[first:last],
        }
        parts.append(np.asarray(model.predict(inputs, outputs=[LOGIT])[LOGIT], np.float32).reshape(-1))
    return np.concatenate(parts)


def scores(model: RemoteModel, events: Events, dense: Dense) -> npt.NDArray[np.float32]:
    """The same, with the dense part kept on this side and applied to rows looked up in the service."""
    parts = []
    for first in range(0, len(events), BATCH):
        last = min(first + BATCH, len(events))
        starts = events.starts[first : last + 1]
        rows = model.lookup_many({USER: user_keys(events.users[first:last]), ITEM: item_keys(events.items[first:last])})
        bags = model.lookup_bags(CLICKED, item_keys(events.history[starts[0] : starts[-1]]), starts[:-1] - starts[0])
        parts.append(dense.score(rows[USER], rows[ITEM], bags, events.context[first:last]))
    return np.concatenate(parts)


def quality(
    size: WorldSize, events: Events, daily: npt.NDArray[np.float32], deltas: npt.NDArray[np.float32]
) -> Quality:
    """AUC of the two scores of the same events, over all of them and over those of items in the daily snapshot."""
    known = events.items < size.items
    clicked = events.clicked
    return Quality(
        events=len(events),
        new_item_share=float(1 - known.mean()),
        daily=auc(daily, clicked),
        deltas=auc(deltas, clicked),
        daily_known_items=auc(daily[known], clicked[known]),
        deltas_known_items=auc(deltas[known], clicked[known]),
    )


def compare_rows(
    model: RemoteModel, trainer: Trainer, item_exists: npt.NDArray[np.bool_], sample: int, seed: int
) -> tuple[int, int]:
    """Look up `sample` users, `sample` items and compare with the trainer's rows, as float16, bit for bit.

    `item_exists` bool[items]: the others must not be found. All of the items that do not exist are
    among those asked for. Returns rows compared and rows that differ.
    """
    draw = np.random.default_rng([seed, 3])
    users = draw.choice(len(trainer.user), min(sample, len(trainer.user)), replace=False)
    items = draw.choice(len(trainer.item), min(sample, len(trainer.item)), replace=False)
    items = np.union1d(items, np.flatnonzero(~item_exists))
    wrong = 0
    for feature, keys_of, rows, table, exists in (
        (USER, user_keys, users, trainer.user, np.ones(len(trainer.user), np.bool_)),
        (ITEM, item_keys, items, trainer.item, item_exists),
    ):
        for first in range(0, len(rows), BATCH):
            chosen = rows[first : first + BATCH]
            got, found = model.lookup(feature, keys_of(chosen), return_found=True)
            expected = np.where(exists[chosen, None], table[chosen], 0).astype(np.float16).astype(np.float32)
            wrong += int(((got != expected).any(axis=1) | (found != exists[chosen])).sum())
    return len(users) + len(items), wrong
