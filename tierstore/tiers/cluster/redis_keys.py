"""Redis keys: the names of everything in the cluster, and the tag of each row. Pure functions; any thread may call them.

    ts:{<tag>}:<model>:<version>           hash: seq, applying, epoch, chunk, digest (the watermark of this tag), load
    ts:{<tag>}:<model>:<version>.<line>    the same after that many rollbacks to a delta; the one before says `applying` REPLACED
    ts:{<tag>}:<model>:<version>::before   hash: seq of a delta → the rows that it replaced, for a rollback; "<seq> of" → the delta's digest
    ts:{<tag>}:<model>:<version>:<table>   hash: code (8 bytes, little-endian) → row as stored

A *tag* is a hash tag of Redis: keys with the same tag are in the same slot, so one server has them and one command or script may touch all of them. A
version's tags are chosen once, at its load, and written into its manifest. `<table>` is the table's name; names have no colon and no brace.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Sequence
from itertools import count

from tierstore.errors import InvalidInput

SLOTS = 16384
MOST_TAGS = 64  # for each master: more would make commands too short (docs/decisions/remote-tier.md)

# fields of a tag's watermark
SEQ = b"seq"  # the newest delta whose rows are all there
APPLYING = b"applying"  # the newest delta of which rows may be there
EPOCH = b"epoch"  # of the newest writer; a writer with a lower epoch is refused
CHUNK = b"chunk"  # how many chunks of the delta `applying` are there
DIGEST = b"digest"  # seq and digest of the delta `applying`: another delta with this seq is refused
WAS = b"was"  # what `applying` was before it said REPLACED
TO = b"to"  # the delta to which a line that says REPLACED is rolled back
UNDONE = b"undone"  # the newest delta when the rollback ended that has begun this line
LOAD = b"load"  # the load that may write rows; "-" and its name once it has ended (earlier releases: empty)


def slot_of(tag: bytes) -> int:
    """The slot of every key with this tag."""
    return crc_hqx(tag, 0) % SLOTS


def watermark_key(tag: bytes, model: str, version: int, line: int = 0) -> bytes:
    """The watermark of a line of a version: each rollback to a delta begins another one, over the same rows."""
    return b"ts:{%s}:%s:%d" % (tag, model.encode(), version) + (b".%d" % line if line else b"")


def before_key(tag: bytes, model: str, version: int) -> bytes:
    """A hash: seq of a delta → the rows that it replaced under this tag, and its digest (`before_digest`)."""
    return watermark_key(tag, model, version) + b"::before"


def before_digest(seq: int) -> bytes:
    """The field beside that of the rows that a delta replaced."""
    return b"%d of" % seq


def rows_key(tag: bytes, model: str, version: int, table: str) -> bytes:
    return b"%s:%s" % (watermark_key(tag, model, version), table.encode())


def choose_tags(slots: Sequence[Sequence[int]], per_master: int) -> list[bytes]:
    """Tags for a new version: `per_master` for each master, spread over its slots, which are in `slots`.

    Raises InvalidInput for a number of tags that is not between 1 and MOST_TAGS.
    """
    if not 1 <= per_master <= MOST_TAGS:
        raise InvalidInput(f"expected 1 to {MOST_TAGS} tags for each master, got {per_master}")
    wanted: dict[int, tuple[int, int]] = {}  # slot → the number of the tag for it
    for master, owned in enumerate(slots):
        for number, slot in enumerate(owned):
            wanted[slot] = (master, number * per_master // len(owned))
    missing = set(wanted.values())
    tags: dict[tuple[int, int], bytes] = {}
    for number in count():
        if not missing:
            return [tags[place] for place in sorted(tags)]
        tag = b"%d" % number
        place = wanted.get(slot_of(tag))
        if place in missing:
            missing.discard(place)
            tags[place] = tag
    raise AssertionError
