"""`tools/disk_trace.py`: what a directory looks like after each operation, and what of it a power failure leaves."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tools.disk_trace import Disk, Mode, build, operations

PROGRAM = """
import os, shutil, sys
root = sys.argv[1]
def flush(path):
    fd = os.open(path, os.O_RDONLY); os.fsync(fd); os.close(fd)
os.mkdir(f"{root}/sub")
with open(f"{root}/sub/flushed", "wb") as file:
    file.write(b"one"); file.flush(); os.fsync(file.fileno()); file.write(b"two")
flush(f"{root}/sub")
with open(f"{root}/sub/lost", "wb") as file:
    file.write(b"x" * 1000)
with open(f"{root}/new", "wb") as file:
    file.write(b"new"); file.flush(); os.fsync(file.fileno())
os.replace(f"{root}/new", f"{root}/old")
flush(root)
os.link(f"{root}/old", f"{root}/sub/linked")
shutil.copyfile(f"{root}/old", f"{root}/copied")
os.truncate(f"{root}/old", 1)
pid = os.fork()
if not pid:
    os.unlink(f"{root}/gone"); os._exit(0)
os.waitpid(pid, 0)
shutil.copytree(f"{root}/sub", f"{root}/tree")
shutil.rmtree(f"{root}/tree")
"""


STORE = """
import sys
from pathlib import Path
import tierstore
from tools import crash_work
root = Path(sys.argv[1])
crash_work.write_snapshot(root.parent / "snapshot", 1, 0)
with tierstore.open(root / "data", fold_grace_s=0.0, **crash_work.SETTINGS) as store:
    store.load_snapshot(root.parent / "snapshot")
    for seq in range(1, 20):
        store.apply_delta(crash_work.delta(1, seq))
    store.activate("ctr", 1)
    store.label("ctr", "best", 1)
    store.deactivate("ctr")
"""


def content(root: Path) -> dict[str, bytes | None]:
    found = sorted(path for path in root.rglob("*"))
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in found}


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    library = build(tmp_path)
    if library is None:
        pytest.skip("no C compiler to build the recorder with")
    return library


def test_what_was_not_flushed_is_lost_and_what_was_is_not(tmp_path: Path, recorder: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in ("old", "gone"):
        (root / name).write_bytes(b"before")
    disk, trace = Disk(root), tmp_path / "trace"
    environment = {"LD_PRELOAD": str(recorder), "DISK_TRACE": str(trace), "DISK_TRACE_ROOT": str(root)}
    subprocess.run([sys.executable, "-c", PROGRAM, root], check=True, env=os.environ | environment, timeout=60)
    for operation in operations(trace):
        disk.play(operation)

    def found(mode: Mode) -> dict[str, bytes | None]:
        where = tmp_path / mode
        disk.write(where, mode, random.Random(1))
        return content(where)

    assert found("killed") == content(root)
    # removals too are lost: the directory was not flushed since; `old` is the file that was renamed to it
    assert found("flushed") == {"gone": b"before", "old": b"new", "sub": None, "sub/flushed": b"one"}
    assert set(found("torn")) <= {*content(root), "gone", "tree", "tree/flushed", "tree/lost", "tree/linked"}


@pytest.mark.thorough
def test_nothing_that_a_store_does_on_disk_is_missing_from_the_record(tmp_path: Path, recorder: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    disk, trace = Disk(root), tmp_path / "trace"
    environment = {"LD_PRELOAD": str(recorder), "DISK_TRACE": str(trace), "DISK_TRACE_ROOT": str(root)}
    subprocess.run([sys.executable, "-c", STORE, root], check=True, env=os.environ | environment, timeout=300)
    for operation in operations(trace):
        disk.play(operation)
    disk.write(tmp_path / "killed", "killed", random.Random(1))

    def without_logs(root: Path) -> dict[str, bytes | None]:  # RocksDB writes those of its messages through FILE
        return {name: data for name, data in content(root).items() if not Path(name).name.startswith("LOG")}

    assert without_logs(tmp_path / "killed") == without_logs(root)
