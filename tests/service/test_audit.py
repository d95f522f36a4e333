"""Whichever way a change comes, the audit says who made it; and whom the service refused."""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.extras import has_grpc
from tests.service.conftest import GRPC, eventually, load, settings_for
from tests.service.scenes import delta, write_snapshot
from tierstore.access.audit import read
from tierstore.access.roles import Rates, Role
from tierstore.access.tokens import TokenFile
from tierstore.engine.store import Store
from tierstore.errors import Conflict
from tierstore.service.server import ServerThread


def lines(data: Path, **wanted: Any) -> list[dict[str, Any]]:
    return [line for line in read(data) if all(line.get(name) == value for name, value in wanted.items())]


def test_whom_the_data_plane_refuses_has_one_line(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    _, reading = TokenFile(settings.data / "tokens.json").create(Role.READER)
    with Store(settings) as store, ServerThread(store) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        for token, status in ((reading, 403), ("x", 401)):
            before = len(lines(settings.data))
            headers = {"authorization": f"Bearer {token}"}
            answer = http.post("/v2/repository/models/ctr/load", json={}, headers=headers)
            (line,) = lines(settings.data)[before:]
            assert (answer.status_code, line["outcome"]) == (status, "refused")


def test_changes_over_http_name_the_token_and_have_before_and_after(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, grpc_port=GRPC)
    tokens = TokenFile(settings.data / "tokens.json")
    admin, secret = tokens.create(Role.ADMIN)
    writer, writing = tokens.create(Role.WRITER)
    reader, reading = tokens.create(Role.READER)
    with Store(settings) as store, ServerThread(store) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        http.headers["authorization"] = f"Bearer {secret}"
        load(http, write_snapshot(tmp_path, 1))
        load(http, write_snapshot(tmp_path, 2))
        answer = http.post(
            "/admin/models/ctr/deltas", content=delta(1, {5: 1.0}), headers={"authorization": f"Bearer {writing}"}
        )
        assert answer.json() == {"seq": 1, "applied": True}
        again = http.post("/admin/models/ctr/deltas", content=delta(1, {5: 1.0}))
        assert again.status_code in (200, 409)
        assert http.post("/admin/models/ctr/activate", json={"version": 1}).status_code == 200
        assert http.delete("/admin/models/ctr/versions/1").status_code == 409
        assert http.post("/v2/repository/models/ctr/unload", json={}).status_code == 200
        for token, wanted in ((reading, 403), (f"{secret[:-4]}AAAA", 401), ("x", 401)):
            headers = {"authorization": f"Bearer {token}", "x-request-id": secret}
            assert http.post("/admin/models/ctr/rollback", headers=headers).status_code == wanted
            assert http.get("/admin/models", headers={"authorization": "Bearer x"}).status_code == 401
        before_close = lines(settings.data)
    changes = [(line["what"], line["outcome"]) for line in before_close if line["outcome"] != "refused"]
    assert [change for change in changes if change != ("delta", "failed")] == [
        ("load", "done"), ("load", "done"), ("delta", "done"), ("activate", "done"), ("drop", "failed"), ("deactivate", "done"),
    ]  # fmt: skip
    (applied,) = lines(settings.data, what="delta", outcome="done")
    assert applied["who"].startswith(f"token {writer.id} at 127.0.0.1:")
    assert (applied["before"]["seq"], applied["after"]["seq"], applied["seq"]) == (0, 1, 1)
    (activated,) = lines(settings.data, what="activate")
    assert f"token {admin.id} at" in activated["who"]
    assert (activated["before"]["active"], activated["after"]["active"]) == (2, 1)
    assert "is active" in lines(settings.data, what="drop")[0]["error"]
    assert all(f"of token {admin.id} at" in line["who"] for line in lines(settings.data, what="load"))
    refused = lines(settings.data, outcome="refused")
    assert [line["what"] for line in refused] == ["POST /admin/models/ctr/rollback"] * 3, "reading is not for the audit"
    assert f"token {reader.id} at" in refused[0]["who"]
    text = (settings.data / "audit/audit.jsonl").read_text()
    for token in (secret, writing, reading):
        assert token.split("_", 2)[2] not in text
    assert "Bearer" not in text.replace("`Authorization: Bearer", "")


def test_every_attempt_that_failed_has_one_line(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, max_delta=100_000)
    tokens = TokenFile(settings.data / "tokens.json")
    admin, secret = tokens.create(Role.ADMIN)
    _, slowed = tokens.create(Role.WRITER, rates=Rates(requests=0.001))
    deltas, text = "/admin/models/ctr/deltas", {"content-type": "text/plain"}
    attempts: list[tuple[str, str, dict[str, Any], int, str, str]] = [
        ("POST", "/admin/models/ctr/snapshots", {"json": {"source": "/etc"}}, 400, "", "source-root"),
        ("POST", "/admin/models/ctr/snapshots", {"json": {"sauce": 1}}, 400, "", "400 Bad Request"),
        ("POST", "/admin/models/ctr/snapshots", {"content": b"{"}, 400, "", "400 Bad Request"),
        ("POST", "/admin/models/ctr/activate", {"json": {"version": 99}}, 404, "activate", "99"),
        ("DELETE", "/admin/models/none/versions/1", {}, 404, "", "none"),
        ("POST", "/v2/repository/models/none/unload", {"json": {}}, 404, "", "none"),
        ("POST", deltas, {"content": b"junk"}, 400, "delta", "delta"),
        ("POST", deltas, {"content": delta(9, {5: 1.0})}, 409, "delta", "9"),
        ("POST", deltas, {"content": bytes(100_001)}, 413, "delta", "100000"),
        ("POST", deltas, {"content": delta(1, {5: 1.0}), "headers": text}, 415, "delta", "text/plain"),
    ]
    with Store(settings) as store, ServerThread(store) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        http.headers["authorization"] = f"Bearer {secret}"
        store.load_snapshot(write_snapshot(tmp_path, 1))
        for method, path, request, status, what, why in attempts:
            before = len(lines(settings.data))
            answer = http.request(method, path, **request)
            (line,) = lines(settings.data)[before:]
            assert (answer.status_code, line["outcome"]) == (status, "failed"), line
            assert line["what"] == (what or f"{method} {path}")
            assert why in line["error"]
            assert f"token {admin.id} at" in line["who"]
        http.headers["authorization"] = f"Bearer {slowed}"
        assert [http.post(deltas, content=b"junk").status_code for _ in range(2)][1] == 429
        assert "requests a second" in lines(settings.data, what="delta")[-1]["error"]
        before = len(lines(settings.data))
        for path in ("/v2/models/none", "/nowhere", "/admin/jobs/none"):
            http.get(path, headers={"authorization": f"Bearer {secret}"})
        assert len(lines(settings.data)) == before, "who reads changes nothing"
    assert not any(line["what"] == "delta" for line in map(json.loads, (settings.data / "audit/audit.jsonl").open()))


@pytest.mark.skipif(not has_grpc(), reason="grpcio is not installed")
def test_changes_over_grpc_are_in_it_too(tmp_path: Path) -> None:
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    settings = settings_for(tmp_path, grpc_port=GRPC)
    tokens = TokenFile(settings.data / "tokens.json")
    admin, secret = tokens.create(Role.ADMIN)
    reader, reading = tokens.create(Role.READER)
    with Store(settings) as store, ServerThread(store) as server:
        store.load_snapshot(write_snapshot(tmp_path))
        client = InferenceServerClient(server.grpc_target)
        client.unload_model("ctr", headers={"authorization": f"Bearer {secret}"})
        for token in (reading, "x"):
            with pytest.raises(InferenceServerException):
                client.unload_model("ctr", headers={"authorization": f"Bearer {token}"})
        for _ in range(2):
            with pytest.raises(InferenceServerException):
                client.unload_model("none", headers={"authorization": f"Bearer {secret}"})
        client.close()
    (loaded,) = lines(settings.data, what="load")
    assert loaded["who"] == "in process"
    (unloaded,) = lines(settings.data, what="deactivate")
    assert unloaded["who"].startswith(f"token {admin.id} at 127.0.0.1:")
    assert (unloaded["before"]["active"], unloaded["after"]["active"]) == (loaded["version"], None)
    refused = lines(settings.data, outcome="refused")
    assert [line["what"] for line in refused] == ["/inference.GRPCInferenceService/RepositoryModelUnload"] * 2
    assert reader.id in refused[0]["error"]
    failed = lines(settings.data, outcome="failed")
    assert [line["what"] for line in failed] == ["/inference.GRPCInferenceService/RepositoryModelUnload"] * 2
    assert f"token {admin.id} at" in failed[0]["who"]
    assert "none" in failed[0]["error"]


@pytest.mark.thorough
def test_the_command_line_and_housekeeping_are_in_it_too(tmp_path: Path) -> None:
    data = tmp_path / "data"

    def command(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tierstore", *words, "--data", str(data)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    for version in (1, 2, 3):
        command("load", str(write_snapshot(tmp_path, version)))
    token = json.loads(command("token", "create", "--role", "reader", "--json"))
    command("token", "revoke", token["id"])
    user = f"user {getpass.getuser()} (command line)"
    assert [line["version"] for line in lines(data, what="load", who=user)] == [1, 2, 3]
    assert [line["token"]["id"] for line in lines(data, who=user) if "token" in line["what"]] == [token["id"]] * 2
    assert token["token"].split("_", 2)[2] not in (data / "audit/audit.jsonl").read_text()
    with Store(settings_for(tmp_path)) as store:
        store.model("ctr").housekeeping.tasks.wake()
        eventually(lambda: lines(data, what="drop"), "housekeeping to drop the oldest version")
    (dropped,) = lines(data, what="drop")
    assert (dropped["who"], dropped["version"], dropped["model"]) == ("housekeeping", 1, "ctr")
    shown = json.loads(command("audit", "--json", "--model", "ctr", "--last", "2"))
    assert sorted(line["what"] for line in shown) == ["drop", "load"]  # housekeeping does not wait for the load's line
    assert "load" in command("audit")


def test_where_the_audit_cannot_be_written_changes_go_on_and_status_says_so(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    with Store(settings) as store:
        store.load_snapshot(write_snapshot(tmp_path, 1))
        store.audit.close()
        path = settings.data / "audit/audit.jsonl"
        path.rename(path.with_name("away"))
        path.mkdir()
        store.load_snapshot(write_snapshot(tmp_path, 2))
        assert store.apply_delta(delta(1, {5: 1.0})).applied
        assert "not written" in store.status()["audit"]["problem"]
        path.rmdir()
        with pytest.raises(Conflict):
            store.drop("ctr", 2)
        assert store.status()["audit"]["problem"] is None
    assert [line["what"] for line in lines(settings.data)] == ["load", "delta", "drop"]


def test_a_line_names_its_own_caller_whatever_came_before_and_in_whichever_form(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    tokens = TokenFile(settings.data / "tokens.json")
    admin, secret = tokens.create(Role.ADMIN)
    bearer = {"authorization": f"Bearer {secret}"}
    path = "/admin/models/ctr/versions/7"
    with Store(settings) as store, ServerThread(store) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        store.load_snapshot(write_snapshot(tmp_path, 1))
        for _ in range(3):
            assert http.get("/v2/models/ctr", headers=bearer).status_code == 200
            assert http.delete(path, headers=bearer).status_code == 404
            assert http.post("/v2/models/ctr/unload", headers=bearer).status_code == 404
        for more in (
            {"x-request-id": "one"},
            {"connection": "close"},
            {"content-type": "a/b"},
            {"expect": "100-continue"},
        ):
            assert http.delete(path, headers=bearer | more).status_code == 404
        assert http.request("DELETE", path, headers=bearer, content=iter([b"a", b"b"])).status_code == 404
        for prefix in ("/admin/models/ctr", "/v2/repository/models/ctr", "/v2/models/ctr", "/v1/models/ctr"):
            assert http.post(f"{prefix}/unload").status_code in (401, 403, 404)
    failed = lines(settings.data, what="drop", outcome="failed")
    assert len(failed) == 8
    assert {line["who"].partition(" at ")[0] for line in failed} == {f"token {admin.id}"}
    refused = lines(settings.data, outcome="refused")
    assert refused
    assert all(line["who"].startswith("127.0.0.1:") for line in refused), refused
    assert all(line["who"].count(" at ") <= 1 for line in lines(settings.data))
