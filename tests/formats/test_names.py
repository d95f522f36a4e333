"""Names on disk are made and recognised by the same rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import InvalidInput
from tierstore.formats import names
from tierstore.formats.names import MAX_ORDINAL, DataDirectory

ORDINALS = st.integers(0, MAX_ORDINAL)


@given(ORDINALS, st.integers(0, (1 << 64) - 1))
def test_log_entries_are_read_back(seq: int, digest: int) -> None:
    name = names.format_log_entry(seq, f"{digest:016x}")
    assert len(name) == 20 + 1 + 16 + len(".arrow")
    assert names.parse_log_entry(name) == (seq, f"{digest:016x}")


@given(ORDINALS, ORDINALS)
def test_log_entries_sort_by_seq(a: int, b: int) -> None:
    entries = [names.format_log_entry(seq, "0" * 16) for seq in (a, b)]
    assert (entries[0] < entries[1]) == (a < b)


@given(ORDINALS)
def test_delta_files_and_versions_are_read_back(number: int) -> None:
    assert names.parse_delta_file(f"{number}.arrow") == number
    if number:
        assert names.parse_version(names.format_version(number)) == number


@pytest.mark.parametrize(
    "name", ["", "0", "01", "-1", "1.0", "x", "٣", str(MAX_ORDINAL + 1), "9" * 40, "1\n", ".tmp-1"]
)
def test_what_is_no_version_is_not_taken_for_one(name: str) -> None:
    assert names.parse_version(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "1-0123456789abcdef.arrow",
        f"{5:020d}.arrow",
        f"{5:020d}-0123456789ABCDEF.arrow",
        "state.json",
        "9" * 20 + "-" + "0" * 16 + ".arrow",
    ],
)
def test_what_is_no_log_entry_is_not_taken_for_one(name: str) -> None:
    assert names.parse_log_entry(name) is None


def test_watched_files_may_be_padded_but_not_temporary() -> None:
    assert names.parse_delta_file("000041821.arrow") == 41821
    assert names.parse_delta_file(".tmp-41821.arrow") is None
    assert names.parse_delta_file("41821.arrow.part") is None
    assert names.parse_delta_file("x.arrow") is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: names.format_version(0),
        lambda: names.format_version(1 << 63),
        lambda: names.format_log_entry(1, "xyz"),
    ],
)
def test_numbers_out_of_range_get_no_name(call: object) -> None:
    with pytest.raises(ValueError, match=r"range|named"):
        call()  # type: ignore[operator]


def test_layout_of_a_data_directory(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path)
    ctr = data.model("ctr")
    version = ctr.version(7)
    assert data.lock == tmp_path / "LOCK"
    assert ctr.state == tmp_path / "models/ctr/state.json"
    assert version.record == tmp_path / "models/ctr/7/version.json"
    assert version.db == tmp_path / "models/ctr/7/db"
    assert version.dense() == tmp_path / "models/ctr/7/dense.onnx"
    assert version.build == tmp_path / "models/ctr/7/build"
    assert version.warmup("item") == tmp_path / "models/ctr/7/warmup/item.npy"
    assert version.hot("item") == tmp_path / "models/ctr/7/hot/item.npy"


@pytest.mark.parametrize("name", ["..", "a/b", "", ".hidden", "a b", "x" * 65, "é"])
def test_a_name_that_is_no_path_part_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="not allowed"):
        DataDirectory(tmp_path).model(name)
    with pytest.raises(InvalidInput, match="not allowed"):
        DataDirectory(tmp_path).model("ctr").version(1).hot(name)


def test_listings_see_only_what_is_ours(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path)
    assert data.models_on_disk() == []
    ctr = data.model("ctr")
    assert ctr.versions_on_disk() == []
    assert ctr.log_on_disk() == []
    for name in ("10", "9", "9.2", "9.0", "9.02", "8.1", "8.1.1", ".trash-8-00", "log", "007"):
        (ctr.root / name).mkdir(parents=True)
    (ctr.root / "11").touch()
    for name in (names.format_log_entry(12, "f" * 16), names.format_log_entry(2, "0" * 16), "state.json", ".tmp-x"):
        (ctr.log / name).touch()
    (data.models / ".trash-old").mkdir()
    assert data.models_on_disk() == ["ctr"]
    assert ctr.versions_on_disk() == [(8, 1), (9, 0), (9, 2), (10, 0)]
    assert [ctr.version(*each).root.name for each in ctr.versions_on_disk()] == ["8.1", "9", "9.2", "10"]
    assert [(seq, digest) for seq, digest, _ in ctr.log_on_disk()] == [(2, "0" * 16), (12, "f" * 16)]
    assert all(path.is_file() for _, _, path in ctr.log_on_disk())
