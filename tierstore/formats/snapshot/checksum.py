"""The files of a shard, and its checksum as `snapshot.json` carries it. Pure reading; any thread may call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import xxhash

from tierstore.formats.names import HUGECTR_KEYS, HUGECTR_VECTORS
from tierstore.formats.objects import Location, ObjectPath, names_below, size_of
from tierstore.formats.regular import open_regular
from tierstore.formats.scattered_digest import ScatteredDigest

_BLOCK = 4 << 20


def checksum(path: Location) -> str:
    """XXH3-64 of a shard file as 16 hex digits; of a directory over its `parts`, one after the other."""
    digest = xxhash.xxh3_64()
    block = memoryview(bytearray(_BLOCK))
    for _, part in parts(path):
        with open_regular(part) as file:
            while n := file.readinto(block):
                digest.update(block[:n])
    return digest.hexdigest()


@contextmanager
def checksum_while_read(path: ObjectPath) -> Iterator[Callable[[], str]]:
    """Within the block, what is read of a shard comes once; the function reads what then is
    missing, and returns the `checksum`.
    """
    files = [part for _, part in parts(path) if isinstance(part, ObjectPath)]
    digest = ScatteredDigest(sum(map(size_of, files)))
    with ExitStack() as stack:
        held = []
        begin = 0
        for part in files:
            held.append(stack.enter_context(part.held(partial(digest.add, begin))))
            begin += size_of(part)

        def finish() -> str:
            for ranges in held:
                ranges.see_all()
            return digest.hexdigest()

        yield finish


def is_hugectr(path: Location) -> bool:
    """Whether a directory holds a HugeCTR/HPS sparse model, or part of one."""
    return (path / HUGECTR_KEYS).exists() or (path / HUGECTR_VECTORS).exists()


def parts(path: Location) -> list[tuple[str, Location]]:
    """The files of a shard with their names relative to `path`, in the order of its checksum.

    In a directory: `key` and `emb_vector`, or else every file in it and in directories below, ordered by
    path. Files and directories whose name begins with `_` or `.` are left out: they are markers and
    checksums. Of a file the name is empty.
    """
    if not path.is_dir():
        return [("", path)]
    if is_hugectr(path):
        names = [HUGECTR_KEYS, HUGECTR_VECTORS]
    else:
        names = [
            name.as_posix()
            for name in sorted(names_below(path))
            if not any(part.startswith(("_", ".")) for part in name.parts)
        ]
    return [(name, path / name) for name in names]
