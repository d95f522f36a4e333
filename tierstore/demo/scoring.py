"""Scores and checks from what the service answers.

Free functions; any thread may call them with a client of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.client import RemoteModel
from tierstore.demo.clicklog import Events, item_keys, user_keys
from tierstore.demo.graph import CLICKED, CONTEXT_INPUT, ITEM, LOGIT, USER
from tierstore.demo.shop import Shop
from tierstore.demo.trainer import Dense

BATCH = 4_096  # events or keys of a request


def predicted(model: RemoteModel, events: Events) -> npt.NDArray[np.float32]:
    """Logits float32[n] of `events`, made by the service: rows and dense part of each request are of one moment."""
    parts = [
        model.predict({**features, CONTEXT_INPUT: context}, outputs=[LOGIT])[LOGIT]
        for features, context in _batches(events)
    ]
    return np.concatenate(parts).reshape(-1).astype(np.float32)


def scores(model: RemoteModel, events: Events, dense: Dense) -> npt.NDArray[np.float32]:
    """Logits float32[n] of `events`, by the trainer's own dense part and rows looked up in the service."""
    parts = []
    for features, context in _batches(events):
        rows = model.lookup_many(features)
        parts.append(dense.score(rows[USER], rows[ITEM], rows[CLICKED], context))
    return np.concatenate(parts)


def _batches(events: Events) -> Iterator[tuple[dict[str, Any], npt.NDArray[np.float32]]]:
    for first in range(0, len(events), BATCH):
        last = min(first + BATCH, len(events))
        starts = events.starts[first : last + 1]
        bags = (item_keys(events.history[starts[0] : starts[-1]]), starts[:-1] - starts[0])
        features = {USER: user_keys(events.users[first:last]), ITEM: item_keys(events.items[first:last]), CLICKED: bags}
        yield features, events.context[first:last]


def auc(scores: npt.ArrayLike, clicked: npt.ArrayLike) -> float:
    """Area under the ROC curve: the chance that a clicked event scores above one that was not; ties count half.

    By the rank sum of Mann and Whitney. Raises ValueError unless both outcomes are there.
    """
    scores, clicked = np.asarray(scores), np.asarray(clicked).astype(bool)
    positive = int(clicked.sum())
    negative = len(clicked) - positive
    if not positive or not negative:
        raise ValueError("AUC needs clicked and unclicked events; all of these are the same")
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    return float((mean_rank[which][clicked].sum() - positive * (positive + 1) / 2) / (positive * negative))


def compare_with_trainer(model: RemoteModel, shop: Shop, sample: int, seed: int) -> tuple[int, int]:
    """Look up `sample` users and items, and compare with the trainer's rows, as float16, bit for bit.

    All items that do not exist are looked up too, and must not be found. Returns rows compared, and rows that differ.
    """
    draw, trainer = np.random.default_rng([seed, 3]), shop.trainer
    users = draw.choice(len(trainer.user), min(sample, len(trainer.user)), replace=False)
    items = draw.choice(len(trainer.item), min(sample, len(trainer.item)), replace=False)
    items = np.union1d(items, np.flatnonzero(~shop.item_exists))
    wrong = 0
    for feature, keys_of, rows, table, exists in (
        (USER, user_keys, users, trainer.user, np.ones(len(trainer.user), np.bool_)),
        (ITEM, item_keys, items, trainer.item, shop.item_exists),
    ):
        got, found = model.lookup(feature, keys_of(rows), return_found=True)
        expected = np.where(exists[rows, None], table[rows], 0).astype(np.float16).astype(np.float32)
        wrong += int(((got != expected).any(axis=1) | (found != exists[rows])).sum())
    return len(users) + len(items), wrong
