"""Who may use a service, from the command line: entries for certificates, and services behind TLS and sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

import tierstore
from tests.certificates import Authority
from tests.cli.conftest import SMALL, Cli, write_snapshot
from tierstore.access.roles import Role
from tierstore.access.tokens import TokenFile
from tierstore.service.server import ServerThread


def test_a_certificate_gets_a_role_and_loses_it(cli: Cli, tmp_path: Path) -> None:
    name = "spiffe://example/trainer"
    made = cli("token", "create", "--role", "writer", "--model", "ctr", "--certificate", name, "--json")
    assert made.code == 0
    assert {"role": "writer", "models": ["ctr"], "certificate": name}.items() <= made.document.items()
    assert "token" not in made.document
    assert name in cli("token", "list").out
    again = cli("token", "create", "--role", "admin", "--certificate", name)
    assert (again.code, "has an entry already" in again.err) == (1, True)
    assert cli("token", "create", "--role", "reader", "--certificate", "ranker").out.startswith(
        "callers with a certificate of ranker are reader; the entry's id is "
    )
    assert cli("token", "revoke", made.document["id"]).code == 0
    assert [entry["certificate"] for entry in cli("token", "list", "--json").document] == ["ranker"]


def test_commands_go_through_a_socket_and_through_tls(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    own, mine = authority.issue("service"), authority.issue("operator", "")
    options = {"tls_cert": own.cert, "tls_key": own.key, "tls_client_ca": authority.ca}
    admin = tmp_path / "admin.sock"
    TokenFile(tmp_path / "data/tokens.json").admit("operator", Role.READER)
    _, secret = TokenFile(tmp_path / "data/tokens.json").create(Role.ADMIN)
    with (
        tierstore.open(
            tmp_path / "data", port=0, source_root=[tmp_path], admin_listen=f"unix:{admin}", **options, **SMALL
        ) as store,
        ServerThread(store) as server,
    ):
        refused = cli("status", "--url", server.admin_url).err
        assert "takes a token" in refused
        assert "TIERSTORE_TOKEN" in refused
        monkeypatch.setenv("TIERSTORE_TOKEN", secret)
        assert cli("load", write_snapshot(tmp_path, 1), "--url", server.admin_url).code == 0
        assert "ctr" in cli("status", "--url", server.admin_url, "--json").document["models"]
        monkeypatch.delenv("TIERSTORE_TOKEN")
        refused = cli("lookup", "ctr", "item_id", "1", "--url", server.url).err
        assert f"the certificate of {server.url} is not trusted" in refused
        assert "TIERSTORE_CA" in refused
        for name, file in (("CA", authority.ca), ("CERT", mine.cert), ("KEY", mine.key)):
            monkeypatch.setenv(f"TIERSTORE_{name}", str(file))
        refused = cli("status", "--url", server.url)
        assert (refused.code, "admin_listen alone" in refused.err) == (1, True)


def test_a_token_for_one_model_does_for_commands_about_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tierstore.open(tmp_path / "data", port=0, source_root=[tmp_path], **SMALL) as store:
        _, secret = TokenFile(store.settings.data / "tokens.json").create(Role.ADMIN, ["ctr"])
        with ServerThread(store) as server:
            monkeypatch.setenv("TIERSTORE_TOKEN", secret)
            monkeypatch.setenv("TIERSTORE_URL", server.url)
            for words in (
                ["load", write_snapshot(tmp_path, 1)], ["load", write_snapshot(tmp_path, 2), "--no-activate"],
                ["canary", "ctr", "2"], ["promote", "ctr"], ["status", "ctr"],
            ):  # fmt: skip
                run = cli(*words)
                assert run.code == 0, run.err
            refused = cli("status")
            assert (refused.code, "name one of its own, as in `tierstore status ctr`" in refused.err) == (1, True)


def test_a_token_is_not_sent_in_clear_to_another_machine(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_TOKEN", "secret")
    url = "http://service.invalid:1"
    assert "it would cross the network in clear" in cli("status", "--url", url).err
    monkeypatch.setenv("TIERSTORE_ALLOW_INSECURE_TOKEN", "1")
    assert "no service answers at" in cli("status", "--url", url).err
    monkeypatch.setenv("TIERSTORE_ALLOW_INSECURE_TOKEN", "perhaps")
    assert "expected 1 or 0, got 'perhaps'" in cli("status", "--url", url).err
