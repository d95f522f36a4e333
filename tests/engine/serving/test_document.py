"""A model's document: published whole or not at all, and no byte of it can be changed unseen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.test_faults import PowerCut
from tests.formats.disks import FailingDisk
from tierstore.engine.serving.document import SavedRoutes, StateDocument, read_document
from tierstore.engine.serving.order import ServingOrder
from tierstore.engine.serving.state_file import StateFile
from tierstore.engine.serving.undone import Undone
from tierstore.errors import Corruption, StorageError, TierstoreError
from tierstore.formats import files
from tierstore.formats.names import ModelDirectory

BEFORE = StateDocument(
    versions=(1, 2),
    routes=SavedRoutes(2, 1, 0.25, {"best": 2}),
    order=ServingOrder(((3, "rollback"), (1, "replaced"))),
    undone=Undone().as_of(4, 9).with_line(2, 1),
    log_start=3,
    loads={4: "0123456789abcdef0123456789abcdef"},
    accepted={1: 7},
)
AFTER = replace(BEFORE, routes=SavedRoutes(1), log_start=5, loads={})


@pytest.fixture
def where(tmp_path: Path) -> ModelDirectory:
    where = ModelDirectory(tmp_path / "ctr")
    files.make_dir(where.log)
    StateFile(where, "ctr").publish(BEFORE)
    return where


def test_it_is_read_as_it_was_published_and_counts_its_publications(where: ModelDirectory) -> None:
    assert read_document(where, "ctr") == replace(BEFORE, serial=1)
    state_file = StateFile(where, "ctr")
    state_file.publish(AFTER)
    state_file.publish(replace(AFTER, versions=(1, 2, 3)))  # which means the same
    assert read_document(where, "ctr") == replace(AFTER, serial=2)
    state_file.check()


def test_what_is_amended_comes_to_disk_with_the_next_publication(where: ModelDirectory) -> None:
    state_file = StateFile(where, "ctr")
    state_file.amend(state_file.document.without_version(1))
    assert 1 in read_document(where, "ctr").order
    state_file.publish(state_file.document)
    assert read_document(where, "ctr").order == ServingOrder(((3, "rollback"),))
    assert read_document(where, "ctr").accepted == {}


@pytest.mark.parametrize("n", range(8))
def test_a_failed_publication_leaves_the_one_before(where: ModelDirectory, n: int) -> None:
    state_file = StateFile(where, "ctr")
    with files.use(disk := FailingDisk(n)):
        try:
            state_file.publish(AFTER)
        except StorageError:
            assert state_file.document == replace(BEFORE, serial=1)
        else:
            assert disk.operations <= n
    state_file.repair()
    assert read_document(where, "ctr").means_the_same(state_file.document)
    state_file.publish(AFTER)
    assert read_document(where, "ctr").means_the_same(AFTER)
    assert read_document(where, "ctr").serial == state_file.document.serial


def test_a_document_that_cannot_be_put_back_is_in_doubt_until_it_can(where: ModelDirectory) -> None:
    class After(files.FileSystem):
        """Fails once the document has its name, and from then on."""

        failed = False

        def rename(self, old: Path, new: Path) -> None:
            if self.failed:
                raise OSError(28, "injected failure")
            super().rename(old, new)

        def fsync_dir(self, path: Path) -> None:
            self.failed = True
            raise OSError(28, "injected failure")

    state_file = StateFile(where, "ctr")
    with files.use(After()):
        with pytest.raises(StorageError):
            state_file.publish(AFTER)
        assert state_file.in_doubt
        with pytest.raises(StorageError):
            state_file.publish(replace(AFTER, log_start=6))
    assert read_document(where, "ctr").means_the_same(AFTER), "the failed one has the name"
    assert state_file.document == replace(BEFORE, serial=1)
    state_file.repair()
    assert not state_file.in_doubt
    assert read_document(where, "ctr").means_the_same(BEFORE)


@pytest.mark.parametrize("n", range(8))
def test_wherever_power_goes_it_is_the_one_before_or_the_next(where: ModelDirectory, tmp_path: Path, n: int) -> None:
    disk, done = PowerCut(n, tmp_path / "keep"), True
    state_file = StateFile(where, "ctr")
    with files.use(disk):
        try:
            state_file.publish(AFTER)
        except TierstoreError:
            done = False
    disk.apply(where.root)
    found = read_document(where, "ctr")
    assert found.means_the_same(AFTER) or (not done and found.means_the_same(BEFORE))


def test_no_byte_of_it_can_be_changed_unseen_nor_can_it_be_cut_short(where: ModelDirectory) -> None:
    whole = where.state.read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            where.state.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with pytest.raises(Corruption):
                read_document(where, "ctr")
        where.state.write_bytes(whole[:at])
        with pytest.raises(Corruption):
            read_document(where, "ctr")


def test_beside_versions_or_deltas_a_missing_one_is_no_new_model(where: ModelDirectory) -> None:
    where.state.unlink()
    assert StateFile(where, "ctr").unreadable is None
    for beside in (where.version(2, 1).root, where.log_entry(4, "0" * 16), where.log_end):
        beside.mkdir() if beside == where.version(2, 1).root else beside.write_bytes(b"")
        state_file = StateFile(where, "ctr")
        assert "state.json is missing, beside" in str(state_file.unreadable)
        with pytest.raises(Corruption, match="restore the model from a backup"):
            state_file.publish(AFTER)
        assert not where.state.exists()
        beside.rmdir() if beside.is_dir() else beside.unlink()


def test_a_document_that_was_mended_by_hand_without_its_checksum_is_read(where: ModelDirectory) -> None:
    document = json.loads(where.state.read_text())
    del document["xxh3"]
    where.state.write_text(json.dumps(document | {"active": 1, "canary": None, "labels": {}}))
    assert read_document(where, "ctr").routes == SavedRoutes(1)


@pytest.mark.parametrize(
    "change",
    [
        {"active": "two"}, {"active": -1}, {"canary": {"version": 1, "share": 2}}, {"canary": 3}, {"labels": {"7": 1}}, {"labels": None},
        {"left": [[1, "eaten"]]}, {"undone": {}}, {"log_start": 0.5}, {"loads": []}, {"dense_accepted": {"x": 1}}, {"model": "other"},
        {"serial": None}, {"versions": ["a"]},
    ],
)  # fmt: skip
def test_a_field_that_makes_no_sense_is_named(where: ModelDirectory, change: dict[str, object]) -> None:
    files.publish_record(where.state, json.loads(where.state.read_text()) | change)
    with pytest.raises(Corruption, match=r"state\.json"):
        read_document(where, "ctr")


def test_of_a_node_that_follows_others_it_is_in_memory_alone(tmp_path: Path) -> None:
    where = ModelDirectory(tmp_path / "ctr")
    files.make_dir(where.version(2).root)
    state_file = StateFile(where, "ctr", durable=False)
    state_file.publish(AFTER)
    assert state_file.document.means_the_same(AFTER)
    state_file.check()
    assert not where.state.exists()
