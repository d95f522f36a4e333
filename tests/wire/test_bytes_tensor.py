"""Length-prefixed elements come apart as `struct` takes them apart, and nothing else is taken for some."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.wire.bytes_tensor import split_prefixed


def packed(elements: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def taken_apart(wire: bytes, count: int) -> list[bytes] | None:
    """The plain twin: the elements, or None unless `count` of them fill `wire`."""
    elements, at = [], 0
    for _ in range(count):
        if at + 4 > len(wire):
            return None
        (length,) = struct.unpack_from("<I", wire, at)
        elements.append(wire[at + 4 : at + 4 + length])
        at += 4 + length
    return elements if at == len(wire) else None


def split(wire: bytes, count: int) -> list[bytes] | None:
    try:
        data, offsets = split_prefixed(np.frombuffer(wire, np.uint8), count)
    except ValueError:
        return None
    assert len(data) == offsets[-1]
    return [data[a:b].tobytes() for a, b in pairwise(offsets)]


@given(st.lists(st.binary(max_size=20), max_size=12))
def test_elements_come_apart(elements: list[bytes]) -> None:
    assert split(packed(elements), len(elements)) == elements


@given(st.lists(st.binary(max_size=6), max_size=6), st.integers(0, 8), st.binary(max_size=6), st.integers(0, 40))
def test_any_bytes_are_judged_as_the_plain_twin_judges(
    elements: list[bytes], count: int, more: bytes, cut: int
) -> None:
    wire = (packed(elements) + more)[:cut]
    assert split(wire, count) == taken_apart(wire, count)


@pytest.mark.parametrize("length", [1 << 31, (1 << 32) - 1, 97, 61])
def test_a_length_that_reaches_beyond_its_share_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="element 0 of 10"):
        split_prefixed(np.frombuffer(struct.pack("<I", length) + bytes(96), np.uint8), 10)
