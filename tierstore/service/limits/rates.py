"""Rates: the requests, keys and bytes a second of each caller, and of each model.

Token buckets that hold what a second allows. A request passes while no bucket is empty, and then costs what it costs, even if a
bucket goes below zero: so one that is larger than a second allows is served, and what follows waits longer. The keys of a request
are known once it is planned, and are charged then. Any thread; nothing survives a restart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tierstore.access.roles import NO_LIMITS, Principal, Rates
from tierstore.config import ANY_MODEL, ModelQuota, Settings
from tierstore.errors import RateLimited

_MOST_BUCKETS = 20_000
_UNITS = ("requests", "keys", "bytes")


class _Buckets:
    """Those of one caller, or of one model. Guarded by the lock of `RateLimits`."""

    __slots__ = ("at_s", "levels", "name", "rates")

    def __init__(self, name: str, rates: Rates, now_s: float) -> None:
        self.name, self.at_s = name, now_s
        self.rates = (rates.requests, rates.keys, rates.nbytes)
        self.levels = [max(1.0, rate or 0.0) for rate in self.rates]

    def refill(self, now_s: float) -> None:
        passed_s, self.at_s = max(0.0, now_s - self.at_s), now_s
        for i, rate in enumerate(self.rates):
            if rate is not None:
                self.levels[i] = min(max(1.0, rate), self.levels[i] + passed_s * rate)

    def check(self) -> None:
        """RateLimited where a bucket has less than one."""
        for unit, rate, level in zip(_UNITS, self.rates, self.levels, strict=True):
            if rate is not None and level < 1:
                wait_s = (1 - level) / rate
                raise RateLimited(
                    f"{self.name} may have {rate:g} {unit} a second; try again in {wait_s:.2g} s", retry_after_s=wait_s
                )

    def spend(self, requests: float, keys: float, nbytes: float) -> None:
        for i, cost in enumerate((requests, keys, nbytes)):
            if self.rates[i] is not None:
                self.levels[i] -= cost


class Charge:
    """What one request costs; its keys once they are known. One thread at a time."""

    __slots__ = ("_buckets", "_lock")

    def __init__(self, lock: threading.Lock, buckets: list[_Buckets]) -> None:
        self._lock, self._buckets = lock, buckets

    def keys(self, keys: int) -> None:
        """Charge them; only the first call does."""
        buckets, self._buckets = self._buckets, []
        with self._lock:
            for each in buckets:
                each.spend(0, keys, 0)


class RateLimits:
    """Of all callers and models of a service."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._models = {name: _rates(quota) for name, quota in settings.quotas.items()}
        self._clock = clock
        self._lock = threading.Lock()
        # guarded by _lock
        self._buckets: dict[tuple[str, str], _Buckets] = {}

    def of_model(self, model: str) -> Rates:
        """The rates of all callers of a model together."""
        rates = self._models.get(model)
        return rates if rates is not None else self._models.get(ANY_MODEL, NO_LIMITS)

    def admit(self, principal: Principal, model: str, nbytes: int) -> Charge | None:
        """Charge a request with a body of `nbytes`. RateLimited, and nothing is charged, where there is no room. None: no rates."""
        of_model = self.of_model(model)
        if not principal.rates and not of_model:
            return None
        with self._lock:
            now_s = self._clock()
            buckets = []
            for kind, name, rates in (("", principal.name, principal.rates), ("model ", model, of_model)):
                if rates:
                    each = self._buckets.get((kind, name))
                    if each is None:
                        if len(self._buckets) >= _MOST_BUCKETS:  # deltas may name models that there are not
                            del self._buckets[next(iter(self._buckets))]
                        each = self._buckets[kind, name] = _Buckets(kind + name, rates, now_s)
                    each.refill(now_s)
                    buckets.append(each)
            for each in buckets:
                each.check()
            for each in buckets:
                each.spend(1, 0, nbytes)
        return Charge(self._lock, buckets)


def _rates(quota: ModelQuota) -> Rates:
    return Rates(quota.requests_per_second, quota.keys_per_second, quota.bytes_per_second)
