"""Access checks in a reactor: the Host values and tokens that Python's access check has already accepted. See `reactor/loop.py`.

Python publishes the table (`service/reactor/allowed.py`). Free functions of records and addresses; any thread.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels.raw import load_i64, load_u8
from tierstore.kernels.records import TEXT, at, define, text_at
from tierstore.kernels.sysio import same_bytes

TOKEN = define("Token", "the value of an Authorization header, and the rights of whoever sends it", {
    "at bytes": "the address and the bytes of the value",
    "models_at": "the address of the number of models that it is for and of their slots; 0: all models",
    "bucket_at": "the address of its rates, or 0",
    "may_front": "1: its sender may ask as a front",
})  # fmt: skip
ALLOWED = define("Allowed", "the hosts and tokens that reactors let in", {
    "hosts": "the number of hosts", "first_host": (TEXT, "the first of the values of Host that have passed the check of access"),
    "tokens": "the number of tokens, or NEEDED_BY_NOBODY",
    "first_token": (TOKEN, "the first of the tokens that have passed the check of access"),
})  # fmt: skip
allowed_at, token_at = at(ALLOWED), at(TOKEN)
NEEDED_BY_NOBODY = -1  # in place of `tokens`: no request needs a token
NOBODY, EVERYBODY = 0, -1  # results of `caller_of`


@nb.njit
def is_own_host(table, at, n):
    """Whether the `n` bytes of a Host header or of `:authority` are a value that Python's access check has accepted."""
    for k in range(table.hosts):
        own = text_at(table.first_host, k)
        if n > 0 and own.bytes == n and same_bytes(own.at, at, n) == 1:
            return True
    return False


@nb.njit
def caller_of(table, at, n):
    """The entry of the token in the `n` bytes of an Authorization header; EVERYBODY where none is needed; NOBODY for an unknown token.

    Secrets are compared in a time that does not depend on them.
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
def may_look_up(caller, model):
    """Whether a caller may look up in the model with this slot."""
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
def bucket_of(caller):
    """The address of a caller's rates, or 0."""
    if caller == EVERYBODY:
        return nb.int64(0)
    return caller.bucket_at
