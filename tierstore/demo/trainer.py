"""The trainer of the demo: a small click model, learned event by event.

    logit = bias + context . w  +  user[0] + item[0]  +  sum over k >= 1 of item[k] * (user[k] + a[k] * bag[k])

`user` and `item` are embeddings of `DIM` numbers, `bag` is the mean of the embeddings of the items that the user
clicked recently, from the item table too. `bias`, `w` and `a` are the dense part. It is a factorization machine (Rendle
2010) over user, item and history, learned by stochastic gradient descent with an AdaGrad step (Duchi et al. 2011) that
forgets, so that it follows a drift.

One thread trains at a time; `train` releases the interpreter while it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba as nb
import numpy as np
import numpy.typing as npt

from tierstore.demo.clicklog import CONTEXT, Events

DIM = 16
RATE = 0.1  # of the embeddings
DENSE_RATE = 0.002
FORGET = 0.98  # of a row's squared gradients, each time it is touched
RIDGE = 0.003  # pulls a row towards zero whenever it is touched

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Dense:
    """The part of the model that is not in tables: float32 `[1 + CONTEXT + DIM]`, bias,
    context weights, bag weights.
    """

    weights: Matrix

    def score(self, user: Matrix, item: Matrix, bag: Matrix, context: Matrix) -> Matrix:
        """Logits float32[n] of looked-up rows `user`, `item`, `bag` [n, DIM] (or [1,
        DIM]) and `context` [n, CONTEXT].
        """
        bag_weights = self.weights[1 + CONTEXT :]
        taste = user[:, 1:] + bag_weights[1:] * bag[:, 1:]
        linear = self.weights[0] + context @ self.weights[1 : 1 + CONTEXT] + user[:, 0] + item[:, 0]
        return np.asarray(linear + (item[:, 1:] * taste).sum(axis=1), np.float32)


class Trainer:
    """Embeddings of `users` and `items` rows (float32 while training), their AdaGrad state, and the dense part."""

    def __init__(self, users: int, items: int, seed: int) -> None:
        draw = np.random.default_rng([seed, 2])
        self.user = np.zeros((users, DIM), np.float32)
        # Items start at random and users at zero: one of the two must break the symmetry of the product.
        self.item = draw.standard_normal((items, DIM), np.float32) * np.float32(0.05)
        self.item[:, 0] = 0
        self._user_state = np.zeros((users, 2), np.float32)
        self._item_state = np.zeros((items, 2), np.float32)
        self._dense = np.zeros(1 + CONTEXT + DIM, np.float32)
        self._dense[0], self._dense[1 + CONTEXT :] = -1.0, 0.5
        self._alive = np.ones(items, np.uint8)
        self._user_touched = np.zeros(users, np.uint8)
        self._item_touched = np.zeros(items, np.uint8)

    @property
    def dense(self) -> Dense:
        """A copy of the dense part as it is now."""
        return Dense(self._dense.copy())

    def train(self, events: Events) -> float:
        """Learn from `events`, in order. Returns their mean log loss, each scored before it was learned."""
        return float(
            _train(
                events.users, events.items, events.context, events.history, events.starts, events.clicked,
                self.user, self.item, self._user_state, self._item_state, self._dense, self._alive, self._user_touched,
                self._item_touched,
            )
        )  # fmt: skip

    def remove(self, items: npt.NDArray[np.int32]) -> None:
        """Remove items: their rows are zero from now on, which is what a table answers
        for a key that it does not hold.
        """
        self.item[items] = 0
        self._alive[items] = 0
        self._item_touched[items] = 0

    def pop_touched(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Rows of users and of items that changed since the last call (ascending)."""
        users, items = np.flatnonzero(self._user_touched), np.flatnonzero(self._item_touched)
        self._user_touched[:] = 0
        self._item_touched[:] = 0
        return users, items


@nb.njit(nogil=True, cache=True, fastmath=True)
def _train(  # type: ignore[no-untyped-def]
    users, items, context, history, starts, clicked, user, item, user_state, item_state, dense, alive, user_touched,
    item_touched,
):  # fmt: skip
    dim, width = user.shape[1], context.shape[1]
    bag = np.zeros(dim, np.float32)
    into_bag = np.zeros(dim, np.float32)
    loss = 0.0
    for e in range(len(users)):
        u, i, first, last = users[e], items[e], starts[e], starts[e + 1]
        held = last - first
        bag[:] = 0
        for h in range(first, last):
            for k in range(1, dim):
                bag[k] += item[history[h], k]
        if held:
            for k in range(1, dim):
                bag[k] /= held
        z = dense[0] + user[u, 0] + item[i, 0]
        for c in range(width):
            z += dense[1 + c] * context[e, c]
        for k in range(1, dim):
            z += item[i, k] * (user[u, k] + dense[1 + width + k] * bag[k])
        p = np.float32(1.0 / (1.0 + math.exp(-z)))
        loss -= math.log((p if clicked[e] else 1 - p) + 1e-7)
        g = p - np.float32(clicked[e])

        user_sum = item_sum = np.float32(0)
        for k in range(1, dim):
            pull = user[u, k] + dense[1 + width + k] * bag[k]
            user_sum += (g * item[i, k]) ** 2
            item_sum += (g * pull) ** 2
        user_state[u, 0] = FORGET * user_state[u, 0] + g * g
        user_state[u, 1] = FORGET * user_state[u, 1] + user_sum / dim
        item_state[i, 0] = FORGET * item_state[i, 0] + g * g
        item_state[i, 1] = FORGET * item_state[i, 1] + item_sum / dim
        user_step = RATE / math.sqrt(user_state[u, 1] + 0.01)
        item_step = RATE / math.sqrt(item_state[i, 1] + 0.01)
        user[u, 0] -= RATE / math.sqrt(user_state[u, 0] + 0.1) * (g + RIDGE * user[u, 0])
        item[i, 0] -= RATE / math.sqrt(item_state[i, 0] + 0.1) * (g + RIDGE * item[i, 0])
        for k in range(1, dim):
            a = dense[1 + width + k]
            uk, ik, bk = user[u, k], item[i, k], bag[k]
            into_bag[k] = g * a * ik
            user[u, k] = uk - user_step * (g * ik + RIDGE * uk)
            item[i, k] = ik - item_step * (g * (uk + a * bk) + RIDGE * ik)
            dense[1 + width + k] = a - DENSE_RATE * g * ik * bk
        dense[0] -= DENSE_RATE * g
        for c in range(width):
            dense[1 + c] -= DENSE_RATE * g * context[e, c]
        user_touched[u] = item_touched[i] = 1
        for h in range(first, last):
            j = history[h]
            if not alive[j]:
                continue  # still in a history, but its row must stay zero
            step = RATE / math.sqrt(item_state[j, 1] + 0.01) / held
            for k in range(1, dim):
                item[j, k] -= step * into_bag[k]
            item_touched[j] = 1
    return loss / max(len(users), 1)
