"""Manifests, and whatever else a snapshot names, are regular files of a sensible size inside of it; else they are refused at once."""

from __future__ import annotations

import io
import os
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.formats.shards import snapshot_of
from tierstore.errors import InvalidInput, NotFound, SnapshotError, StorageError
from tierstore.formats import files
from tierstore.formats.delta.reader import read_delta
from tierstore.formats.regular import MAX_DOCUMENT_BYTES
from tierstore.formats.snapshot.built import open_source
from tierstore.formats.snapshot.recorded_requests import read_request


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


ODD = [pipe, bound_socket, device, Path.mkdir]


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as writer:
        table = writer.table("item", dim=2, dtype="float32")
        table.write(np.arange(4), np.zeros((4, 2), np.float32))
        writer.warmup("item", np.arange(2))
        writer.dense(b"dense")
        writer.request({"item": np.arange(2)})
    return tmp_path / "s"


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["snapshot.json", "built.json"])
def test_a_manifest_that_is_no_regular_file_is_refused_at_once(
    snapshot: Path, name: str, odd: Callable[[Path], None]
) -> None:
    (snapshot / name).unlink(missing_ok=True)
    odd(snapshot / name)
    with pytest.raises(SnapshotError, match=name):
        open_source(snapshot)


@pytest.mark.parametrize("odd", ODD[:3])
def test_a_file_of_a_snapshot_that_is_no_regular_one_is_refused_at_once(
    snapshot: Path, odd: Callable[[Path], None]
) -> None:
    for path in [path for path in snapshot.rglob("*") if path.is_file() and path.name != "snapshot.json"]:
        kept = path.read_bytes()
        path.unlink()
        odd(path)
        with pytest.raises(SnapshotError, match=path.name):
            open_source(snapshot)
        path.unlink()
        path.write_bytes(kept)
    assert open_source(snapshot).identity()


@pytest.mark.parametrize("name", ["snapshot.json", "built.json"])
def test_a_manifest_that_is_too_large_is_not_read(snapshot: Path, name: str) -> None:
    with open(snapshot / name, "ab") as file:
        file.truncate(3 << 30)
    with pytest.raises(
        SnapshotError, match=f"{name}: cannot be read: has 3,221,225,472 bytes, at most {MAX_DOCUMENT_BYTES:,}"
    ):
        open_source(snapshot)


@pytest.mark.parametrize("name", ["snapshot.json", "built.json"])
def test_a_manifest_does_not_lead_out_of_its_directory(snapshot: Path, tmp_path: Path, name: str) -> None:
    (snapshot / "snapshot.json").rename(tmp_path / "elsewhere.json")
    (snapshot / name).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(SnapshotError, match=f"{name}: leads outside"):
        open_source(snapshot)
    (snapshot / name).unlink()
    (tmp_path / "elsewhere.json").rename(snapshot / "other.json")
    (snapshot / "snapshot.json").symlink_to("other.json")
    assert open_source(snapshot).manifest.version == 1


def test_weights_beside_a_dense_part_that_are_a_pipe_are_refused_at_once(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from tierstore.formats.onnx_file import read_onnx

    model = onnx.ModelProto()
    tensor = model.graph.initializer.add(name="w", data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.data")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    os.mkfifo(tmp_path / "w.data")
    with pytest.raises(InvalidInput, match="regular file"):
        read_onnx(tmp_path / "m.onnx", tmp_path)


def test_files_of_ours_and_deltas_are_regular_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    with pytest.raises(StorageError, match="named pipe"):
        files.read_json(tmp_path / "p")
    with pytest.raises(StorageError, match="named pipe"):
        files.read_bytes(tmp_path / "p")
    with pytest.raises(StorageError, match="named pipe"):
        read_delta(tmp_path / "p")
    with pytest.raises(NotFound):
        files.read_json(tmp_path / "nothing")


@pytest.mark.parametrize("path", ["x" * 300 + ".arrow", "x/" * 3000 + "a.arrow", "\udc80.arrow"])
def test_a_path_that_no_file_can_have_is_refused_by_its_name(tmp_path: Path, path: str) -> None:
    root = snapshot_of(tmp_path / "s", lambda _: path)
    with pytest.raises(SnapshotError, match=r"cannot be read|missing|surrogate"):
        open_source(root)


def damaged_heads() -> list[bytes]:
    stream = io.BytesIO()
    np.save(stream, np.arange(8))
    whole = stream.getvalue()
    texts = (
        b"(",
        b"'''",
        b"{'descr': '<i8', 'shape': (8,)",
        b"\0" * 20,
        b"[" * 118,
        b"{" * 118,
        b"  x\n y",
        b"9" * 118,
    )
    return [whole[:10] + text.ljust(118) + whole[128:] for text in texts]


@pytest.mark.parametrize("head", damaged_heads())
def test_a_damaged_head_is_refused_as_the_files_fault(tmp_path: Path, head: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "r.npz", "w") as archive:
        archive.writestr("keys.npy", head)
        archive.writestr("vectors.npy", head)
    with pytest.raises(SnapshotError, match=r"r\.npz"):
        read_request(tmp_path / "r.npz", file="r.npz")
    root = snapshot_of(tmp_path, lambda _: "r.npz")
    with pytest.raises(SnapshotError, match=r"r\.npz"):
        for _ in open_source(root).batches("item", 0):
            pass


@pytest.mark.parametrize("depth", [900, 1000, 100_000])
@pytest.mark.parametrize("name", ["snapshot.json", "built.json"])
def test_a_manifest_that_is_nested_very_deep_is_refused(tmp_path: Path, name: str, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    for document in (
        nested,
        f'{{"format":1,"manifest":{nested}}}',
        f'{{"format":{nested}}}',
        f'{{"format":1,"folders":{nested}}}',
        '{"format":1,"folders":{}}',
    ):
        (tmp_path / name).write_text(document)
        with pytest.raises(SnapshotError, match=name):
            open_source(tmp_path)
