"""Access with tokens: every endpoint of every protocol, with no token, a wrong, a revoked, a lesser and a right one.

The endpoints are not listed here. Over HTTP they are those of `access/rules.py`: the data plane serves no other path, and what the
admin interface serves is compared by `/openapi.json`. gRPC names its own by reflection. So a new one is asked too.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.engine import quick_build
from tests.extras import has_grpc
from tests.service.conftest import GRPC as GRPC_PORT
from tests.service.conftest import eventually, settings_for
from tests.service.reactor.test_reactor import answer, planned
from tests.service.scenes import KEYS, items, write_small, write_snapshot
from tierstore.access import rules
from tierstore.access.roles import Action, Principal, Role
from tierstore.access.rules import GRPC, HTTP, of_grpc, of_http
from tierstore.access.tokens import TokenFile
from tierstore.client import Client
from tierstore.engine.store import Store
from tierstore.errors import ConfigError, Forbidden, NotFound, Unauthorized
from tierstore.service.reactor.allowed import MOST
from tierstore.service.server import ServerThread, check_settings

JOB = "/admin/jobs/job"
OTHER = "elsewhere"  # a model that there is not: whatever is allowed changes nothing
DATA_PLANE = ("/v2", "/v1", "/upstream")


def filled(path: str) -> str:
    """A path that a pattern of `access/rules.py` stands for."""
    path = re.sub(r"\{(\w+)[^}]*\}", lambda name: {"model": OTHER, "version": "1"}.get(name[1], name[1]), path)
    return re.sub("/(predict|classify|regress)$", r":\1", path) if path.startswith("/v1/") else path


def rules_one_by_one() -> list[tuple[str, str]]:
    """(method, pattern) of each rule, one of `a|b` and of several methods."""
    found = []
    for methods, pattern, _ in HTTP:
        paths = product(*(part.split("|") for part in pattern.split("/")))
        found += [(method, "/".join(path)) for method, path in product(methods.split(), paths)]
    return found


@dataclass
class Scene:
    """A service with tokens. `secrets` by name; `principals` are whom they stand for, None for one that is refused."""

    server: ServerThread
    held: TokenFile
    secrets: dict[str, str | None]
    principals: dict[str, Principal | None]

    def headers(self, name: str) -> dict[str, str]:
        secret = self.secrets[name]
        return {} if secret is None else {"authorization": f"Bearer {secret}"}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    root = tmp_path_factory.mktemp("access")
    settings = settings_for(root, grpc_port=GRPC_PORT)
    held = TokenFile(settings.data / "tokens.json")
    secrets: dict[str, str | None] = {"none": None, "wrong": f"tierstore_{'0' * 12}_{'A' * 43}", "odd": "x"}
    principals: dict[str, Principal | None] = dict.fromkeys(secrets)
    for role in Role:
        token, secrets[role] = held.create(role)
        principals[role] = token.principal
    token, secrets["of another model"] = held.create(Role.ADMIN, ["third"])
    principals["of another model"] = token.principal
    revoked, secrets["revoked"] = held.create(Role.ADMIN)
    held.revoke(revoked.id)
    principals["revoked"] = None
    with Store(settings) as store:
        store.load_snapshot(write_snapshot(root))
        with ServerThread(store, settings) as server:
            yield Scene(server, held, secrets, principals)


def expected(principal: Principal | None, action: Action, model: str | None) -> int | None:
    """The status of a refusal; None where the request goes through."""
    if action is Action.OPEN:
        return None
    if principal is None:
        return 401
    return None if principal.may(action, model) else 403


def test_every_endpoint_over_http_with_every_token(scene: Scene) -> None:
    endpoints = [(method, filled(pattern)) for method, pattern in rules_one_by_one()]
    with httpx.Client(base_url=scene.server.url, timeout=60) as http:
        problems = []
        for method, path in [
            *endpoints,
            ("GET", "/nowhere"),
            ("GET", "/v2/nowhere"),
            ("DELETE", f"/v2/models/{OTHER}"),
        ]:
            action, model = of_http(method, path)
            for name, principal in scene.principals.items():
                status = http.request(method, path, headers=scene.headers(name), json={}).status_code
                refused = status if status in (401, 403) else None
                if path.startswith(JOB) and principal is not None and principal.role is Role.ADMIN:
                    assert status == 404, "of which model it is says the job"
                elif refused != expected(principal, action, model):
                    problems.append(
                        f"{method} {path} with token {name}: {status}, expected {expected(principal, action, model)}"
                    )
        assert problems == []


def test_what_the_admin_interface_serves_is_what_the_rules_list(scene: Scene) -> None:
    paths = httpx.get(f"{scene.server.url}/openapi.json", timeout=60).json()["paths"]
    served = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert served == {rule for rule in rules_one_by_one() if rule[1].startswith("/admin/")}


def test_the_data_plane_serves_what_the_rules_list_and_nothing_else(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a path that nobody has decided about is there for nobody."""
    listed = [(method, filled(path)) for method, path in rules_one_by_one() if path.startswith(DATA_PLANE)]
    assert len(listed) > 40
    with httpx.Client(base_url=scene.server.url, headers=scene.headers(Role.ADMIN), timeout=60) as http:

        def missing() -> list[tuple[str, str]]:
            return [one for one in listed if "no such path" in http.request(*one, json={}).text]

        assert missing() == []
        monkeypatch.setattr(rules, "_PATTERNS", ())
        rules._is_listed.cache_clear()
        try:
            assert missing() == listed
        finally:
            rules._is_listed.cache_clear()
            rules._of_http.cache_clear()


def test_a_token_for_metrics_is_for_metrics_alone(scene: Scene) -> None:
    with httpx.Client(base_url=scene.server.url, headers=scene.headers(Role.METRICS), timeout=60) as http:
        assert http.get("/metrics").status_code == 200
        for path in ("/v2", "/v2/systemsharedmemory/status", "/v2/models/stats", "/upstream/models", "/admin/models"):
            refused = http.get(path)
            assert (refused.status_code, "has the role metrics" in refused.text) == (403, True), path


@pytest.mark.skipif(not has_grpc(), reason="grpcio is not installed")
def test_every_method_over_grpc_with_every_token(scene: Scene) -> None:
    import grpc
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    code = grpc.StatusCode
    status_of = {401: code.UNAUTHENTICATED, 403: code.PERMISSION_DENIED}
    admin = tuple(scene.headers(Role.ADMIN).items())
    with grpc.insecure_channel(scene.server.grpc_target) as channel:
        with grpc.insecure_channel(scene.server.grpc_target) as known:
            known = grpc.intercept_channel(known, _Adds(admin))
            database = ProtoReflectionDescriptorDatabase(known)
            pool = DescriptorPool(database)
            services = [pool.FindServiceByName(name) for name in database.get_services()]
        methods = {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}
        assert methods.keys() <= GRPC.keys(), "a method that nobody has decided about"
        problems = []
        for path, method in methods.items():
            request = GetMessageClass(method.input_type)()
            model = _name_model(request)
            action = of_grpc(path)
            for name, principal in scene.principals.items():
                got = _status(channel, path, method, request, tuple(scene.headers(name).items()))
                wanted = expected(principal, action, model)
                if got is code.UNIMPLEMENTED and wanted == 403:
                    continue  # for nobody: its model is not looked at
                if (status_of[wanted] != got) if wanted else got in status_of.values():
                    problems.append(f"{path} with token {name}: {got}, expected {wanted}")
        assert problems == [], "\n".join(problems)


def _name_model(request: Any) -> str | None:
    for field in ("model_name", "name"):
        if field in request.DESCRIPTOR.fields_by_name and "Memory" not in request.DESCRIPTOR.name:
            setattr(request, field, OTHER)
            return OTHER
    if "model_spec" in request.DESCRIPTOR.fields_by_name:
        request.model_spec.name = OTHER
        if "metadata_field" in request.DESCRIPTOR.fields_by_name:
            request.metadata_field.append("signature_def")
        return OTHER
    return None


def _status(channel: Any, path: str, method: Any, request: Any, metadata: Any) -> Any:
    import grpc

    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }
    call = kinds[method.client_streaming, method.server_streaming](
        path, request_serializer=type(request).SerializeToString, response_deserializer=bytes
    )
    try:
        if not method.server_streaming:
            call(request, metadata=metadata, timeout=60)
        else:
            answers = call(iter([request]) if method.client_streaming else request, metadata=metadata, timeout=60)
            first = next(iter(answers), b"")
            answers.cancel()
            if b" is for third alone" in first:  # of a stream each answer has its own error
                return grpc.StatusCode.PERMISSION_DENIED
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _Adds(metadata: Any) -> Any:
    import grpc

    class Adds(grpc.StreamStreamClientInterceptor):  # type: ignore[misc]
        def intercept_stream_stream(self, proceed: Any, details: Any, requests: Any) -> Any:
            return proceed(details._replace(metadata=metadata), requests)

    return Adds()


def test_rows_for_whoever_has_a_token_and_for_nobody_else_however_often_they_were_asked_for(scene: Scene) -> None:
    """Reactors answer what Python has answered before; not to one without a token."""
    reader, reactors = scene.secrets[Role.READER], scene.server.service.reactors
    before = reactors.answers
    with Client(scene.server.url, token=reader) as client, Client(scene.server.url) as stranger:
        for number in range(1000):
            if number >= 20 and reactors.answers > before + 5:
                break
            np.testing.assert_array_equal(client.lookup("ctr", "item_id", KEYS), items(KEYS))
            with pytest.raises(Unauthorized, match="takes a token"):
                stranger.lookup("ctr", "item_id", KEYS)
    assert reactors.answers > before + 5
    with (
        Client(scene.server.url, token=scene.secrets["of another model"]) as other,
        pytest.raises(Forbidden, match="third"),
    ):
        other.lookup("ctr", "item_id", KEYS)


def test_an_admin_of_some_models_follows_their_loads_and_knows_of_no_others(scene: Scene) -> None:
    (root,) = scene.server.service.settings.source_root
    third, fourth = (write_small(root, name, "item") for name in ("third", "fourth"))
    with (
        quick_build.in_process(),
        Client(scene.server.url, token=scene.secrets[Role.ADMIN]) as admin,
        Client(scene.server.url, token=scene.secrets["of another model"]) as limited,
    ):
        limited.load_snapshot(third)
        with pytest.raises(Forbidden, match="third alone: not for 'fourth'"):
            limited.load_snapshot(fourth)
        job = admin.start_load(fourth, model="fourth")
        for asked in (limited.job, limited.cancel, limited.acknowledge):
            with pytest.raises(NotFound, match=f"no job '{job}'"):
                asked(job)
        assert eventually(lambda: admin.job(job)["finished_at"], "the load to end")
        with (
            Client(scene.server.url, token=scene.secrets[Role.READER]) as reader,
            pytest.raises(Forbidden, match="has the role reader"),
        ):
            reader.job(job)


def test_a_caller_with_many_names_for_the_service_takes_the_reactors_from_nobody(scene: Scene) -> None:
    reactors = scene.server.service.reactors
    with httpx.Client(base_url=scene.server.url, timeout=60) as http:
        for port in range(1, MOST + 10):
            for name in (Role.READER, "of another model"):
                headers = {**scene.headers(name), "host": f"127.0.0.1:{port}"}
                assert http.get("/v2", headers=headers).status_code == 200
    head, keys = planned(len(KEYS), **scene.headers(Role.WRITER))
    with socket.create_connection(("127.0.0.1", scene.server.port), timeout=60) as made:

        def by_reactor() -> bool:
            before = reactors.answers
            made.sendall(head + keys)
            assert answer(made)[0].startswith(b"HTTP/1.1 200")
            return bool(reactors.answers > before)

        eventually(by_reactor, "reactors to answer another caller")


def test_a_token_that_is_revoked_while_a_connection_is_busy_is_refused_within_seconds(scene: Scene) -> None:
    token, secret = scene.held.create(Role.READER)
    with Client(scene.server.url, token=secret) as client:
        eventually(lambda: _answered(client), "the new token to be taken")
        for _ in range(20):
            client.lookup("ctr", "item_id", KEYS)
        scene.held.revoke(token.id)
        eventually(lambda: not _answered(client), "the token to be refused")


def test_a_token_that_ends_while_a_connection_is_busy_is_refused_within_seconds(scene: Scene) -> None:
    end = datetime.now(UTC) + timedelta(seconds=4)
    _, secret = scene.held.create(Role.READER, expires_at=end)
    with Client(scene.server.url, token=secret) as client:
        eventually(lambda: _answered(client), "the new token to be taken")
        for _ in range(20):
            client.lookup("ctr", "item_id", KEYS)
        assert datetime.now(UTC) < end, "the machine is too slow to see it answered"
        eventually(lambda: not _answered(client), "the token to be refused")
    assert datetime.now(UTC) >= end


def _answered(client: Client) -> bool:
    try:
        client.lookup("ctr", "item_id", KEYS)
    except Unauthorized:
        return False
    return True


def test_with_tokens_other_hosts_may_be_listened_on_if_their_names_are_said(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, host="0.0.0.0")
    with pytest.raises(ConfigError, match="token create"):
        check_settings(settings)
    TokenFile(settings.data / "tokens.json").create(Role.ADMIN)
    check_settings(settings_for(tmp_path, host="0.0.0.0", allowed_host=["embeddings.example"]))


def test_no_start_without_a_file_of_tokens_that_was_named_or_was_there_once(tmp_path: Path) -> None:
    named = settings_for(tmp_path, tokens=tmp_path / "typo.json")
    with pytest.raises(
        ConfigError, match=r"expected a file at .*typo\.json.* token create --role admin --tokens .*typo"
    ):
        check_settings(named)
    TokenFile(tmp_path / "typo.json").create(Role.READER)
    check_settings(named)

    held = TokenFile(settings_for(tmp_path).data / "tokens.json")
    with pytest.raises(NotFound):
        held.revoke("0" * 12)
    check_settings(settings_for(tmp_path))  # there never was one
    held.create(Role.READER)
    held.path.unlink()
    with pytest.raises(
        ConfigError, match=r"tokens\.json is gone: there were tokens, as tokens\.json\.lock beside it says"
    ):
        check_settings(settings_for(tmp_path))
    held.path.with_name("tokens.json.lock").unlink()
    check_settings(settings_for(tmp_path))


def test_every_start_that_is_open_beyond_loopback_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_settings(settings_for(tmp_path))
    assert caplog.records == []
    check_settings(settings_for(tmp_path, host="0.0.0.0", allow_open_network=True))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "whoever reaches the port may do everything" in caplog.text


def test_a_name_that_was_not_said_is_refused_with_the_right_token_too(scene: Scene) -> None:
    """A page that rebinds its name to this address has no token; a name that nobody said is a mistake of the set-up."""
    headers = {**scene.headers(Role.ADMIN), "host": "rebound.example"}
    answer = httpx.get(f"{scene.server.url}/admin/models", headers=headers)
    assert answer.status_code == 403
    assert "allowed_host" in answer.text
