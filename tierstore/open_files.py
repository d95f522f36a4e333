"""The limit of open files: the store raises the soft one, and cannot raise the hard one.

Any thread.
"""

from __future__ import annotations

import errno
import os
import resource

from tierstore.errors import StorageError

_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_SPARE = 64  # for all that is not a store's files


def may_open() -> int | None:
    """How many files this process may have open, as its soft limit is now; None: as many as it likes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_to(wanted: int) -> None:
    """Raise the soft limit to so many files, or as far as the hard one; it is never lowered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def allow(more: int) -> None:
    """Raise the soft limit, if so many more files would use up half of it."""
    soft = may_open()
    if soft is None:
        return
    try:
        held = len(os.listdir("/proc/self/fd"))
    except OSError:  # there is no descriptor left to look with
        held = soft
    if held + more > soft // 2:
        raise_to(soft + 2 * (held + more))


def are_too_many(error: BaseException) -> bool:
    """Whether an error comes from too many open files, which the next try may not meet."""
    chain: BaseException | None = error
    while chain is not None:
        number = chain.errno if isinstance(chain, OSError) else None
        if number in _TOO_MANY or any(os.strerror(each) in str(chain) for each in _TOO_MANY):  # a driver's has the text
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def require(needed: int, what: str) -> None:
    """`allow` so many files for `what`. StorageError where this process can never have them open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed + _SPARE > hard:
        raise StorageError(
            f"{what} needs about {needed + _SPARE} open files, and this process may have {hard}: raise the limit "
            "(`ulimit -Hn` of a shell, `LimitNOFILE=` of systemd, `--ulimit nofile=` of a container) and start again"
        )
    allow(needed)
