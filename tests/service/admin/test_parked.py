"""Parked messages over HTTP, with the client, and from the command line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import tierstore
from tests.service.scenes import delta, rows, write_snapshot
from tierstore.access.roles import Action
from tierstore.access.rules import of_http
from tierstore.cli import main
from tierstore.engine.store import Store
from tierstore.errors import Corruption
from tierstore.kafka.parked import Parked, ParkedFiles, make_id
from tierstore.service.server import ServerThread


def record(payload: bytes, offset: int, model: str | None, seq: int | None) -> Parked:
    name = make_id(0, offset, payload)
    return Parked(
        name, "t", 0, offset, 1, model, seq, True, "it did not fit", 1000, "", name.split("-")[2], len(payload)
    )


def park(store: Store, payload: bytes, offset: int, model: str | None = "ctr", seq: int | None = 4) -> str:
    parked = record(payload, offset, model, seq)
    assert store.parked_files.add(parked, payload)
    return parked.id


def test_over_http_and_with_the_client(own: tuple[Store, ServerThread, httpx.Client], tmp_path: Path) -> None:
    store, server, http = own
    assert http.get("/admin/parked").json() == {"parked": []}
    store.load_snapshot(write_snapshot(tmp_path, 1, delta_seq=3))
    bad, good, later = (
        park(store, payload, offset, seq=seq)
        for payload, offset, seq in ((b"bad", 1, 4), (delta(5, {1: 50.0}), 2, 5), (b"worse", 3, 9))
    )
    assert http.post(f"/admin/parked/{bad}/retry").status_code == 400
    assert http.post(f"/admin/parked/{good}/retry").status_code == 409  # 4 is next
    assert http.post(f"/admin/parked/{later}/skip").status_code == 409
    assert http.get("/admin/parked/0-1-0000000000000000").status_code == 404
    assert http.get("/admin/parked/what").status_code == 400
    with tierstore.Client(server.url) as client:
        assert [one["seq"] for one in client.parked()] == [4, 5, 9]
        assert client.parked_payload(bad) == b"bad"
        assert client.parked_message(bad)["reason"] == "it did not fit"
        assert client.skip_parked(bad)["applied"] is True
        assert client.retry_parked(good)["applied"] is True
        assert [one["id"] for one in client.parked()] == [later]
        assert [one["state"] for one in client.parked(all_states=True)] == ["skipped", "retried", "parked"]
        with pytest.raises(tierstore.NotFound):
            client.skip_parked(bad)
    assert (store.model("ctr").lookup("item_id", [1]) == rows("item", [50.0])).all()
    assert store.model("ctr").log.last == 5


def test_the_routes_are_for_admins() -> None:
    for method, path in (
        ("GET", "/admin/parked"),
        ("GET", "/admin/parked/x/payload"),
        ("POST", "/admin/parked/x/skip"),
    ):
        assert of_http(method, path) == (Action.ADMIN, None)


def test_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    data = tmp_path / "data"
    with tierstore.open(data, host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(write_snapshot(tmp_path, 1, delta_seq=3))
        name = park(store, b"bad", 1)

    def run(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["tierstore", "parked", *words, "--data", str(data)])
        with contextlib.suppress(SystemExit):
            main()
        return capsys.readouterr().out

    assert name in run("list")
    out = tmp_path / "payload"
    assert "it did not fit" in run("show", name, "--out", str(out))
    assert out.read_bytes() == b"bad"
    shown: dict[str, Any] = json.loads(run("show", name, "--json"))
    assert (shown["model"], shown["seq"], shown["offset"]) == ("ctr", 4, 1)
    assert "delta 4 of ctr is empty" in run("skip", name)
    assert "nothing is parked" in run("list")
    assert name in run("list", "--all")


def test_damage_is_noticed_and_the_same_message_is_parked_once(tmp_path: Path) -> None:
    files = ParkedFiles(tmp_path / "parked")
    parked = record(b"payload", 7, None, None)
    assert files.add(parked, b"payload")
    files.resolve(parked.id, "skipped")
    again = ParkedFiles(tmp_path / "parked")
    assert not again.add(parked, b"payload")
    assert (again.list(), again.get(parked.id).state) == ([], "skipped")
    other = record(b"other", 8, "ctr", 5)
    assert again.add(other, b"other")
    path = tmp_path / "parked" / f"{other.id}.parked"
    path.write_bytes(path.read_bytes().replace(b"other", b"OTHER"))
    with pytest.raises(Corruption, match="checksum"):
        again.payload(other.id)
