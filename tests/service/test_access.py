"""Access with tokens: every endpoint of every protocol, with no token, a wrong, a revoked, a lesser and a right one.

The endpoints are not listed here where the service can name them itself: the admin interface's by `/openapi.json`, gRPC's
by reflection. So a new one is asked too, and is for admins unless `access/rules.py` says otherwise.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tierstore.access.roles import Action, Principal, Role
from tierstore.access.rules import GRPC, HTTP, of_grpc, of_http
from tierstore.access.tokens import TokenFile
from tierstore.client import Client
from tierstore.engine.store import Store
from tierstore.errors import ConfigError, Forbidden, Unauthorized
from tierstore.service.reactor.allowed import MOST
from tierstore.service.server import ServerThread, check_settings, has_grpc

from .conftest import GRPC as GRPC_PORT
from .conftest import eventually, settings_for
from .scenes import KEYS, items, write_snapshot
from .test_page import CHROMIUM, in_browser
from .test_reactor import answer, planned

OTHER = "elsewhere"  # a model that there is not: whatever is allowed changes nothing
V2 = [
    ("GET", "/v2"),
    ("GET", "/v2/health/live"),
    ("GET", "/v2/health/ready"),
    ("GET", "/v2/models/stats"),
    ("GET", f"/v2/models/{OTHER}"),
    ("GET", f"/v2/models/{OTHER}/ready"),
    ("GET", f"/v2/models/{OTHER}/versions/1/config"),
    ("POST", f"/v2/models/{OTHER}/infer"),
    ("POST", f"/v2/models/{OTHER}/versions/1/infer"),
    ("POST", "/v2/repository/index"),
    ("POST", f"/v2/repository/models/{OTHER}/load"),
    ("POST", f"/v2/repository/models/{OTHER}/unload"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/x/register"),
    ("POST", "/v2/cudasharedmemory/region/x/unregister"),
    ("GET", "/v2/logging"),
    ("GET", "/v2/nowhere"),
]
UPSTREAM = [
    ("GET", "/upstream/models"),
    ("GET", f"/upstream/models/{OTHER}/versions/1"),
    ("POST", f"/upstream/models/{OTHER}/versions/1/tables/item/rows"),
]
V1 = [("GET", f"/v1/models/{OTHER}"), ("GET", f"/v1/models/{OTHER}/metadata"), ("POST", f"/v1/models/{OTHER}:predict")]
PAGES = [("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/metrics"), ("GET", "/nowhere")]


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
    with httpx.Client(base_url=scene.server.url, timeout=60) as http:
        document = http.get("/openapi.json").json()
        admin = [
            (
                method.upper(),
                re.sub(r"\{model\}", OTHER, re.sub(r"\{(version)\}", "1", path)).replace("{", "").replace("}", ""),
            )
            for path, methods in document["paths"].items()
            for method in methods
        ]
        assert len(admin) > 12
        problems = []
        for method, path in [*PAGES, *V2, *V1, *UPSTREAM, *admin]:
            action, model = of_http(method, path)
            for name, principal in scene.principals.items():
                status = http.request(method, path, headers=scene.headers(name), json={}).status_code
                refused = status if status in (401, 403) else None
                if refused != expected(principal, action, model):
                    problems.append(
                        f"{method} {path} with token {name}: {status}, expected {expected(principal, action, model)}"
                    )
        assert problems == []
        paths = {path for _, path in [*PAGES, *V2, *V1, *UPSTREAM, *admin]}
        unused = [
            pattern
            for _, pattern, _ in HTTP
            if not any(re.fullmatch(re.sub(r"\{[^}]*\}", "[^/]+", pattern).replace("/*", ".*"), path) for path in paths)
        ]
        assert unused == ["/v2/models/{model}/trace/setting"], "a rule that no endpoint here meets"


@pytest.mark.skipif(not has_grpc(), reason="extra grpc is not installed")
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
    reader = scene.secrets[Role.READER]
    with Client(scene.server.url, token=reader) as client, Client(scene.server.url) as stranger:
        for _ in range(20):
            np.testing.assert_array_equal(client.lookup("ctr", "item_id", KEYS), items(KEYS))
            with pytest.raises(Unauthorized, match="takes a token"):
                stranger.lookup("ctr", "item_id", KEYS)
    with (
        Client(scene.server.url, token=scene.secrets["of another model"]) as other,
        pytest.raises(Forbidden, match="third"),
    ):
        other.lookup("ctr", "item_id", KEYS)


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


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; on Debian: apt-get install chromium")
def test_the_status_page_asks_for_a_token(scene: Scene, tmp_path: Path) -> None:
    assert "no access" in in_browser(scene.server.url + "/", tmp_path)


def test_with_tokens_other_hosts_may_be_listened_on_if_their_names_are_said(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, host="0.0.0.0")
    with pytest.raises(ConfigError, match="token create"):
        check_settings(settings)
    TokenFile(settings.data / "tokens.json").create(Role.ADMIN)
    check_settings(settings_for(tmp_path, host="0.0.0.0", allowed_host=["embeddings.example"]))


def test_a_name_that_was_not_said_is_refused_with_the_right_token_too(scene: Scene) -> None:
    """A page that rebinds its name to this address has no token; a name that nobody said is a mistake of the set-up."""
    headers = {**scene.headers(Role.ADMIN), "host": "rebound.example"}
    answer = httpx.get(f"{scene.server.url}/admin/models", headers=headers)
    assert answer.status_code == 403
    assert "allowed_host" in answer.text
