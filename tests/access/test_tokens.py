"""Tokens: made, kept without their secrets, checked, revoked; and what happens to the file meanwhile."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tierstore.access.roles import LOCAL, Action, Principal, Role
from tierstore.access.tokens import TokenFile, Tokens
from tierstore.errors import Corruption, Forbidden, InvalidInput, NotFound, StorageError, Unauthorized


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "tokens.json"


def bearer(secret: str) -> str:
    return f"Bearer {secret}"


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        (Role.METRICS, {Action.OPEN, Action.METRICS}),
        (Role.READER, {Action.OPEN, Action.ANY, Action.READ}),
        (Role.FRONT, {Action.OPEN, Action.ANY, Action.READ, Action.FRONT}),
        (Role.WRITER, {Action.OPEN, Action.ANY, Action.READ, Action.WRITE}),
        (Role.ADMIN, set(Action)),
    ],
)
def test_a_role_may_do_what_it_says(role: Role, allowed: set[Action]) -> None:
    principal = Principal("somebody", role)
    assert {action for action in Action if principal.may(action, "ctr")} == allowed
    for action in Action:
        if action not in allowed:
            with pytest.raises(Forbidden, match=f"somebody has the role {role}: this takes .*admin"):
                principal.check(action, "ctr")


def test_a_principal_of_some_models_reaches_no_other_and_nothing_of_all() -> None:
    principal = Principal("trainer", Role.WRITER, frozenset({"ctr"}))
    principal.check(Action.WRITE, "ctr")
    principal.check(Action.OPEN)
    principal.check(Action.ANY)
    with pytest.raises(Forbidden, match="trainer is for ctr alone: not for 'rank'"):
        principal.check(Action.READ, "rank")
    with pytest.raises(Forbidden, match="this concerns all models"):
        principal.check(Action.READ)


def test_everybody_is_admin_where_there_are_no_tokens() -> None:
    assert all(LOCAL.may(action) for action in Action)


def test_a_token_is_known_by_its_secret_alone(path: Path) -> None:
    token, secret = TokenFile(path).create(Role.WRITER, ["ctr"], note="the trainer")
    assert secret not in path.read_text()
    assert secret.rsplit("_", 1)[1] not in path.read_text()
    principal = Tokens(path).principal(bearer(secret))
    assert principal == Principal(f"token {token.id}", Role.WRITER, frozenset({"ctr"}))
    assert TokenFile(path).tokens() == [token]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda secret: secret[:-1] + ("A" if secret[-1] != "A" else "B"),
        lambda secret: secret.replace("tierstore_", "tierstore_0", 1)[:-1],
        lambda secret: secret + "x",
        lambda secret: secret.upper(),
        lambda _: "",
        lambda _: "é" * 70,
    ],
)
def test_a_token_that_is_nearly_right_is_refused(path: Path, spoil) -> None:  # type: ignore[no-untyped-def]
    _, secret = TokenFile(path).create(Role.READER)
    with pytest.raises(Unauthorized):
        Tokens(path).principal(bearer(spoil(secret)))


@pytest.mark.parametrize("scheme", ["Basic", "bearer:", ""])
def test_only_bearer_is_a_scheme(path: Path, scheme: str) -> None:
    _, secret = TokenFile(path).create(Role.READER)
    tokens = Tokens(path)
    with pytest.raises(Unauthorized, match="expected `Authorization: Bearer"):
        tokens.principal(f"{scheme} {secret}")
    with pytest.raises(Unauthorized, match="takes a token"):
        tokens.principal(None)
    assert tokens.principal(f"bearer {secret}".encode()).role == Role.READER


def test_one_that_is_revoked_is_refused_within_a_second_and_the_others_go_on(path: Path) -> None:
    held, clock = TokenFile(path), Clock()
    (first, secret), (_, other) = held.create(Role.READER), held.create(Role.ADMIN)
    tokens = Tokens(path, clock)
    assert tokens.principal(bearer(secret)).name == f"token {first.id}"
    held.revoke(first.id)
    clock.now_s += 1.0
    with pytest.raises(Unauthorized, match="revoked"):
        tokens.principal(bearer(secret))
    assert tokens.principal(bearer(other)).role == Role.ADMIN
    with pytest.raises(NotFound, match="token list"):
        held.revoke(first.id)


def test_one_that_is_made_while_a_service_runs_is_taken(path: Path) -> None:
    held, clock = TokenFile(path), Clock()
    tokens = Tokens(path, clock)
    assert not tokens.required
    _, secret = held.create(Role.READER)
    clock.now_s += 1.0
    assert tokens.required
    assert tokens.principal(bearer(secret)).role == Role.READER


def test_one_ends_at_its_time(path: Path) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=0.05)
    _, secret = TokenFile(path).create(Role.READER, expires_at=soon)
    tokens = Tokens(path)
    while datetime.now(UTC) <= soon:
        pass
    with pytest.raises(Unauthorized, match="ended at"):
        tokens.principal(bearer(secret))


def test_one_that_ends_changes_what_others_may_have_kept_of_it(path: Path) -> None:
    """Whoever answers by headers that passed once goes by `generation`; nothing is written when a token ends."""
    soon = datetime.now(UTC) + timedelta(seconds=2)  # a busy machine takes its time to write the tokens
    TokenFile(path).create(Role.READER)
    TokenFile(path).create(Role.READER, expires_at=soon)
    TokenFile(path).create(Role.READER, expires_at=soon + timedelta(hours=1))
    clock = Clock()
    tokens = Tokens(path, clock)
    first = tokens.generation
    clock.now_s += 1.0
    tokens.refresh()
    assert tokens.generation == first
    while datetime.now(UTC) <= soon:
        pass
    for _ in range(2):
        clock.now_s += 1.0
        tokens.refresh()
        assert tokens.generation == first + 1


@pytest.mark.parametrize("end", [datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1)])
def test_an_end_that_is_over_or_has_no_zone_is_refused(path: Path, end: datetime) -> None:
    with pytest.raises(InvalidInput, match="with a zone"):
        TokenFile(path).create(Role.READER, expires_at=end)


def test_no_models_are_refused_and_so_are_names_that_no_model_has(path: Path) -> None:
    with pytest.raises(InvalidInput, match="at least one model"):
        TokenFile(path).create(Role.READER, [])
    with pytest.raises(InvalidInput):
        TokenFile(path).create(Role.READER, ["../ctr"])
    assert not path.exists()


@pytest.mark.parametrize("harm", ["gone", "emptied", "cut", "changed"])
def test_a_service_never_becomes_open_when_the_file_is_harmed(path: Path, harm: str) -> None:
    held, clock = TokenFile(path), Clock()
    token, secret = held.create(Role.READER)
    tokens = Tokens(path, clock)
    text = path.read_text()
    match harm:
        case "gone":
            path.unlink()
        case "emptied":
            held.revoke(token.id)
        case "cut":
            path.write_text(text[: len(text) // 2])
        case "changed":
            path.write_text(text.replace('"reader"', '"admin" '))
    clock.now_s += 1.0
    assert tokens.required
    with pytest.raises(Unauthorized):
        tokens.principal(None)
    if harm in ("cut", "changed"):  # what was read before goes on, and the reason is known
        assert tokens.principal(bearer(secret)).role == Role.READER
        assert tokens.problem is not None
        with pytest.raises(Corruption):
            Tokens(path)  # no start with a file that cannot be trusted
        path.write_text(text)
        os.utime(path, ns=(1, 1))
        clock.now_s += 1.0
        assert tokens.required
        assert tokens.problem is None
    else:
        with pytest.raises(Unauthorized):
            tokens.principal(bearer(secret))


def test_the_file_is_for_its_owner_alone_also_one_that_was_open_to_others(path: Path) -> None:
    held = TokenFile(path)
    lock = path.with_name("tokens.json.lock")
    for before, after in ((None, 0o600), (0o644, 0o600), (0o640, 0o640)):
        if before is not None:
            path.chmod(before)
        held.create(Role.READER)
        assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(lock.stat().st_mode) & 0o007) == (after, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone may give files away")
def test_the_file_stays_with_the_service_s_user_when_root_changes_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir()
    os.chown(path.parent, 10001, 10002)
    held = TokenFile(path)
    token, _ = held.create(Role.READER)
    lock = path.with_name("tokens.json.lock")
    assert {(one.stat().st_uid, one.stat().st_gid) for one in (path, lock)} == {(10001, 10002)}
    os.chown(path, 10003, 10002)
    held.revoke(token.id)
    assert {(one.stat().st_uid, one.stat().st_gid) for one in (path, lock)} == {(10003, 10002)}

    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.fchown", refused)  # as for a user who may write in the directory and is not root
    os.chown(lock, 10004, 10002)
    with pytest.raises(StorageError, match=r"cannot change .*not permitted"):
        held.create(Role.READER)
    assert held.tokens() == []
    assert path.stat().st_uid == 10003


def test_a_first_file_that_cannot_be_read_lets_nobody_in(path: Path) -> None:
    clock = Clock()
    tokens = Tokens(path, clock)
    before = tokens.generation
    path.parent.mkdir()
    path.write_text("{")
    clock.now_s += 1.0
    assert tokens.required
    assert tokens.generation > before, "whoever let everybody in looks again"
    assert "not JSON" in str(tokens.problem)
    with pytest.raises(Unauthorized):
        tokens.principal(None)


@pytest.mark.parametrize(
    "entry", [{}, {"id": "x"}, None, {"role": "king"}, {"models": ["../x"]}, {"created_at": "2020-01-01T00:00:00"}]
)
def test_a_file_that_makes_no_sense_is_refused(path: Path, entry) -> None:  # type: ignore[no-untyped-def]
    TokenFile(path).create(Role.READER)
    document = json.loads(path.read_text())
    del document["xxh3"]
    document["tokens"][0] = {**document["tokens"][0], **entry} if entry else entry
    path.write_text(json.dumps(document))
    with pytest.raises(Corruption):
        Tokens(path)


def test_many_at_once_make_tokens_and_none_is_lost(path: Path) -> None:
    def make() -> None:
        for _ in range(5):
            TokenFile(path).create(Role.READER)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({token.id for token in TokenFile(path).tokens()}) == 20


def test_a_certificate_has_the_role_of_its_entry(path: Path) -> None:
    file = TokenFile(path)
    entry = file.admit("spiffe://example/trainer", Role.WRITER, ["ctr"], note="the trainer")
    file.admit("ranker", Role.READER)
    assert "sha256" not in path.read_text()
    clock = Clock()
    tokens = Tokens(path, clock)
    caller = tokens.of_certificate(["spiffe://example/trainer", "ranker"])
    assert caller == Principal("certificate spiffe://example/trainer", Role.WRITER, frozenset({"ctr"}))
    assert tokens.of_certificate(["other", "ranker"]).role is Role.READER
    with pytest.raises(Unauthorized, match="'other' has no role here"):
        tokens.of_certificate(["other"])
    with pytest.raises(Unauthorized):  # an entry of a certificate is no token
        tokens.principal(bearer(f"tierstore_{entry.id}_{'A' * 43}"))
    file.revoke(entry.id)
    clock.now_s += 2
    with pytest.raises(Unauthorized):
        tokens.of_certificate(["spiffe://example/trainer"])


def test_a_certificate_has_one_entry_and_a_name(path: Path) -> None:
    file = TokenFile(path)
    entry = file.admit("ranker", Role.READER)
    with pytest.raises(InvalidInput, match=rf"certificate 'ranker' has an entry already, {entry.id} \(reader\)"):
        file.admit("ranker", Role.ADMIN)
    for name in ("", " ranker", "a\nb", "x" * 256):
        with pytest.raises(InvalidInput, match="expected the name of a certificate"):
            file.admit(name, Role.READER)
    assert len(file.tokens()) == 1


def test_a_certificates_role_may_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = datetime.now(UTC) + timedelta(hours=1)
    TokenFile(path).admit("ranker", Role.READER, expires_at=end)
    tokens = Tokens(path)
    assert tokens.of_certificate(["ranker"]).role is Role.READER

    class Later(datetime):
        @classmethod
        def now(cls, zone=None):
            return end + timedelta(seconds=1)

    monkeypatch.setattr("tierstore.access.tokens.datetime", Later)
    with pytest.raises(Unauthorized, match="certificate ranker ended at"):
        tokens.of_certificate(["ranker"])


@pytest.mark.parametrize("name", ["", 5, ["a"], "a\nb"])
def test_an_entry_with_a_certificate_that_is_no_name_is_damage(path: Path, name: object) -> None:
    TokenFile(path).admit("ranker", Role.READER)
    document = json.loads(path.read_text())
    document["tokens"][0]["certificate"] = name
    path.write_text(json.dumps(document))
    with pytest.raises(Corruption):
        Tokens(path)
