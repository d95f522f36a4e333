"""Object storage: paths of what was listed, and reading in ranges, from a server of the S3 protocol that also fails."""

from __future__ import annotations

import io
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierstore.errors import MissingExtra, SnapshotError, StorageError
from tierstore.formats import objects, patience, ranges
from tierstore.formats.objects import ObjectPath, is_inside, is_url, revision_of
from tierstore.formats.regular import open_regular, read_regular

pytest.importorskip("obstore", reason="the extra s3 is not installed")
pytest.importorskip("moto.server", reason="moto's server is not installed")

from tests.formats.object_server import Fault, ObjectServer, cut_off, object_server, refused, slow, unavailable

CONTENT = random.Random(7).randbytes(300_001)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with object_server() as running:
        running.put_bytes("a/snapshot.json", b"{}")
        running.put_bytes("a/big", CONTENT)
        running.put_bytes("a/folder/part", b"p")
        running.put_bytes("ab", b"a neighbour of the same beginning")
        yield running


@pytest.fixture(autouse=True)
def _small(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ranges, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(patience, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(patience, "_LONGEST_PAUSE_S", 0.05)
    yield
    server.faults.clear()
    until_s = time.monotonic() + 30
    while any(thread.name.startswith("tierstore-ranges") for thread in threading.enumerate()):
        assert time.monotonic() < until_s, "a range that nobody waits for is still on its way"
        time.sleep(0.005)
    server.ranges.clear()


@pytest.fixture
def root(server: ObjectServer) -> ObjectPath:
    return ObjectPath.listed("s3://models/a")


def test_paths_are_those_of_the_objects_below(root: ObjectPath) -> None:
    assert root.is_dir()
    assert not root.is_file()
    assert sorted(root.names_below()) == ["big", "folder/part", "snapshot.json"]
    assert (root / "folder").is_dir()
    assert (root / "folder").names_below() == ["part"]
    assert (root / "folder/part").is_file()
    assert (root / "folder" / "part").parent == root / "folder"
    assert (root / "folder" / ".." / "big").is_file()
    assert not (root / "nothing").exists()
    assert str(root / "big") == "s3://models/a/big"
    assert (root / "big").name == "big"
    assert root.name == "a"
    assert is_inside(root / "big", root)
    for outside in ("..", "../ab", "/etc"):
        assert not is_inside(root / outside, root)


def test_another_process_sees_the_same_list(root: ObjectPath) -> None:
    again = ObjectPath.from_document(json.loads(json.dumps(root.document())))
    assert revision_of(again / "big") == revision_of(root / "big") == (len(CONTENT), (root / "big").info.revision)
    assert read_regular(again / "big") == CONTENT


def test_any_order_of_reads_gives_the_bytes_of_the_object(root: ObjectPath) -> None:
    chance = random.Random(1)
    with open_regular(root / "big") as file:
        assert file.read() == CONTENT
        for _ in range(120):
            at, n = chance.randrange(len(CONTENT) + 100), chance.choice((0, 1, 100, 9_999, 30_000))
            file.seek(at)
            assert file.read(n) == CONTENT[at : at + n]
        assert file.seek(-5, io.SEEK_END) == len(CONTENT) - 5
        assert file.read(99) == CONTENT[-5:]
        with pytest.raises(OSError):
            file.seek(-len(CONTENT) - 1, io.SEEK_END)


def test_a_reader_requests_what_comes_next_and_nothing_twice(root: ObjectPath, server: ObjectServer) -> None:
    with open_regular(root / "big") as file:
        file.read(25_000)
        assert 3 <= len(server.ranges) <= 3 + ranges._AHEAD
        file.read()
    assert len(server.ranges) == len(set(server.ranges)) == 31


def test_columns_that_are_read_in_turns_are_requested_once(root: ObjectPath, server: ObjectServer) -> None:
    with open_regular(root / "big") as file:
        for at in range(0, 100_000, 1_000):
            for begin in (0, 150_000):
                file.seek(begin + at)
                assert file.read(1_000) == CONTENT[begin + at : begin + at + 1_000]
    assert len(server.ranges) == len(set(server.ranges))


@pytest.mark.parametrize("fault", [unavailable(9, of="big"), cut_off(3), slow(0.002)], ids=["503", "cut", "slow"])
def test_what_fails_for_a_while_is_requested_again(root: ObjectPath, server: ObjectServer, fault: object) -> None:
    server.faults.append(fault)  # type: ignore[arg-type]
    assert read_regular(root / "big") == CONTENT


@pytest.mark.parametrize("fault", [cut_off(1), unavailable(10**6)], ids=["cut", "503"])
def test_what_never_comes_is_an_error_in_the_end(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(objects, "PATIENCE_S", 0.2)
    root = ObjectPath.listed("s3://models/a")
    server.faults.append(fault)
    with (
        open_regular(root / "big") as file,
        pytest.raises(StorageError, match=r"big: bytes 0 to 10000 could not be had within 0 s"),
    ):
        file.read()


def test_an_object_that_shrinks_or_goes_is_no_shorter_file(root: ObjectPath, server: ObjectServer) -> None:
    server.put_bytes("a/changing", CONTENT)
    listed = ObjectPath.listed("s3://models/a")
    server.put_bytes("a/changing", CONTENT[:250_000])
    with open_regular(listed / "changing") as file, pytest.raises(SnapshotError, match="it changed while it was read"):
        file.read()
    server.delete("a/changing")
    with open_regular(listed / "changing") as file, pytest.raises(FileNotFoundError):
        file.read()
    assert not (listed.listed_again() / "changing").exists()


def test_what_is_no_snapshot_is_not_listed(server: ObjectServer) -> None:
    with pytest.raises(SnapshotError, match=r"s3://models/nowhere has no snapshot\.json: not a snapshot"):
        ObjectPath.listed("s3://models/nowhere", if_any=["snapshot.json"])
    with pytest.raises(SnapshotError, match="s3://no-such-bucket/x"):
        ObjectPath.listed("s3://no-such-bucket/x")


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra, match=r"pip install 'tierstore\[gs\]'"):
        ObjectPath.listed("gs://models/a")


def test_which_sources_are_urls() -> None:
    assert all(map(is_url, ("s3://b/x", "S3://b", "gs://b", "az://c/x", "abfs://c@a/x")))
    assert not any(map(is_url, ("/s3://b", "file:///x", "http://b/x", "s3:/b", "simplecache::s3://b")))
    assert Path("s3://b") == Path("s3:/b"), "which is why a URL is never made a path"


def test_objects_that_stand_for_folders_are_none_and_names_are_kept_as_they_are(server: ObjectServer) -> None:
    names = ["part 1/é#%41+.arrow", "_SUCCESS", "folder/part"]
    for name in (*names, "", "folder/"):
        server.put_bytes(f"odd/{name}", b"" if name.endswith(("/", "S")) or not name else b"content")
    root = ObjectPath.listed("s3://models/odd")
    assert sorted(root.names_below()) == sorted(names)
    assert read_regular(root / names[0]) == b"content"
    assert objects.entries("s3://models/odd/") is not None
    folders, files = objects.entries("s3://models/odd/") or ([], {})
    assert (sorted(folders), list(files)) == (["folder", "part 1"], ["_SUCCESS"])
    assert objects.entries("s3://models/no-such-folder") is None


def test_a_name_that_no_path_may_have_is_an_error_that_names_it(server: ObjectServer) -> None:
    server.put_bytes("strange/a/../b", b"")
    with pytest.raises(SnapshotError, match=r"s3://models/strange cannot be read: .*\.\."):
        ObjectPath.listed("s3://models/strange")


def test_a_storage_that_denies_is_not_asked_again(server: ObjectServer) -> None:
    server.listing_faults.append(refused(1, "403 Forbidden"))
    with pytest.raises(SnapshotError, match="403 Forbidden"):
        ObjectPath.listed("s3://models/a")
    assert ObjectPath.listed("s3://models/a").is_dir()


@pytest.mark.parametrize("names", [True, False], ids=["named", "default"])
def test_credentials_region_and_endpoint_of_a_profile(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: bool
) -> None:
    pytest.importorskip("boto3", reason="the extra s3 is not installed")
    profile = "trainer" if names else "default"
    (tmp_path / "credentials").write_text(f"[{profile}]\naws_access_key_id = of-a-file\naws_secret_access_key = s\n")
    section = f"profile {profile}" if names else profile
    (tmp_path / "config").write_text(f"[{section}]\nregion = eu-west-3\nendpoint_url = {server.url}\n")
    for name in server.environment:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    if names:
        monkeypatch.setenv("AWS_PROFILE", profile)
    signed: list[str] = []
    server.faults.append(lambda environ, respond: signed.append(environ["HTTP_AUTHORIZATION"]))
    assert read_regular(ObjectPath.listed("s3://models/a") / "folder/part") == b"p"
    assert "Credential=of-a-file/" in signed[0]
    assert "/eu-west-3/s3/" in signed[0]
