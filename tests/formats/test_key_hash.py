"""Row numbers of hashed keys are what the public definition says, for every kind of key."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import SnapshotError
from tierstore.formats.key_hash import rows_of
from tierstore.formats.keys import as_codes
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.types import KeyHash, KeyType, StorageDtype, TableSpec

TABLE = TableSpec("item", KeyType.INT64, 2, StorageDtype.FLOAT32)
MODS = st.integers(1, 1 << 62)
SEEDS = st.integers(0, (1 << 64) - 1)
INT64S = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=20)


def looked_up(keys: object, how: KeyHash) -> list[int]:
    rows: list[int] = rows_of(as_codes(keys, how.key), how).tolist()
    return rows


@given(INT64S, MODS, SEEDS)
def test_with_a_seed_it_is_xxh3_of_the_key_with_that_seed(keys: list[int], mod: int, seed: int) -> None:
    wanted = [xxhash.xxh3_64_intdigest(key.to_bytes(8, "little", signed=True), seed) % mod for key in keys]
    assert looked_up(keys, KeyHash(mod, seed)) == wanted
    unsigned = [key % (1 << 64) for key in keys]
    assert looked_up(unsigned, KeyHash(mod, seed, KeyType.UINT64)) == wanted


@given(INT64S, MODS)
def test_without_one_it_is_the_remainder(keys: list[int], mod: int) -> None:
    assert looked_up(keys, KeyHash(mod)) == [key % mod for key in keys]
    unsigned = [key % (1 << 64) for key in keys]
    assert looked_up(unsigned, KeyHash(mod, None, KeyType.UINT64)) == [key % mod for key in unsigned]


@given(st.lists(st.text(max_size=300), max_size=8), MODS, SEEDS)
def test_strings_go_by_their_hash(keys: list[str], mod: int, seed: int) -> None:
    hashes = [xxhash.xxh3_64_intdigest(key.encode()) for key in keys]
    assert looked_up(keys, KeyHash(mod, None, KeyType.STRING)) == [of % mod for of in hashes]
    wanted = [xxhash.xxh3_64_intdigest(of.to_bytes(8, "little"), seed) % mod for of in hashes]
    assert looked_up(keys, KeyHash(mod, seed, KeyType.STRING)) == wanted


def test_rows_are_spread() -> None:
    rows = rows_of(as_codes(np.arange(100_000), KeyType.INT64), KeyHash(1000, 7))
    counts = np.bincount(rows, minlength=1000)
    assert len(counts) == 1000
    assert 50 < counts.min() < counts.max() < 160
    assert (rows != rows_of(np.arange(100_000), KeyHash(1000, 8))).mean() > 0.99


def manifest(how: object, key: str = "int64") -> Manifest:
    table = {"name": "item", "key": key, "dim": 2, "dtype": "float32", "rows": 0, "shards": ()}
    feature = {"name": "f", "table": "item", "hash": how}
    return Manifest.create(model="m", version=1, tables=(table,), features=(feature,))


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"mod": 0}, "mod"),
        ({"mod": (1 << 62) + 1}, "mod"),
        ({"mod": 2.5}, "mod"),
        ({}, "mod"),
        ({"mod": 5, "seed": -1}, "seed"),
        ({"mod": 5, "seed": 1 << 64}, "seed"),
        ({"mod": 5, "seed": "7"}, "seed"),
        ({"mod": 5, "key": "int32"}, "key"),
        ({"mod": 5, "salt": 1}, "salt"),
    ],
)
def test_a_hash_that_is_none_is_refused_by_its_field(how: object, field: str) -> None:
    with pytest.raises(SnapshotError, match=rf"features\[0\]\.hash\.{field}"):
        manifest(how)


def test_a_table_of_string_keys_has_no_row_numbers() -> None:
    with pytest.raises(SnapshotError, match=r"features\[0\]\.hash: expected a table whose keys are integers"):
        manifest({"mod": 5}, key="string")


def test_a_manifest_keeps_it() -> None:
    for how in ({"mod": 5}, {"mod": 5, "seed": (1 << 64) - 1, "key": "string"}):
        again = Manifest.parse(__import__("json").dumps(manifest(how).to_document()))
        assert again == manifest(how)
        spec = again.feature_specs()["f"].hash
        assert spec == KeyHash(5, how.get("seed"), KeyType(how.get("key", "int64")))
