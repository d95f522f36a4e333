"""The audit's file: whole lines, put aside by size, no secrets, and a disk that is full for a time."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from tierstore.access import audit as module
from tierstore.access.audit import Audit, read
from tierstore.access.roles import Role
from tierstore.access.tokens import TokenFile
from tierstore.errors import Forbidden


def test_a_line_says_who_changed_what_when_and_how_it_ended(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.change("activate", "token 1", "done", model="ctr", before={"active": 1}, after={"active": 2}, force=None)
    audit.change("drop", "token 1", "failed", model="ctr", error="it is active")
    first, second = read(tmp_path)
    assert first.pop("time").endswith("+00:00")
    assert first == {"who": "token 1", "what": "activate", "outcome": "done", "model": "ctr", "before": {"active": 1}, "after": {"active": 2}}  # fmt: skip
    assert second["error"] == "it is active"
    assert stat.S_IMODE(audit.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(audit.path.parent.stat().st_mode) == 0o700


def test_what_looks_like_a_secret_is_cut_out_wherever_it_is(tmp_path: Path) -> None:
    token, secret = TokenFile(tmp_path / "tokens.json").create(Role.ADMIN)
    random = secret.split("_", 2)[2]
    audit = Audit(tmp_path)
    audit.change("load", f"somebody (id {secret})", "done", source=Path(f"/data/{secret}"), before={"note": secret})
    audit.change("load", "somebody", "done", source="https://somebody:pa55word@host/x")
    audit.refused(
        "POST /x", "somebody", Forbidden(f"Authorization: Bearer {secret[10:]}, Basic dXNlcjpwYXNz; bearer opaque")
    )
    text = audit.path.read_text()
    assert token.id in text
    for part in (random, random[:12], "dXNlcjpwYXNz", "opaque", "pa55word"):
        assert part not in text


def test_files_are_put_aside_by_size_and_the_oldest_goes(tmp_path: Path) -> None:
    audit = Audit(tmp_path, size=1000, kept=2)
    for number in range(100):
        audit.change("label", "producer", "done", flush=False, seq=number)
    names = sorted(path.name for path in audit.path.parent.iterdir())
    assert names == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    seqs = [line["seq"] for line in read(tmp_path)]
    assert seqs == list(range(100 - len(seqs), 100))
    assert 15 < len(seqs) < 40


def test_no_number_of_deltas_pushes_other_lines_out(tmp_path: Path) -> None:
    audit = Audit(tmp_path, size=1000, kept=2)
    audit.change("load", "admin", "done", model="ctr")
    for seq in range(100):
        audit.change("delta", "producer", "done", flush=False, model="ctr", seq=seq)
    audit.change("drop", "admin", "done", model="ctr")
    lines = list(read(tmp_path))
    assert [line["what"] for line in lines if line["what"] != "delta"] == ["load", "drop"]
    seqs = [line["seq"] for line in lines if line["what"] == "delta"]
    assert seqs == list(range(100 - len(seqs), 100))
    assert len(seqs) > 15
    assert [lines[0]["what"], lines[-1]["what"]] == ["load", "drop"], "in the order of their time"
    audit.close()


def test_attempts_of_some_leave_no_line_of_another_out(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    for number in range(1000):
        audit.refused("POST /admin", f"127.0.0.1:{number} (id token 0123456789ab at )", Forbidden("no"))
    of_many = len(list(read(tmp_path)))
    assert 100 <= of_many < 400, "strangers are one caller, whatever they say"
    callers = ["token 0123456789ab", "token ba9876543210", "certificate spiffe://example/trainer"]
    for caller in callers:
        for number in range(200):
            audit.refused("POST /admin", f"{caller} at 127.0.0.1:{number}", Forbidden("no"))
            audit.change("load", f"job {number:x} of {caller} at 127.0.0.1:1", "failed", flush=False)
    *_, last = lines = list(read(tmp_path))[of_many:]
    assert caller in last["who"]
    for caller in callers:
        for outcome in ("refused", "failed"):
            assert 100 <= sum(caller in line["who"] and line["outcome"] == outcome for line in lines) < 200


def test_attempts_are_limited_in_rate_and_those_left_out_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = Audit(tmp_path)
    for _ in range(5000):
        audit.refused("POST /admin", "somebody", Forbidden("no"))
    lines = list(read(tmp_path))
    assert 100 <= len(lines) < 400
    audit._limit._kinds["refused", ""].remaining = 1.0
    audit.refused("POST /admin", "somebody", Forbidden("no"))
    *_, last = read(tmp_path)
    assert last["left_out"] > 4000


def test_lines_wait_while_the_disk_is_full_and_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = Audit(tmp_path)
    audit.change("label", "a", "done", number=0)
    real, room = os.write, [20]

    def full(fd: int, data: bytes) -> int:
        """A disk with room for a piece of a line."""
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(module, "MOST_WAITING", 5)
    monkeypatch.setattr(module.os, "write", full)
    for number in range(1, 9):
        audit.change("label", "a", "done", number=number)
        assert audit.problem is not None
    monkeypatch.setattr(module.os, "write", real)
    audit.change("label", "a", "done", number=9)
    assert audit.problem is None
    lines = list(read(tmp_path))
    assert [line.get("number") for line in lines] == [0, None, 5, 6, 7, 8, 9]
    assert lines[1]["lost_lines"] == 4


def test_a_line_that_a_crash_has_cut_costs_itself_alone(tmp_path: Path) -> None:
    Audit(tmp_path).change("label", "a", "done", number=1)
    path = tmp_path / "audit/audit.jsonl"
    path.write_bytes(path.read_bytes() + b'{"time": "20')
    Audit(tmp_path).change("label", "a", "done", number=2)
    assert [line["number"] for line in read(tmp_path)] == [1, 2]


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit/audit.jsonl").symlink_to(tmp_path / "elsewhere")
    audit = Audit(tmp_path)
    audit.change("label", "a", "done")
    assert audit.problem is not None
    assert not (tmp_path / "elsewhere").exists()


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    children = []
    for child in range(4):
        pid = os.fork()
        if pid == 0:
            own = Audit(tmp_path)
            for number in range(200):
                own.change("label", f"child {child}", "done", flush=False, number=number)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    lines = [json.loads(line) for line in (tmp_path / "audit/audit.jsonl").read_text().splitlines()]
    assert len(lines) == 800
