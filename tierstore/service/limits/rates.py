"""Rates: the requests, keys and bytes a second of each caller, and of each model.

Token buckets that hold what one second allows. A request passes while no bucket is empty, and then costs its full
price, even if a bucket goes below zero: so a request above a second's allowance is served, and later ones wait longer.
The keys of a request are known once it is planned, and are charged then. Reactors draw from the same buckets
(`kernels/rates.py`). Any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from tierstore.access.roles import NO_LIMITS, Principal, Rates
from tierstore.config import ANY_MODEL, ModelQuota, Settings
from tierstore.errors import RateLimited
from tierstore.kernels import rates as kernel
from tierstore.kernels.codec import address_of

_MOST_BUCKETS = 20_000
_UNITS = ("requests", "keys", "bytes")

Words = npt.NDArray[Any]


class _Bucket:
    """The token bucket of one caller, or of one model. Any thread."""

    __slots__ = ("address", "name", "rates", "words")

    def __init__(self, name: str, rates: Rates) -> None:
        self.name, self.rates = name, (rates.requests, rates.keys, rates.nbytes)
        self.words: Words = kernel.BUCKET.new()
        for unit, rate in enumerate(self.rates):
            self.words["milli_rate"][unit] = 0 if rate is None else max(1, round(rate * 1000))
        self.address = address_of(self.words)

    def check(self, now_ns: int) -> None:
        """RateLimited if less than one unit of something is left."""
        unit = kernel.empty(self.address, now_ns)
        if unit != kernel.FREE:
            rate = self.rates[unit]
            assert rate is not None
            drawn_s = (int(self.words["full_ns"][unit]) - now_ns) / 1e9
            wait_s = max(0.0, drawn_s - max(rate - 1, 0.0) / rate)
            raise RateLimited(
                f"{self.name} may have {rate:g} {_UNITS[unit]} a second; try again in {wait_s:.2g} s",
                retry_after_s=wait_s,
            )


class Charge:
    """The price of one request; its keys once they are known. One thread at a time."""

    __slots__ = ("_buckets", "_now_ns")

    def __init__(self, buckets: list[_Bucket], now_ns: int) -> None:
        self._buckets, self._now_ns = buckets, now_ns

    def keys(self, keys: int) -> None:
        """Charge keys; only the first call does."""
        buckets, self._buckets = self._buckets, []
        for each in buckets:
            kernel.draw(each.address, self._now_ns, 0, keys, 0)


class RateLimits:
    """The rates of all callers and models of a service."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        refused: Callable[[], object] = lambda: None,
    ) -> None:
        """`refused` is called for each refused request."""
        self._models = {name: _rates(quota) for name, quota in settings.quotas.items()}
        self._clock, self._refused = clock, refused
        self._lock = threading.Lock()
        self._buckets: dict[tuple[str, str], _Bucket] = {}  # guarded by _lock

    def of_model(self, model: str) -> Rates:
        """The rates of all callers of a model together."""
        rates = self._models.get(model)
        return rates if rates is not None else self._models.get(ANY_MODEL, NO_LIMITS)

    def words_of(self, principal: Principal) -> Words | None:
        """A caller's bucket, for compiled threads; None if it has no rates."""
        return self._bucket("", principal.name, principal.rates).words if principal.rates else None

    def words_of_model(self, model: str) -> Words | None:
        """A model's bucket, for compiled threads; None if it has no rates."""
        rates = self.of_model(model)
        return self._bucket("model ", model, rates).words if rates else None

    def _bucket(self, kind: str, name: str, rates: Rates) -> _Bucket:
        with self._lock:
            each = self._buckets.get((kind, name))
            if each is None:
                if len(self._buckets) >= _MOST_BUCKETS:  # deltas may name models that do not exist
                    del self._buckets[next(iter(self._buckets))]
                each = self._buckets[kind, name] = _Bucket(kind + name, rates)
            return each

    def admit(self, principal: Principal, model: str | None, nbytes: int) -> Charge | None:
        """Charge a request with a body of `nbytes`; None if there are no rates. RateLimited, with nothing charged, if a
        bucket is empty.

        `model` None: it is unknown which one it concerns.
        """
        of_model = NO_LIMITS if model is None else self.of_model(model)
        if not principal.rates and not of_model:
            return None
        now_ns = int(self._clock() * 1e9)
        named = (("", principal.name, principal.rates), ("model ", model or "", of_model))
        buckets = [self._bucket(kind, name, rates) for kind, name, rates in named if rates]
        try:
            for each in buckets:
                each.check(now_ns)
        except RateLimited:
            self._refused()
            raise
        for each in buckets:
            kernel.draw(each.address, now_ns, 1, 0, nbytes)
        return Charge(buckets, now_ns)


def _rates(quota: ModelQuota) -> Rates:
    return Rates(quota.requests_per_second, quota.keys_per_second, quota.bytes_per_second)
