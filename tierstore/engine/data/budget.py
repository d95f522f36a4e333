"""Memory budgets shared by all open versions: bytes of the host tier, and bytes of unfolded deltas.

Both are bounds: what they give out never adds up to more. Any thread may call; each has its own lock.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from tierstore.errors import Overloaded, TooLarge

_GROWTH_BYTES = 256 << 20  # a version grows by at most so much at a time


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


def deal_caches(total: int, needs: Sequence[int], models: Sequence[Hashable]) -> list[int]:
    """Split `total` among versions by their needs. `models`: the model of each.

    None gets more than it needs; what one does not need goes to the others. Versions of one model share what the model
    would get with one of them, so that a switch of one model takes nothing from the others.
    """
    open_ = Counter(models)
    return deal(total, needs, [need / open_[model] for need, model in zip(needs, models, strict=True)])


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

    def attach_host(self, budget_bytes: int, limit_bytes: int, like: MemoryUser | None) -> None:
        """Use `budget_bytes`; it may be allowed `limit_bytes` later."""

    def resize_host(self, budget_bytes: int) -> None:
        """Make do with so much, or grow to it, as far as it can."""


class HostBudget:
    """Divides `total` bytes among the open versions, and again whenever one is opened or closed.

    A version that shrinks does so in place, keeping its hottest rows, before another gets its memory; so all together
    never exceed the budget, also with two versions of a model in a switch. `rebalance` lets versions grow.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._lock = threading.Lock()
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
        stuck: set[MemoryUser] = set()
        while not stopping() and self._rebalance_one(stuck):
            pass

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

    def _deal(self, models: Mapping[MemoryUser, Hashable]) -> dict[MemoryUser, int]:
        needs = [user.host_need_bytes for user in models]
        awaited: object = object()
        shares = deal_caches(self.total, [*needs, self._awaited], [*models.values(), awaited])
        return dict(zip(models, shares, strict=False))


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
