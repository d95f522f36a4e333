"""The code of a string is XXH3-64 as the reference library computes it."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tierstore.kernels.xxh3 import hash_strings


def lay_out(strings: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.zeros(len(strings) + 1, np.int64)
    np.cumsum([len(s) for s in strings], out=offsets[1:])
    return np.frombuffer(b"".join(strings), np.uint8), offsets


def twin(strings: list[bytes]) -> np.ndarray:
    return np.array([xxhash.xxh3_64_intdigest(s) for s in strings], np.uint64).view(np.int64)


@pytest.mark.parametrize("content", ["random", "zeros", "ones"])
def test_every_length_to_beyond_a_block(content: str) -> None:
    noise = np.random.default_rng(7).integers(0, 256, 5000, np.uint8)
    source = {"random": noise, "zeros": np.zeros_like(noise), "ones": np.full_like(noise, 255)}[content].tobytes()
    # block and stripe ends come again at 1024 and 64 bytes
    lengths = [*range(1101), *range(2040, 2060), 2112, 2113, 3072, 3073, 4096, 4097, 5000]
    strings = [source[len(source) - n :] for n in lengths]
    assert np.array_equal(hash_strings(*lay_out(strings)), twin(strings))


@given(st.lists(st.binary(max_size=40) | st.binary(max_size=1500) | st.text().map(str.encode), max_size=20))
def test_many_strings_at_once(strings: list[bytes]) -> None:
    data, offsets = lay_out(strings)
    assert np.array_equal(hash_strings(data, offsets), twin(strings))
    assert np.array_equal(hash_strings(data, offsets.astype(np.int32)), twin(strings))


def test_strings_may_start_anywhere_in_the_data() -> None:
    data = np.frombuffer(b"--item:1item:22--", np.uint8)
    assert np.array_equal(hash_strings(data, np.array([2, 8, 15])), twin([b"item:1", b"item:22"]))
    every_other = np.repeat(data, 2)[::2]
    assert np.array_equal(hash_strings(every_other, np.array([2, 8, 15])), twin([b"item:1", b"item:22"]))


def test_known_digests() -> None:
    # the published values for the empty input and for one zero byte
    hashes = hash_strings(np.zeros(1, np.uint8), np.array([0, 0, 1])).view(np.uint64)
    assert [f"{h:016x}" for h in hashes] == ["2d06800538d394c2", "c44bdff4074eecdb"]


@pytest.mark.parametrize("offsets", [[0, 4], [-1, 2], [0, 2, 1], [4, 4]])
def test_a_string_outside_of_the_data_is_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="lies within 3 bytes"):
        hash_strings(np.zeros(3, np.uint8), np.array(offsets))


def test_arrays_of_the_wrong_form_are_refused() -> None:
    with pytest.raises(ValueError, match="offsets"):
        hash_strings(np.zeros(3, np.uint8), np.empty(0, np.int64))
    with pytest.raises(ValueError, match="offsets"):
        hash_strings(np.zeros(3, np.uint8), np.zeros(2))
    with pytest.raises(ValueError, match="data"):
        hash_strings(np.zeros(3, np.int8), np.zeros(2, np.int64))
