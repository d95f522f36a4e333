"""Memory budgets shared by all open versions: bytes of the host tier, and bytes of unfolded deltas.

Both are bounds: what they give out never adds up to more. Any thread may call; each has its own lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from tierstore.errors import Overloaded, TooLarge

_GROWTH_BYTES = 256 << 20  # a version grows by at most so much at a time
_LEAST_SHARE = 0.25  # of the requests, for which a version gets memory though it gets less of them
_UNASKED = 0.05  # of its part by size, which is kept for what nobody looks up
_TELLING_BYTES = 100_000  # of rows looked up, from which on look-ups say more than sizes
_SETTLED_S = 600.0  # after which the look-ups of a model count; also the half-life of what is remembered of them
_WORTH = 1 / 8  # of a share: a smaller change moves no memory


def deal(total: int, needs: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Split `total` by weight, giving none more than it needs; what one does not need goes to the others."""
    shares = [0] * len(needs)
    open_ = list(range(len(needs)))
    remaining = total
    while open_:
        weight = sum(weights[i] for i in open_) or 1.0
        full = [i for i in open_ if needs[i] <= remaining * weights[i] / weight]
        if not full:
            for i in open_:
                shares[i] = int(remaining * weights[i] / weight)
            break
        for i in full:
            shares[i] = needs[i]
            remaining -= needs[i]
        open_ = [i for i in open_ if i not in full]
    return shares


def weights_by_traffic(sizes: Sequence[float], traffic: Sequence[float | None]) -> list[float]:
    """Weights to divide memory by: the bytes of rows looked up, where there are enough of them, else sizes.

    What nobody looks up keeps a small part of what it would get by its size. None: nobody knows yet; that counts by its
    size.
    """
    whole, asked = sum(sizes), sum(each or 0.0 for each in traffic)
    if asked <= _TELLING_BYTES or not whole:
        return [float(size) for size in sizes]
    return [
        max(each or 0.0, size / whole * asked * (1.0 if each is None else _UNASKED))
        for size, each in zip(sizes, traffic, strict=True)
    ]


def deal_caches(
    total: int,
    needs: Sequence[int],
    models: Sequence[Hashable],
    shares: Sequence[float] | None = None,
    traffic: Mapping[Hashable, float] | None = None,
) -> list[int]:
    """Split `total` among versions by their needs, and their models' `traffic` where it is known. `models`: the model
    of each; `shares`: its part of its model's requests, by default equal.

    None gets more than it needs; what one does not need goes to the others. Versions of one model share what the model
    would get with one of them, so that a switch of one model takes nothing from the others.
    """
    parts = [1.0] * len(needs) if shares is None else [max(share, _LEAST_SHARE) for share in shares]
    whole: dict[Hashable, float] = dict.fromkeys(models, 0.0)
    for model, part in zip(models, parts, strict=True):
        whole[model] += part
    sizes = [need * part / whole[model] for need, model, part in zip(needs, models, parts, strict=True)]
    of_models = dict.fromkeys(models, 0.0)
    for size, model in zip(sizes, models, strict=True):
        of_models[model] += size
    weights = weights_by_traffic(list(of_models.values()), [(traffic or {}).get(model) for model in of_models])
    scales = {
        model: weight / size if size else 0.0 for (model, size), weight in zip(of_models.items(), weights, strict=True)
    }
    return deal(total, needs, [size * scales[model] for size, model in zip(sizes, models, strict=True)])


class MemoryUser(Protocol):
    """A user of a tier's memory: a version that serves or is about to."""

    @property
    def host_need_bytes(self) -> int: ...
    @property
    def host_reserved_bytes(self) -> int: ...  # what it may use now
    @property
    def host_is_uneven(self) -> bool:
        """Whether its parts would divide its present share differently."""
        return False

    @property
    def request_share(self) -> float:
        """The share of the requests to its model that it gets, of those that name no version."""
        return 1.0

    @property
    def looked_up_bytes(self) -> int:
        """Bytes of rows that were looked up so far, over all versions of its model."""
        return 0

    def attach_host(self, budget_bytes: int, limit_bytes: int, like: MemoryUser | None) -> None:
        """Use `budget_bytes`; it may be allowed `limit_bytes` later."""

    def resize_host(self, budget_bytes: int) -> None:
        """Make do with so much, or grow to it, as far as it can."""


@dataclass(slots=True)
class _LookedUp:
    """The bytes of rows that a model was asked for lately. `counts`: what its open versions counted so far."""

    since_s: float
    at_s: float
    lately: float = 0.0
    counts: MutableMapping[MemoryUser, int] = field(default_factory=WeakKeyDictionary)

    def note(self, counts: MutableMapping[MemoryUser, int], now_s: float) -> None:
        """A version that is new begins with its count: it has that of the past, in rows of its own size."""
        self.lately *= 0.5 ** ((now_s - self.at_s) / _SETTLED_S)
        self.lately += max(0, *(count - self.counts.get(user, count) for user, count in counts.items()))
        self.at_s, self.counts = now_s, counts


class HostBudget:
    """Divides `total` bytes among the open versions, and again whenever one is opened or closed, or look-ups have
    moved from one model to another.

    A version that shrinks does so in place, keeping its hottest rows, before another gets its memory; so all together
    never exceed the budget, also with two versions of a model in a switch. `rebalance` lets versions grow.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self._clock = total, clock
        self._lock = threading.Lock()
        self._looked_up: dict[Hashable, _LookedUp] = {}
        self._traffic: dict[Hashable, float] = {}  # by which memory is divided now, of models open for long enough
        self._models: dict[MemoryUser, Hashable] = {}  # open version → its model
        self._awaited = self._of_all = 0  # bytes that awaited versions need, and that all versions will need then
        self._dealt = 0  # bytes given to awaited versions that have come

    @property
    def users(self) -> list[MemoryUser]:
        """The open versions."""
        return list(self._models)

    @property
    def used(self) -> int:
        return sum(user.host_reserved_bytes for user in self.users)

    @contextmanager
    def awaiting(self, need_bytes: int) -> Iterator[None]:
        """In the block versions that need so many bytes in all come, in any order: each gets its share as if all were
        open.

        For a budget of which nothing is in use.
        """
        self._awaited = self._of_all = need_bytes
        self._dealt = 0
        try:
            yield
        finally:
            self._awaited = 0

    def admit(self, user: MemoryUser, *replaced: MemoryUser) -> None:
        """Make room for `user` and attach its host tables.

        `replaced` are versions of the same model, the most like it first.
        """
        with self._lock:
            need = user.host_need_bytes
            if 0 < need <= self._awaited and not replaced:  # hundreds may come: none is asked about others
                share = need if self._of_all <= self.total else int(self.total * need / self._of_all)
                user.attach_host(min(share, self.total - self._dealt), min(self.total, need), None)
                self._awaited -= need
                self._dealt += user.host_reserved_bytes
                self._models[user] = object()
                return
            self._awaited = max(0, self._awaited - need)
            model = next((self._models[other] for other in replaced if other in self._models), object())
            shares = self._deal({**self._models, user: model})
            share = shares.pop(user)
            for other, its in shares.items():
                if other.host_reserved_bytes > its:
                    other.resize_host(its)
            room = max(0, self.total - self.used)
            user.attach_host(min(share, room), min(self.total, need), replaced[0] if replaced else None)
            self._models[user] = model
            self._dealt = self.used if self._awaited else 0

    def release(self, user: MemoryUser) -> None:
        """Free the share of `user`, whose host tables are closed already."""
        with self._lock:
            self._models.pop(user, None)

    def rebalance(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """Let versions below their share grow, until `stopping()`. In steps: between them others are admitted."""
        with self._lock:
            self._note_traffic()
        stuck: set[MemoryUser] = set()
        while not stopping() and self._rebalance_one(stuck):
            pass

    def _note_traffic(self) -> None:
        """Divide by the look-ups of late from now on, if that moves memory that is worth it."""
        now_s, counts = self._clock(), dict[Hashable, MutableMapping[MemoryUser, int]]()
        for user, model in self._models.items():
            counts.setdefault(model, WeakKeyDictionary())[user] = user.looked_up_bytes
        known = self._looked_up
        self._looked_up = {model: known.get(model) or _LookedUp(now_s, now_s) for model in counts}
        for model, of_model in counts.items():
            self._looked_up[model].note(of_model, now_s)
        traffic = {model: each.lately for model, each in self._looked_up.items() if now_s - each.since_s >= _SETTLED_S}
        if sum(traffic.values()) <= _TELLING_BYTES < sum(self._traffic.values()):
            return  # a quiet night changes nothing
        before, after = self._deal(self._models), self._deal(self._models, traffic)
        if any(abs(share - before[user]) > _WORTH * before[user] for user, share in after.items()):
            self._traffic = traffic

    def _rebalance_one(self, stuck: set[MemoryUser]) -> bool:
        """One step, of some hundred MiB at most; False if none is left. `stuck`: versions that cannot get closer to
        their share.
        """
        with self._lock:
            shares = [(user, share) for user, share in self._deal(self._models).items() if user not in stuck]
            room, moved = self.total - self.used, 0  # computed once: there may be hundreds of versions
            shrinking = [each for each in shares if each[0].host_reserved_bytes > each[1] or each[0].host_is_uneven]
            for user, share in shrinking:
                has = user.host_reserved_bytes
                user.resize_host(min(has, share))
                if user.host_reserved_bytes > share:
                    stuck.add(user)
                moved += has - user.host_reserved_bytes
                if moved >= _GROWTH_BYTES:
                    break
            for user, share in shares if not shrinking else ():
                has = user.host_reserved_bytes
                upto = min(share, has + room - moved)
                for more in (_GROWTH_BYTES, has):  # device tables double
                    if has < upto and user.host_reserved_bytes == has:
                        user.resize_host(min(upto, has + more))
                moved += user.host_reserved_bytes - has
                if moved >= _GROWTH_BYTES:
                    break
            return bool(shrinking) or moved > 0

    def _deal(
        self, models: Mapping[MemoryUser, Hashable], traffic: Mapping[Hashable, float] | None = None
    ) -> dict[MemoryUser, int]:
        """The share of each, by this `traffic` of models or by what memory is divided by now."""
        needs, shares = [user.host_need_bytes for user in models], [user.request_share for user in models]
        awaited: object = object()
        dealt = deal_caches(
            self.total, [*needs, self._awaited], [*models.values(), awaited], [*shares, 1.0],
            self._traffic if traffic is None else traffic,
        )  # fmt: skip
        return dict(zip(models, dealt, strict=False))


class DecodeBudget:
    """A bound on bytes of all deltas that are being decoded: a compressed delta may take a thousand times its
    length.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._lock = threading.Lock()
        self._used = 0

    @property
    def used(self) -> int:
        return self._used

    @contextmanager
    def reserved(self, nbytes: int) -> Iterator[Callable[[int], None]]:
        """Reserve so many bytes for the block, and more by calling what it yields.

        Overloaded if others have them. TooLarge for what could never fit; later reservations may exceed the bound for
        a delta that is alone.
        """
        held = 0
        if nbytes > self.total:
            raise TooLarge(f"a delta of {nbytes:,} bytes once decoded; {self.total:,} are allowed: split it")

        def more(nbytes: int) -> None:
            nonlocal held
            with self._lock:
                if self._used > held and self._used + nbytes > self.total:
                    raise Overloaded(
                        f"deltas that are being decoded take {self._used:,} of {self.total:,} bytes, and this one "
                        f"would take {held + nbytes:,}; send it again"
                    )
                self._used += nbytes
                held += nbytes

        try:
            more(nbytes)
            yield more
        finally:
            with self._lock:
                self._used -= held


class OverlayBudget:
    """A bound on bytes of deltas that are visible but not folded, for all models together."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._lock = threading.Lock()
        self._used = 0

    @property
    def used(self) -> int:
        return self._used

    def reserve(self, nbytes: int) -> None:
        """Reserve bytes, or raise Overloaded; TooLarge for what could never fit."""
        if nbytes > self.total:
            raise TooLarge(
                f"a delta of {nbytes:,} bytes in memory is beyond overlay_budget, {self.total:,}; split it or raise "
                "the setting"
            )
        with self._lock:
            if self._used + nbytes > self.total:
                raise Overloaded(
                    f"deltas come faster than they are folded: {self._used:,} of {self.total:,} overlay bytes are in "
                    "use; send it again"
                )
            self._used += nbytes

    def release(self, nbytes: int) -> None:
        """Return reserved bytes."""
        with self._lock:
            self._used -= nbytes
