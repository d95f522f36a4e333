"""What begins anew in a forked child, so that a client of the parent works there too.

A fork copies the thread that calls it and no other: a lock that another thread held stays locked in the child for good,
what that thread counted as under way never ends, and the sockets are the parent's.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewed(Protocol):
    """`renew` is called in the child, where there is one thread, before `os.fork` returns."""

    def renew(self) -> None: ...


_renewed: weakref.WeakSet[Renewed] = weakref.WeakSet()


def renew_in_child(one: Renewed) -> None:
    """Have `one` renewed in every child that is forked while it lives. Any thread."""
    _renewed.add(one)


def _renew_all() -> None:
    for one in list(_renewed):
        one.renew()


os.register_at_fork(after_in_child=_renew_all)
