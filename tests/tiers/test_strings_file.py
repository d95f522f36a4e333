"""Files of strings: what is written is read back, found by hash, and never mistaken for something else."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counts import few_or_many
from tierstore.errors import Corruption
from tierstore.tiers.disk.strings_file import (
    OpenStrings,
    StringsFile,
    finished,
    merged_strings,
    sorted_strings,
    write_ascending,
)

MANY = [f"user-{i}" for i in range(20_000)] + ["", "é", "x" * 70_000, "y" * 200_000, "日本"]


def digest(text: str) -> int:
    return int(np.uint64(xxhash.xxh3_64_intdigest(text.encode())).view(np.int64))


def written(path: Path, texts: list[str]) -> StringsFile:
    hashes = np.array([digest(text) for text in texts], np.int64)
    return write_ascending(path, sorted_strings(hashes, pa.array(texts, pa.large_string())))


def read(path: Path, file: StringsFile) -> list[str]:
    with OpenStrings(path, file) as opened:
        blocks = list(opened.all())
    for hashes, strings in blocks:
        assert hashes.tolist() == [digest(text) for text in strings.to_pylist()]
    return [text for _, strings in blocks for text in strings.to_pylist()]


def test_strings_are_read_in_the_order_of_their_hashes_and_found(tmp_path):
    path = tmp_path / "a.strings"
    file = written(path, MANY)
    assert (file.strings, file.bytes) == (len(MANY), path.stat().st_size)
    assert read(path, file) == sorted(MANY, key=digest)
    wanted = ["", "x" * 70_000, "y" * 200_000, "user-0", "user-19999", "nobody", "no one"]
    with OpenStrings(path, file) as opened:
        assert opened.find(np.array(sorted(map(digest, wanted)), np.int64)) == {
            digest(text): text for text in wanted[:5]
        }
        assert opened.find(np.array([-(2**63), 2**63 - 1])) == {}


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=40, unique=True))
@settings(max_examples=few_or_many(30, 300))
def test_any_strings_are_read_back(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("strings") / "a.strings"
    assert read(path, written(path, texts)) == sorted(texts, key=digest)


def test_a_slice_of_an_array_is_written_as_itself(tmp_path):
    strings = pa.array(["before", "a", "bc", "", "after"], pa.large_string()).slice(1, 3)
    hashes = np.array([digest(text) for text in strings.to_pylist()], np.int64)
    file = write_ascending(tmp_path / "a.strings", sorted_strings(hashes, strings))
    assert sorted(read(tmp_path / "a.strings", file)) == ["", "a", "bc"]


def test_a_file_says_what_it_is(tmp_path):
    path = tmp_path / "a.strings"
    assert written(path, MANY) == finished(path)
    for other in (b"", b"short", path.read_bytes()[:-1]):
        (tmp_path / "other").write_bytes(other)
        with pytest.raises(Corruption, match="other is no file of strings"):
            finished(tmp_path / "other")


def test_no_changed_byte_is_read_as_a_string(tmp_path):
    path = tmp_path / "a.strings"
    file = written(path, MANY[:300])
    whole, expected = path.read_bytes(), sorted(MANY[:300], key=digest)
    for at in range(16, len(whole), 7):  # the first bytes say what it is, to people
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with contextlib.suppress(Corruption):
            read(path, file)
            pytest.fail(f"byte {at} was changed, and nobody noticed")
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(Corruption, match=r"a\.strings"):
            read(path, file)
    path.write_bytes(whole)
    assert read(path, file) == expected
    with pytest.raises(Corruption, match="does not match its checksum"):
        read(path, StringsFile(file.name, "0" * 16, file.bytes, file.strings))


@given(st.lists(st.dictionaries(st.integers(-50, 50), st.text("abc", max_size=3), max_size=30), max_size=5), st.data())
@settings(max_examples=few_or_many(60, 600))
def test_parts_are_merged_by_code_and_the_last_of_equal_ones_counts(parts, data):
    def stream(part: dict[int, str]):
        codes = sorted(part)
        while codes:
            n = data.draw(st.integers(1, len(codes)))
            yield np.array(codes[:n], np.int64), pa.array([part[code] for code in codes[:n]], pa.large_string())
            codes = codes[n:]

    merged = [
        (code, text)
        for codes, strings in merged_strings([stream(part) for part in parts])
        for code, text in zip(codes.tolist(), strings.to_pylist(), strict=True)
    ]
    expected: dict[int, str] = {}
    for part in parts:
        expected |= part
    assert merged == sorted(expected.items())
