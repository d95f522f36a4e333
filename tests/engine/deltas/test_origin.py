"""The origin of a logged delta: there after a start, of no weight where there is none, and its damage is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierstore.engine.deltas import origin as origins
from tierstore.engine.deltas.log import DeltaLog, NewEntry
from tierstore.engine.serving.state_file import StateFile
from tierstore.errors import Corruption
from tierstore.formats.names import ModelDirectory
from tierstore.kafka.messages import digest_of

GOLDEN = Path(__file__).parents[3] / "schema/golden/log"
ORIGIN = {"source": "kafka", "topic": "deltas", "cluster": "c", "epoch": 1, "partition": 0, "offsets": [6, 7], "resume": {"0": 8}}  # fmt: skip


def log_at(root: Path) -> DeltaLog:
    return DeltaLog(ModelDirectory(root), StateFile(ModelDirectory(root), "ctr"))


def entries(root: Path) -> list[Path]:
    return sorted((root / "log").glob("*.arrow"))


def test_it_is_logged_with_the_delta(tmp_path: Path) -> None:
    log = log_at(tmp_path)
    log.restart(3)
    for seq, origin in ((4, None), (5, ORIGIN), (6, None)):
        data = b"delta %d" % seq
        log.append(NewEntry(seq, data, digest_of(data), origin))
    again = log_at(tmp_path)
    assert [again.read(seq) for seq in (4, 5, 6)] == [b"delta 4", b"delta 5", b"delta 6"]
    assert (again.newest_origin("kafka"), again.newest_origin("other")) == (ORIGIN, None)


@pytest.mark.parametrize("place", [-1 - 24, -24, -10])  # in the document, its checksum, its length
def test_its_damage_is_noticed(tmp_path: Path, place: int) -> None:
    log = log_at(tmp_path)
    log.restart(3)
    log.append(NewEntry(4, b"delta", digest_of(b"delta"), ORIGIN))
    (path,) = entries(tmp_path)
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(Corruption):
        log_at(tmp_path).read(4)
    assert log_at(tmp_path).newest_origin("kafka") is None


def test_the_golden_entry() -> None:
    (path,) = GOLDEN.glob("*.arrow")
    data, origin = origins.split(path.read_bytes(), path)
    assert path.name == f"{41821:020d}-{digest_of(data)}.arrow"
    assert data == (GOLDEN.parent / "deltas/41821-upserts-and-deletes.arrow").read_bytes()
    assert origin == ORIGIN == origins.read(path)
    assert path.read_bytes() == data + origins.encode(ORIGIN)
