"""By whom reactors are asked: the names of the service, and the tokens that have passed the check of access before.

Of a caller its latest `EACH` spellings of Authorization are kept, and of all callers `MOST`; the oldest makes room.
What is replaced is kept until no reader is at it. For the event loop. Reactors read what is published, without a lock
(`wire/callers.py`).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.access.roles import LOCAL, Action, Principal
from tierstore.engine.serving.epochs import Epochs
from tierstore.kernels.codec import address_of
from tierstore.kernels.records import TEXT
from tierstore.reactor import layout as kernel
from tierstore.service.access import Access
from tierstore.service.limits.rates import RateLimits
from tierstore.wire import callers as layout

MOST = 64  # tokens, which a reactor compares one by one; what is beyond is for Python to check
EACH = 8  # spellings of one caller's
MOST_NAMES = 64  # of the service, beside those that it knows of: IPv6 addresses, say
_ALWAYS = ("localhost", "::1")

_IPV4 = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}")

Words = npt.NDArray[np.int64]


class Allowed:
    """Publishes its table in `shared`, the memory of the reactors."""

    def __init__(self, shared: npt.NDArray[Any], epochs: Epochs, access: Access, rates: RateLimits) -> None:
        self._word, self._epochs, self._rates = kernel.SHARED.place(shared, "allowed_at"), epochs, rates
        self._rules = (layout.ANY_NAME if access.any_name else 0) | (layout.ANY_IPV4 if access.any_address else 0)
        self._fixed = {*_ALWAYS, *access.names}
        self._names: dict[str, None] = {}  # others that have passed, the oldest first
        self._tokens: dict[bytes, Principal] = {}  # the oldest first
        self._open = False  # whether nobody needs a token
        self._published: object = None  # what reactors read
        self._publish()

    def add(self, host: str, authorization: bytes | None, principal: Principal) -> None:
        """Answer look-ups under a name, in small letters, and with a header by which `principal` has passed.

        `authorization` None: nobody needs a token.
        """
        changed = self._add_name(host)
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

    def _add_name(self, host: str) -> bool:
        if host in self._fixed or host in self._names:
            return False
        if _IPV4.fullmatch(host):  # told by their form
            return False
        if len(self._names) >= MOST_NAMES:
            del self._names[next(iter(self._names))]
        self._names[host] = None
        return True

    def clear(self) -> None:
        """Answer no look-ups until `add` is called again: tokens have changed."""
        self._tokens.clear()
        self._open = False
        self._publish()

    def _publish(self) -> None:
        kept: list[object] = []

        def placed(data: bytes) -> tuple[int, int]:
            array = np.frombuffer(data, np.uint8)
            kept.append(array)
            return address_of(array), len(array)

        names = np.array([placed(name.encode()) for name in (*self._fixed, *self._names)], TEXT.dtype)
        tokens = layout.TOKEN.new(len(self._tokens))
        for token, (value, principal) in zip(tokens, self._tokens.items(), strict=True):
            token["at"], token["bytes"] = placed(value)
            for field, part in (("models_at", self._models(principal)), ("bucket_at", self._rates.words_of(principal))):
                kept.append(part)
                token[field] = 0 if part is None else address_of(part)
            token["may_front"] = principal.may(Action.FRONT) and principal.models is None
        kept += [names, tokens]
        table = layout.ALLOWED.make(
            names=len(names),
            first_name=address_of(names),
            host_rules=self._rules,
            tokens=layout.NEEDED_BY_NOBODY if self._open else len(tokens),
            first_token=address_of(tokens),
        )
        old, self._published = self._published, (table, kept)
        generation = self._epochs.publish(self._word, address_of(table))
        self._epochs.retire(generation, old, lambda: None)

    def _models(self, principal: Principal) -> Words | None:
        """How many models a caller is for and their slots; None: it is for all of them."""
        if principal.models is None or principal is LOCAL:
            return None
        slots = [slot for slot in map(self._epochs.slot, sorted(principal.models)) if slot is not None]
        return np.array([len(slots), *slots], np.int64)
