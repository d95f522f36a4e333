"""String keys that share a hash: both answered right, as loaded and with deltas, in every version, after any end."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tierstore
from tests.collisions import family, pair
from tests.counts import few_or_many
from tests.engine import scenes
from tierstore.errors import SnapshotError, StorageError
from tierstore.tiers.disk.sst import write_sst

A, B = pair(0)
C, D = pair(1)
ALIKE = family(4)
PLAIN = [f"plain-{i}" for i in range(300)]
WORDS = {text: float(i) for i, text in enumerate([A, *ALIKE[:3], *PLAIN, B])}
TAGS = {text: 500.0 + i for i, text in enumerate([C, *PLAIN[:40], D])}
DIM = {"word": 4, "tag": 2}

Values = Mapping[str, float | None]


def vectors(table: str, values: Iterable[float | None]) -> np.ndarray:
    column = np.array([0.0 if value is None else value for value in values], np.float32)
    return np.repeat(column[:, None], DIM[table], axis=1)


def snapshot(
    root: Path,
    version: int = 1,
    *,
    delta_seq: int = 0,
    words: Values = WORDS,
    tags: Values = TAGS,
    format: str = "arrow",
) -> Path:
    """Tables `word` and `tag` with string keys, in shards of 90 rows; `word` is also read in bags, with a padding key that collides."""
    where = root / f"snapshot-{version}"
    with tierstore.SnapshotWriter(where, model="ctr", version=version, delta_seq=delta_seq) as writer:
        for name, values in (("word", words), ("tag", tags)):
            table = writer.table(
                name,
                dim=DIM[name],
                dtype="float32",
                key="string",
                rows_per_shard=90,
                format=format,
                default=[-1.0] * DIM[name],
            )
            table.write(list(values), vectors(name, values.values()))
            writer.feature(name, table=name)
        writer.feature("bag", table="word", combiner="sum", padding_key=B)
    return where


def delta(seq: int, words: Values = {}, tags: Values = {}, **options: Any) -> bytes:  # noqa: B006
    """Upserts, and deletes where the value is None."""
    buffer = io.BytesIO()
    with tierstore.DeltaWriter(buffer, model="ctr", seq=seq, event_time=datetime.now(UTC), **options) as writer:
        for name, values in (("word", words), ("tag", tags)):
            if kept := [text for text, value in values.items() if value is not None]:
                writer.upsert(name, kept, vectors(name, [values[text] for text in kept]))
            if gone := [text for text, value in values.items() if value is None]:
                writer.delete(name, gone)
    return buffer.getvalue()


def check(store: tierstore.Store, words: Values = {}, tags: Values = {}, **options: Any) -> None:  # noqa: B006
    """Every key of the snapshots' has the value that is given here, or that of its snapshot."""
    for name, values in (("word", {**WORDS, **words}), ("tag", {**TAGS, **tags})):
        rows, found = store.model("ctr").lookup(name, list(values), return_found=True, **options)
        assert found.tolist() == [value is not None for value in values.values()]
        wanted = [-1.0 if value is None else value for value in values.values()]
        np.testing.assert_array_equal(rows, vectors(name, wanted))


def colliding(store: tierstore.Store) -> dict[str, int]:
    tables = store.status()["models"]["ctr"]["tables"]
    return {name: entry["colliding_keys"] for name, entry in tables.items()}


def folded(store: tierstore.Store) -> None:
    scenes.eventually(lambda: store.status()["models"]["ctr"]["overlays"] == 0, "everything is folded")


# --- as loaded


@pytest.mark.parametrize(("base", "format"), [("sealed", "arrow"), ("rocksdb", "parquet"), ("sealed", "parquet")])
def test_keys_that_collide_are_loaded_and_answered(
    open_store: Callable[..., tierstore.Store], tmp_path: Path, base: str, format: str
) -> None:
    store = open_store(base=base)
    store.load_snapshot(snapshot(tmp_path, format=format))
    assert colliding(store) == {"word": 5, "tag": 2}
    for _ in range(2):  # from disk, and from memory
        check(store)
    ctr = store.model("ctr")
    assert not ctr.lookup("word", [ALIKE[3], "nobody", C], return_found=True)[1].any(), "one that was never there"
    for keys in (np.array([A, B, "nobody"], object), pa.array([A, B, "nobody"]), [A.encode(), B.encode(), b"nobody"]):
        assert ctr.lookup("word", keys)[:, 0].tolist() == [WORDS[A], WORDS[B], -1.0]
    assert store.verify().ok
    store.close()
    store = open_store()
    assert colliding(store) == {"word": 5, "tag": 2}
    check(store)


def test_a_padding_key_is_told_from_the_key_that_it_collides_with(store: tierstore.Store, tmp_path: Path) -> None:
    store.load_snapshot(snapshot(tmp_path))
    ctr = store.model("ctr")
    keys = [A, ALIKE[1], B, PLAIN[0], B, "nobody"]
    expected = [WORDS[A] + WORDS[ALIKE[1]], WORDS[PLAIN[0]] - 1.0]
    assert ctr.lookup_bags("bag", keys, [0, 3])[:, 0].tolist() == expected
    store.apply_delta(delta(1, {A: 70.0, B: 80.0}))
    assert ctr.lookup_bags("bag", keys, [0, 3])[:, 0].tolist() == [70.0 + WORDS[ALIKE[1]], expected[1]]


def test_a_key_that_is_given_twice_is_refused_all_the_same(store: tierstore.Store, tmp_path: Path) -> None:
    where = tmp_path / "twice"
    with tierstore.SnapshotWriter(where, model="ctr", version=1) as writer:
        keys = [A, B, *PLAIN, A]
        writer.table("word", dim=1, key="string").write(keys, np.zeros((len(keys), 1), np.float32))
        writer.feature("word", table="word")
    with pytest.raises(SnapshotError, match=r"duplicate key 'key-5': it is also in .*, row 0"):
        store.load_snapshot(where)


# --- deltas


def test_deltas_change_either_key_and_a_restart_finds_it_so(
    open_store: Callable[..., tierstore.Store], tmp_path: Path
) -> None:
    store = open_store(fold_grace_s=60.0)
    store.load_snapshot(snapshot(tmp_path))
    words: dict[str, float | None] = {}
    tags: dict[str, float | None] = {}
    for seq, (more_words, more_tags) in enumerate(
        [
            ({A: 71.0}, {}),
            ({B: None, PLAIN[0]: 72.0}, {D: 73.0}),
            ({ALIKE[1]: 74.0, ALIKE[2]: None}, {C: None, D: 75.0}),
            ({B: 76.0, A: None}, {}),
            ({ALIKE[3]: 77.0}, {}),  # new, and its hash is known to be shared
            ({C: 78.0, D: 79.0}, {A: 80.0, B: None}),  # pairs that this delta shows to collide
            ({D: None}, {A: 81.0}),
        ],
        1,
    ):
        store.apply_delta(delta(seq, more_words, more_tags))
        words |= more_words
        tags |= more_tags
        check(store, words, tags)
    known = {"word": 8, "tag": 4}
    assert colliding(store) == known
    store.close()
    store = open_store(fold_grace_s=60.0)  # what was in memory comes from the log
    assert colliding(store) == known
    check(store, words, tags)
    store.close()
    store = open_store()
    store.apply_delta(delta(8, {C: 82.0, PLAIN[1]: None}, {B: 83.0}))
    words |= {C: 82.0, PLAIN[1]: None}
    tags |= {B: 83.0}
    folded(store)
    assert colliding(store) == known
    check(store, words, tags)
    assert store.verify().ok
    store.close()
    check(open_store(), words, tags)


def test_a_request_under_way_goes_on_as_before_the_delta(store: tierstore.Store, tmp_path: Path) -> None:
    """The view from before it has the row of C under its hash; the next one has not."""
    store.load_snapshot(snapshot(tmp_path, words={**WORDS, C: 7.0}))
    with store.model("ctr").view() as before:
        store.apply_delta(delta(1, {C: 8.0, D: 9.0}))
        assert before.lookup("word", [C])[:, 0].tolist() == [7.0]
        assert store.model("ctr").lookup("word", [C, D])[:, 0].tolist() == [8.0, 9.0]
    folded(store)
    assert store.model("ctr").lookup("word", [C, D])[:, 0].tolist() == [8.0, 9.0]


def test_a_fold_that_fails_is_made_again(
    open_store: Callable[..., tierstore.Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store.load_snapshot(snapshot(tmp_path))
    version = store.model("ctr").served.active.open_version  # type: ignore[union-attr]

    def refuse(self: Any, parts: Any) -> None:
        raise StorageError("injected failure")

    with monkeypatch.context() as patch:
        patch.setattr("tierstore.tiers.disk.tier.DiskTier.ingest", refuse)
        store.apply_delta(delta(1, {C: 78.0, D: 79.0, A: None}))
        scenes.eventually(lambda: "injected" in (store.model("ctr").problem or ""), "a fold has failed")
        assert version.colliding["word"].entries() != []
        assert len(version.colliding["word"]) == 5
        check(store, {C: 78.0, D: 79.0, A: None})
    store.close()
    store = open_store()
    check(store, {C: 78.0, D: 79.0, A: None})
    assert colliding(store)["word"] == 7


# --- versions


def test_a_rollback_to_a_delta_brings_them_back_as_they_were(
    open_store: Callable[..., tierstore.Store], tmp_path: Path
) -> None:
    store = open_store()
    store.load_snapshot(snapshot(tmp_path))
    loaded = colliding(store)
    store.apply_delta(delta(1, {A: 3.0, B: 4.0}))
    store.apply_delta(delta(2, {A: None, ALIKE[2]: 5.0, ALIKE[3]: 6.0, "plain-1": None}))
    folded(store)
    assert colliding(store)["word"] > loaded["word"]
    store.rollback("ctr", to_seq=1)
    check(store, {A: 3.0, B: 4.0})
    store.rollback("ctr", to_seq=0)
    check(store)
    assert colliding(store) == loaded
    store.close()
    store = open_store()
    check(store)
    store.rollback("ctr", to_seq=2)
    check(store, {A: None, B: 4.0, ALIKE[2]: 5.0, ALIKE[3]: 6.0, "plain-1": None})


def test_each_version_has_its_own(open_store: Callable[..., tierstore.Store], tmp_path: Path) -> None:
    """Version 2 has one key of each pair less, and another pair; one log serves both, and going back loses nothing."""
    store = open_store()
    store.load_snapshot(snapshot(tmp_path, 1))
    store.apply_delta(delta(1, {A: 71.0, C: 72.0}))
    newer = {text: value for text, value in WORDS.items() if text != A} | {C: 1.0, D: 2.0}
    store.load_snapshot(snapshot(tmp_path, 2, words=newer, tags={C: 5.0, PLAIN[0]: 6.0}))
    ctr = store.model("ctr")
    assert colliding(store) == {"word": 5, "tag": 0}
    keys = [B, ALIKE[0], ALIKE[2], C, D, PLAIN[7]]
    assert ctr.lookup("word", keys)[:, 0].tolist() == [71.0, 1.0, 3.0, 72.0, 2.0, WORDS[PLAIN[7]]], (
        "A is taken for B here"
    )
    store.apply_delta(delta(2, {A: 73.0, B: 74.0}, {C: 75.0, D: None}))  # from here on they are known apart
    keys = [A, *keys]
    assert ctr.lookup("word", keys)[:, 0].tolist() == [73.0, 74.0, 1.0, 3.0, 72.0, 2.0, WORDS[PLAIN[7]]]
    assert colliding(store) == {"word": 7, "tag": 2}
    store.rollback("ctr")
    check(store, {A: 73.0, B: 74.0, C: 72.0}, {C: 75.0, D: None})
    store.canary("ctr", 2, 0.5)
    store.apply_delta(delta(3, {A: None, D: 76.0, C: 77.0}))
    for version in (1, 2):
        rows, found = ctr.lookup("word", [A, B, C, D], version=version, return_found=True)
        assert found.tolist() == [False, True, True, True]
        assert rows[1:, 0].tolist() == [74.0, 77.0, 76.0]
    store.close()
    store = open_store()
    for version in (1, 2):
        rows, found = store.model("ctr").lookup("word", [A, B, C, D], version=version, return_found=True)
        assert found.tolist() == [False, True, True, True]
        assert rows[1:, 0].tolist() == [74.0, 77.0, 76.0]
    check(store, {A: None, B: 74.0, C: 77.0, D: 76.0}, {C: 75.0, D: None}, version=1)


OPERATIONS = st.lists(
    st.dictionaries(st.sampled_from([A, B, *ALIKE, *PLAIN[:3]]), st.none() | st.integers(0, 9), min_size=1)
    | st.sampled_from(["fold", "reopen", "rollback", "activate", "load"]),
    min_size=3,
    max_size=9,
)


@settings(max_examples=few_or_many(3, 10))
@given(OPERATIONS)
def test_any_deltas_over_versions_and_restarts_are_as_a_dict(
    tmp_path_factory: pytest.TempPathFactory, operations: list[Any]
) -> None:
    root = tmp_path_factory.mktemp("store")
    options: dict[str, Any] = {
        "host_budget": "4MiB", "load_workers": 1, "disk_threads": 2, "fold_grace_s": 0.0, "keep_versions": 10
    }  # fmt: skip
    words: dict[str, float | None] = dict.fromkeys([A, B, *ALIKE[:2], *PLAIN[:3]], 1.0)
    store = tierstore.open(root / "data", **options)
    versions, seq = [1], 0
    try:
        store.load_snapshot(snapshot(root, 1, words=words))
        for operation in operations:
            if isinstance(operation, dict):
                seq += 1
                store.apply_delta(delta(seq, operation))
                words |= operation
            elif operation == "fold":
                folded(store)
            elif operation == "reopen":
                store.close()
                store = tierstore.open(root / "data", **options)
            elif operation == "load":  # as if exported now, so that the log brings nothing, or as an old one
                versions.append(versions[-1] + 1)
                now = {text: value for text, value in words.items() if value is not None} | {A: 0.0, B: 0.0, "x": 1.0}
                now |= dict.fromkeys(ALIKE, 0.0)
                store.load_snapshot(snapshot(root, versions[-1], delta_seq=seq, words=now))
                seq += 1  # what it has too much of is put right
                store.apply_delta(delta(seq, {text: words.get(text) for text in [A, B, *ALIKE]}))
            elif operation == "activate":
                store.activate("ctr", versions[-1])
            elif store.model("ctr").active_version != versions[0]:
                store.rollback("ctr")
            rows, found = store.model("ctr").lookup("word", list(words), return_found=True)
            assert (
                dict(zip(words, [float(r) if f else None for r, f in zip(rows[:, 0], found, strict=True)], strict=True))
                == words
            )
        assert store.verify().ok
    finally:
        store.close()


# --- how it may end


@pytest.mark.thorough
@pytest.mark.parametrize("grace_s", [0.0, 60.0])
def test_what_was_acknowledged_before_a_kill_is_there(
    open_store: Callable[..., tierstore.Store], tmp_path: Path, grace_s: float
) -> None:
    program = f"""
        import os, signal
        from pathlib import Path
        import tierstore
        from tests.engine.test_colliding import *

        root = Path({str(tmp_path)!r})
        store = tierstore.open(root / "data", host_budget="4MiB", load_workers=1, fold_grace_s={grace_s})
        store.load_snapshot(snapshot(root))
        store.apply_delta(delta(1, {{A: 71.0, C: 72.0, D: 73.0}}, {{D: None}}))
        if not {grace_s}:
            folded(store)
        store.apply_delta(delta(2, {{ALIKE[3]: 74.0, D: None}}))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    where = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=where, env=os.environ | {"PYTHONPATH": str(where)}, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL
    store = open_store()
    check(store, {A: 71.0, C: 72.0, D: None, ALIKE[3]: 74.0}, {D: None})
    assert colliding(store) == {"word": 8, "tag": 2}
    store.apply_delta(delta(3, {D: 75.0}))
    check(store, {A: 71.0, C: 72.0, D: 75.0, ALIKE[3]: 74.0}, {D: None})


def test_a_record_that_makes_no_sense_is_named_and_not_served(
    open_store: Callable[..., tierstore.Store], tmp_path: Path
) -> None:
    store = open_store()
    for version in (1, 2):
        store.load_snapshot(snapshot(tmp_path, version))
    nonsense = write_sst(tmp_path / "bad.sst", records={"colliding_keys": b'{"word": 5}'}, delta=True)
    store.model("ctr").served.active.open_version.disk.ingest([nonsense])  # type: ignore[union-attr]
    store.close()
    store = open_store()
    assert "version 2: " in store.model("ctr").problem  # type: ignore[operator]
    assert "'colliding_keys' cannot be read" in store.model("ctr").problem  # type: ignore[operator]
    assert any("colliding_keys" in problem for problem in store.verify().problems)
    store.activate("ctr", 1)
    check(store)


def test_a_record_that_the_disk_has_damaged_is_not_believed(
    open_store: Callable[..., tierstore.Store], tmp_path: Path
) -> None:
    store = open_store()
    store.load_snapshot(snapshot(tmp_path))
    store.close()
    damaged = 0
    for path in (tmp_path / "data/models/ctr/1/db").glob("*.sst"):
        data = bytearray(path.read_bytes())
        at = data.find(B[1:].encode("unicode_escape")[:4])  # within the record, which is in JSON
        at = data.find(b"key-5") if at < 0 else at
        if at >= 0:
            data[at] ^= 1
            path.write_bytes(data)
            damaged += 1
    assert damaged
    store = open_store()
    assert not store.model("ctr").ready
    assert "data/models/ctr/1/db" in store.model("ctr").problem  # type: ignore[operator]
    assert any("checksum" in problem for problem in store.verify().problems)
