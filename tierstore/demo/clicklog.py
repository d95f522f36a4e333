"""A click log of a made-up shop: tastes change, popularity changes, items appear and are taken down.

Everything is drawn from one seed: the same `WorldSize` and seed give the same events on every machine with the same
NumPy. docs/demo.md describes how clicks come about. A `ClickLog` belongs to one thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba as nb
import numpy as np
import numpy.typing as npt

from tierstore.types import Keys

LATENT = 6
TOPICS = 24
HISTORY = 8  # items remembered a user
CONTEXT = 3  # sine and cosine of the hour, phone or not
SLOTS_PER_HOUR = 10  # so the hour moves visibly within a demo


@dataclass(frozen=True, slots=True)
class WorldSize:
    """How large the shop is. A slot is a minute of traffic; the day has `day_slots` of them."""

    users: int = 700_000
    items: int = 300_000
    slot_events: int = 40_000
    day_slots: int = 60
    minutes: int = 30  # slots after the day, one delta each
    new_items: int = 300  # appear in every slot after the day
    removed: int = 40  # leave the catalogue in every slot after the day
    newest_events: int = 40_000  # the slot after the last minute: never trained on

    @classmethod
    def scaled(cls, scale: float, minutes: int) -> WorldSize:
        """The full world times `scale`, with enough events left at the small end to learn from."""
        full = cls()
        events = max(4_000, int(full.slot_events * scale))
        return cls(
            users=max(2_000, int(full.users * scale)),
            items=max(1_000, int(full.items * scale)),
            slot_events=events,
            minutes=minutes,
            new_items=max(8, int(full.new_items * scale)),
            removed=max(2, int(full.removed * scale)),
            newest_events=max(20_000, events),
        )

    @property
    def all_items(self) -> int:
        """Items of the catalogue and all that will ever appear."""
        return self.items + self.new_items * self.minutes


@dataclass(frozen=True, slots=True)
class Events:
    """One slot of the log, in order of time. Users and items are row numbers, see `user_keys` and `item_keys`.

    users, items: int32[n]; context: float32[n, CONTEXT]; clicked: uint8[n]; the recently clicked
    items of event i, newest last, are `history[starts[i]:starts[i + 1]]` (int32; starts int64[n + 1]).
    """

    users: npt.NDArray[np.int32]
    items: npt.NDArray[np.int32]
    context: npt.NDArray[np.float32]
    history: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    clicked: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.users)


class ClickLog:
    """The shop and its log. `next_slot()` continues it: the day first, then the minutes, then the newest events."""

    def __init__(self, size: WorldSize, seed: int) -> None:
        self.size, self.seed, self.slot = size, seed, 0
        draw = np.random.default_rng([seed, 0])
        self._topics = draw.standard_normal((TOPICS, LATENT)).astype(np.float32)
        self._topics /= np.linalg.norm(self._topics, axis=1, keepdims=True)
        self._user = _population(draw, size.users, pace=0.012)
        self._item = _population(draw, size.all_items, pace=0.010)
        self._trend = draw.uniform([0, 0.02], [2 * math.pi, 0.06], (TOPICS, 2)).astype(np.float32)
        self._user_order = draw.permutation(size.users).astype(np.int32)
        self._charts = [draw.permutation(size.items).astype(np.int32) for _ in range(2)]
        self._takedowns = draw.permutation(size.items).astype(np.int32)
        self._gone = np.zeros(size.all_items, np.uint8)
        self._recent = np.zeros((size.users, HISTORY), np.int32)
        self._clicks = np.zeros(size.users, np.int64)

    def born(self, slot: int) -> int:
        """Items that exist in `slot`: rows 0 to this number, less those taken down."""
        return self.size.items + self.size.new_items * min(max(slot - self.size.day_slots + 1, 0), self.size.minutes)

    def removed(self, slot: int) -> npt.NDArray[np.int32]:
        """Items that leave the catalogue at the start of `slot` (int32, distinct)."""
        minute = slot - self.size.day_slots
        if not 0 <= minute < self.size.minutes:
            return np.zeros(0, np.int32)
        return self._takedowns[minute * self.size.removed : (minute + 1) * self.size.removed]

    def users_by_activity(self) -> npt.NDArray[np.int32]:
        """All users, the most active first."""
        return self._user_order

    def items_by_popularity(self) -> npt.NDArray[np.int32]:
        """All items that will ever be shown after the day, roughly the most popular first;
        the new ones evenly between.
        """
        new = np.arange(self.size.items, self.size.all_items, dtype=np.int32)
        return np.insert(self._charts[1], np.linspace(10, self.size.items, len(new)).astype(np.int64), new)

    def next_slot(self) -> Events:
        """The next slot's events. Clicks fill the histories that later slots show."""
        size, slot = self.size, self.slot
        last = size.day_slots + size.minutes
        if slot > last:
            raise IndexError(f"the log ends after slot {last}")
        self.slot += 1
        n = size.newest_events if slot == last else size.slot_events
        draw = np.random.default_rng([self.seed, 1, slot])
        self._gone[self.removed(slot)] = 1
        users = self._user_order[zipf_ranks(draw, n, size.users, 0.9)]
        items = self._draw_items(draw, n, slot)
        hour = (slot + np.arange(n, dtype=np.float64) / n) / SLOTS_PER_HOUR
        context = np.empty((n, CONTEXT), np.float32)
        context[:, 0], context[:, 1] = np.sin(hour * (math.pi / 12)), np.cos(hour * (math.pi / 12))
        context[:, 2] = draw.random(n) < 0.6
        history = np.empty(n * HISTORY, np.int32)
        starts = np.zeros(n + 1, np.int64)
        clicked = np.empty(n, np.uint8)
        _simulate(
            users, items, context, float(slot), draw.random(n), *self._user, *self._item, self._topics, self._trend,
            self._recent, self._clicks, history, starts, clicked,
        )  # fmt: skip
        return Events(users, items, context, history[: starts[n]].copy(), starts, clicked)

    def _draw_items(self, draw: np.random.Generator, n: int, slot: int) -> npt.NDArray[np.int32]:
        """What is shown: today's chart fades into tomorrow's, and a growing share is new."""
        size = self.size
        fade = slot / (size.day_slots + size.minutes)
        ranks = zipf_ranks(draw, n, size.items, 1.05)
        items = np.where(draw.random(n) < fade, self._charts[1][ranks], self._charts[0][ranks])
        fresh = self.born(slot) - size.items
        if fresh:
            # The newest are shown most; their share rises to a quarter of what is shown.
            share = 0.25 * fresh / (size.new_items * size.minutes)
            age = (fresh * draw.random(n) ** 2).astype(np.int32)
            items = np.where(draw.random(n) < share, size.items + fresh - 1 - age, items)
        # In place of an item that was taken down, the next one that still exists is shown.
        for _ in range(64):
            gone = np.flatnonzero(self._gone[items])
            if not len(gone):
                break
            items[gone] = (items[gone] + 1) % size.items
        return items.astype(np.int32, copy=False)


def user_keys(rows: npt.ArrayLike) -> Keys:
    """The int64 keys of user rows: distinct, and spread over all of the 64 bits."""
    return _spread(rows, 0x5EED_0001)


def item_keys(rows: npt.ArrayLike) -> Keys:
    """The int64 keys of item rows."""
    return _spread(rows, 0x5EED_0002)


def _spread(rows: npt.ArrayLike, salt: int) -> Keys:
    # A product with an odd number is invertible modulo 2^64, so distinct rows stay distinct.
    spread: npt.NDArray[np.uint64] = (np.asarray(rows).astype(np.uint64) + np.uint64(salt)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    return spread.view(np.int64)


def zipf_ranks(draw: np.random.Generator, n: int, size: int, exponent: float) -> npt.NDArray[np.int64]:
    """`n` ranks in 0..size; the probability of rank r is proportional to (r + 1) ** -exponent
    (by its integral's inverse).
    """
    power = 1.0 - exponent
    positions = ((draw.random(n) * ((size + 1.0) ** power - 1.0)) + 1.0) ** (1.0 / power)
    ranks: npt.NDArray[np.int64] = np.clip(positions, 1, size).astype(np.int64) - 1
    return ranks


def _population(
    draw: np.random.Generator, n: int, pace: float
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Two topics each (from, to), their own angle, pace and bias, and their own deviation from the topics."""
    topics = draw.integers(0, TOPICS, (n, 2), dtype=np.uint8)
    motion = np.empty((n, 3), np.float32)
    motion[:, 0] = draw.random(n, np.float32) * (math.pi / 2)
    motion[:, 1] = draw.standard_exponential(n, np.float32) * pace
    motion[:, 2] = draw.standard_normal(n, np.float32) * 0.7
    own = draw.standard_normal((n, LATENT), np.float32) * np.float32(0.12)
    return topics, motion, own


@nb.njit(nogil=True, cache=True)
def _simulate(  # type: ignore[no-untyped-def]
    users, items, context, start, luck, user_topics, user_motion, user_own, item_topics, item_motion, item_own,
    topics, trend, recent, clicks, history, starts, clicked,
):  # fmt: skip
    n = len(users)
    filled = 0
    for e in range(n):
        now = start + e / n
        u, i = users[e], items[e]
        angle = user_motion[u, 0] + user_motion[u, 1] * now
        uc, us = math.cos(angle), math.sin(angle)
        angle = item_motion[i, 0] + item_motion[i, 1] * now
        ic, js = math.cos(angle), math.sin(angle)
        affinity = 0.0
        for k in range(topics.shape[1]):
            taste = uc * topics[user_topics[u, 0], k] + us * topics[user_topics[u, 1], k] + user_own[u, k]
            kind = ic * topics[item_topics[i, 0], k] + js * topics[item_topics[i, 1], k] + item_own[i, k]
            affinity += taste * kind
        z = -1.4 + user_motion[u, 2] + item_motion[i, 2] + 3.5 * affinity
        leading = item_topics[i, 0] if abs(ic) > abs(js) else item_topics[i, 1]
        z += 0.8 * math.sin(trend[leading, 0] + trend[leading, 1] * now)
        z += 0.3 * context[e, 0] + 0.3 * context[e, 2]
        held = min(clicks[u], recent.shape[1])
        for h in range(held):
            history[filled] = recent[u, (clicks[u] - held + h) % recent.shape[1]]
            filled += 1
        starts[e + 1] = filled
        click = luck[e] < 1.0 / (1.0 + math.exp(-z))
        clicked[e] = click
        if click:
            recent[u, clicks[u] % recent.shape[1]] = i
            clicks[u] += 1
