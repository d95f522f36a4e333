"""The callers that reactors may answer: values of Host, and tokens, that have passed the access check before.

`Access` decides, and reactors compare bytes with what it has accepted. For each caller its latest `EACH` spellings of
Authorization are kept, and `MOST` for all callers; the oldest makes room. Replaced tables are kept until no reader
uses them. For the event loop. Reactors read the published table without a lock (`wire/callers.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.access.roles import LOCAL, Action, Principal
from tierstore.engine.serving.epochs import Epochs
from tierstore.kernels.codec import address_of
from tierstore.kernels.records import TEXT
from tierstore.reactor import layout as kernel
from tierstore.service.limits.rates import RateLimits
from tierstore.wire import callers as layout

MOST = 64  # tokens, which a reactor compares one by one; Python checks others
EACH = 8  # spellings of one caller's token
MOST_HOSTS, _LONGEST_HOST = 64, 300  # values of Host, and bytes of one

Words = npt.NDArray[np.int64]


class Allowed:
    """Publishes its table in `shared`, the memory of the reactors."""

    def __init__(self, shared: npt.NDArray[Any], epochs: Epochs, rates: RateLimits) -> None:
        self._word, self._epochs, self._rates = kernel.SHARED.place(shared, "allowed_at"), epochs, rates
        self._hosts: dict[bytes, None] = {}  # oldest first
        self._tokens: dict[bytes, Principal] = {}  # oldest first
        self._open = False  # whether no caller needs a token
        self._published: object = None  # what reactors read
        self._publish()

    def add(self, host: bytes, authorization: bytes | None, principal: Principal) -> None:
        """Answer look-ups with a value of Host or `:authority`, and of Authorization, with which `principal` was
        accepted.

        `authorization` None: no caller needs a token.
        """
        changed = self._add_host(host)
        if authorization is None:
            changed, self._open = changed or not self._open, True
        elif authorization not in self._tokens:
            own = [value for value, other in self._tokens.items() if other.name == principal.name]
            if len(own) >= EACH:
                del self._tokens[own[0]]
            elif len(self._tokens) >= MOST:
                del self._tokens[next(iter(self._tokens))]
            self._tokens[authorization], changed = principal, True
        if changed:
            self._publish()

    def _add_host(self, host: bytes) -> bool:
        if host in self._hosts or len(host) > _LONGEST_HOST:
            return False
        if len(self._hosts) >= MOST_HOSTS:
            del self._hosts[next(iter(self._hosts))]
        self._hosts[host] = None
        return True

    def clear(self) -> None:
        """Answer no look-ups until `add` is called again, because tokens have changed."""
        self._tokens.clear()
        self._open = False
        self._publish()

    def _publish(self) -> None:
        kept: list[object] = []

        def placed(data: bytes) -> tuple[int, int]:
            array = np.frombuffer(data, np.uint8)
            kept.append(array)
            return address_of(array), len(array)

        hosts = np.array([placed(host) for host in self._hosts], TEXT.dtype)
        tokens = layout.TOKEN.new(len(self._tokens))
        for token, (value, principal) in zip(tokens, self._tokens.items(), strict=True):
            token["at"], token["bytes"] = placed(value)
            for field, part in (("models_at", self._models(principal)), ("bucket_at", self._rates.words_of(principal))):
                kept.append(part)
                token[field] = 0 if part is None else address_of(part)
            token["may_front"] = principal.may(Action.FRONT) and principal.models is None
        kept += [hosts, tokens]
        table = layout.ALLOWED.make(
            hosts=len(hosts),
            first_host=address_of(hosts),
            tokens=layout.NEEDED_BY_NOBODY if self._open else len(tokens),
            first_token=address_of(tokens),
        )
        old, self._published = self._published, (table, kept)
        generation = self._epochs.publish(self._word, address_of(table))
        self._epochs.retire(generation, old, lambda: None)

    def _models(self, principal: Principal) -> Words | None:
        """The number of models that a caller may use and their slots; None: all models."""
        if principal.models is None or principal is LOCAL:
            return None
        slots = [slot for slot in map(self._epochs.slot, sorted(principal.models)) if slot is not None]
        return np.array([len(slots), *slots], np.int64)
