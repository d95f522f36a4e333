"""Who may ask a reactor: the names of the service, and the tokens that have passed the check of access before. See `reactor/loop.py`.

Python publishes the table (`service/reactor/allowed.py`). Free functions of records and addresses; any thread.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels.raw import load_i64, load_u8
from tierstore.kernels.records import TEXT, at, define, text_at

TOKEN = define("Token", "the value of an Authorization header, and what it may", {
    "at bytes": "the value",
    "models_at": "how many models it is for and their slots; 0: all of them",
    "bucket_at": "its rates, or 0",
    "may_front": "1: it may ask as a front",
})  # fmt: skip
ALLOWED = define("Allowed", "who may ask a reactor", {
    "names": "how many", "first_name": (TEXT, "names of the service, in small letters"),
    "host_rules": "what else a Host may be: ANY_NAME, ANY_IPV4",
    "tokens": "how many, or NEEDED_BY_NOBODY",
    "first_token": (TOKEN, "those that have passed the check of access before"),
})  # fmt: skip
allowed_at, token_at = at(ALLOWED), at(TOKEN)
ANY_NAME, ANY_IPV4 = 1, 2  # bits of `host_rules`
NEEDED_BY_NOBODY = -1  # of `tokens`
NOBODY, EVERYBODY = 0, -1  # of `caller_of`

_ZERO, _NINE, _DOT, _COLON, _OPEN, _CLOSE = b"09.:[]"
_MOST_NAME_BYTES = 256


@nb.njit
def _are_digits(at, n):  # type: ignore[no-untyped-def]
    for i in range(n):  # noqa: SIM110 - for the compiler
        if load_u8(at, i) < _ZERO or load_u8(at, i) > _NINE:
            return False
    return True


@nb.njit
def ipv4(at, n):  # type: ignore[no-untyped-def]
    """The first number of an IPv4 address as it is usually written, or -1."""
    i, first = 0, -1
    for part in range(4):
        value, begin = 0, i
        while i < n and i - begin < 4 and load_u8(at, i) >= _ZERO and load_u8(at, i) <= _NINE:
            value = 10 * value + nb.int64(load_u8(at, i)) - _ZERO
            i += 1
        if i == begin or value > 255 or (i - begin > 1 and load_u8(at, begin) == _ZERO):
            return -1
        if part == 0:
            first = value
        if part < 3:
            if i >= n or load_u8(at, i) != _DOT:
                return -1
            i += 1
    return first if i == n else -1


@nb.njit
def is_own_host(table, at, n):  # type: ignore[no-untyped-def]
    """Whether the `n` bytes of a Host header are a name of this service, with or without a port."""
    if n > 0 and load_u8(at, 0) == _OPEN:
        begin, end = 1, 1
        while end < n and load_u8(at, end) != _CLOSE:
            end += 1
        port = end + 1
        if end >= n or (port < n and load_u8(at, port) != _COLON):
            return False
    else:
        begin = end = 0
        while end < n and load_u8(at, end) != _COLON:
            end += 1
        port = end
    size, name = end - begin, at + begin
    if size < 1 or size > _MOST_NAME_BYTES or (port < n and not _are_digits(at + port + 1, n - port - 1)):
        return False
    rules = table.host_rules
    if rules & ANY_NAME:
        return True
    if begin == 0:
        first = ipv4(name, size)
        if first == 127 or (first >= 0 and rules & ANY_IPV4 != 0):
            return True
    for k in range(table.names):
        own = text_at(table.first_name, k)
        if own.bytes != size:
            continue
        same = True
        for i in range(size):
            byte = load_u8(name, i)
            if byte >= 65 and byte <= 90:
                byte |= nb.uint8(32)
            if byte != load_u8(own.at, i):
                same = False
                break
        if same:
            return True
    return False


@nb.njit
def caller_of(table, at, n):  # type: ignore[no-untyped-def]
    """The token's entry that the `n` bytes of an Authorization header are; EVERYBODY, or NOBODY that is known.

    What is secret is compared in a time that does not depend on it.
    """
    tokens = table.tokens
    if tokens == NEEDED_BY_NOBODY:
        return token_at(EVERYBODY)
    entry = table.first_token
    for _ in range(tokens):
        if n > 0 and entry.bytes == n:
            there, other = entry.at, nb.uint8(0)
            for k in range(n):
                other |= load_u8(there, k) ^ load_u8(at, k)
            if other == 0:
                return entry
        entry = token_at(entry, 1)
    return token_at(NOBODY)


@nb.njit
def may_look_up(caller, model):  # type: ignore[no-untyped-def]
    """Whether a caller may look up in the model of a slot."""
    if caller == EVERYBODY:
        return True
    models = caller.models_at
    if models == 0:
        return True
    for k in range(load_i64(models, 0)):  # noqa: SIM110 - for the compiler
        if load_i64(models, 1 + k) == model:
            return True
    return False


@nb.njit
def bucket_of(caller):  # type: ignore[no-untyped-def]
    """The address of a caller's rates, or 0."""
    if caller == EVERYBODY:
        return nb.int64(0)
    return caller.bucket_at
