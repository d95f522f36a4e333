"""The digest of bytes that come in pieces, in any order, is that of the reference library for all of them."""

from __future__ import annotations

import random
import threading

import pytest
import xxhash

from tierstore.formats.scattered_digest import ScatteredDigest


def pieces(content: bytes, cuts: list[int]) -> list[tuple[int, bytes]]:
    return [(begin, content[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True)]


SIZES = [0, 1, 16, 240, 241, 1023, 1024, 1025, 1024 + 63, 1024 + 64, 2048, 2049, 2048 + 65, 10_240, 70_001]


@pytest.mark.parametrize("size", SIZES)
def test_any_cuts_in_any_order(size: int) -> None:
    chance = random.Random(size)
    content = chance.randbytes(size)
    for most in (0, 1, 3, 20, 200):
        cuts = sorted(chance.sample(range(size + 1), min(most, size + 1)))
        parts = pieces(content, cuts)
        chance.shuffle(parts)
        digest = ScatteredDigest(size)
        for at, piece in parts:
            digest.add(0, at, piece)
        assert digest.hexdigest() == digest.hexdigest() == xxhash.xxh3_64_hexdigest(content)


def test_a_piece_that_differs_or_stands_elsewhere_changes_it() -> None:
    content = random.Random(1).randbytes(9_000)
    right = xxhash.xxh3_64_hexdigest(content)
    for at in (0, 1024, 5000, 8999):
        digest = ScatteredDigest(len(content))
        changed = bytearray(content)
        changed[at] ^= 1
        for begin, piece in pieces(bytes(changed), [3_000, 4_096]):
            digest.add(0, begin, piece)
        assert digest.hexdigest() != right
    digest = ScatteredDigest(len(content))
    for begin, source in ((0, 3_000), (3_000, 0), (6_000, 6_000)):
        digest.add(0, begin, content[source : source + 3_000])
    assert digest.hexdigest() != right


def test_threads_may_add_at_the_same_time() -> None:
    content = random.Random(2).randbytes(3_000_000)
    parts = pieces(content, list(range(7_000, len(content), 7_000)))
    random.Random(3).shuffle(parts)
    digest = ScatteredDigest(len(content))

    def add(mine: list[tuple[int, bytes]]) -> None:
        for at, piece in mine:
            digest.add(0, at, piece)

    threads = [threading.Thread(target=add, args=(parts[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert digest.hexdigest() == xxhash.xxh3_64_hexdigest(content)


def test_it_cannot_be_had_before_all_came() -> None:
    digest = ScatteredDigest(5_000)
    digest.add(1_000, 1_000, bytes(3_000))
    with pytest.raises(AssertionError):
        digest.hexdigest()
