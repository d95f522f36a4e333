"""Resets objects in a forked child, or refuses them there.

A fork copies the thread that calls it and no other: a lock that another thread held stays locked in the child for good,
what that thread counted as under way never ends, and sockets, files and locks of files are the parent's.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from tierstore.errors import Closed

_REFUSED = (
    "this process was forked from one that has the store open, and has neither its threads nor its lock. Start "
    "processes that need no rows with multiprocessing's 'spawn' (multiprocessing_context='spawn' of a DataLoader); for "
    "those that do, serve the store (`tierstore serve`) and make a tierstore.Client in each"
)


class Renewed(Protocol):
    """`renew` is called in the child, where there is one thread, before `os.fork` returns."""

    def renew(self) -> None: ...


_renewed: weakref.WeakSet[Renewed] = weakref.WeakSet()


def renew_in_child(one: Renewed) -> None:
    """Have `one` renewed in every child that is forked while it lives. Any thread."""
    _renewed.add(one)


def refuse(one: object, *ignored: str) -> None:
    """In a child: every use of `one` raises Closed from now on, except calls of methods that are `ignored`."""

    def attribute(self: object, name: str) -> Any:
        if name in ignored:
            return lambda *_, **__: None
        if name.startswith("__"):  # of the interpreter, such as `isinstance`
            return object.__getattribute__(self, name)
        raise Closed(_REFUSED)

    kind = type(one)
    one.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "__getattribute__": attribute})


def _renew_all() -> None:
    for one in list(_renewed):
        one.renew()


os.register_at_fork(after_in_child=_renew_all)
