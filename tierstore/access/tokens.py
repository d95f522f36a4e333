"""Bearer tokens, and client certificates that count as one: created, listed, revoked, and checked;
in one file without secrets.

    tierstore_<id>_<secret>     id: 12 hex digits, secret: 43 characters of base64url (32 random bytes)

The file keeps SHA-256 of the secret. That needs no salt and no slow hash: 256 random bits cannot be guessed. Secrets
are compared in constant time. For a certificate it keeps a name that the certificate has. Whoever changes the file
holds a lock beside it, so that several may; readers need none: the file is replaced whole.

`TokenFile` is for the command line, any process. `Tokens` is for a service: it reads the file again when it has
changed, which it looks for once a second at most, so that a token that was revoked is refused within a second. Once
there has been a file, tokens are needed, even if it is empty, gone, or not to be read: a service never becomes open
while it runs. That there was a file is known at a start by the lock beside it, which stays. Any thread.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tierstore.access.roles import NO_LIMITS, Principal, Rates, Role
from tierstore.arguments import check_name
from tierstore.errors import Corruption, InvalidInput, NotFound, StorageError, TierstoreError, Unauthorized
from tierstore.formats import files
from tierstore.formats.private import make_private
from tierstore.formats.release import of_another_release
from tierstore.types import model_and_head

log = logging.getLogger(__name__)

FORMAT = 1
CHECK_EVERY_S = 1.0
MOST_TOKENS = 10_000
_PREFIX = "tierstore"
_TOKEN = re.compile(rf"{_PREFIX}_([0-9a-f]{{12}})_([A-Za-z0-9_-]{{43}})")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NOBODY = "0" * 64
_MOST_NAME = 255  # characters of a certificate's name


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token, but for its secret; or of a client certificate.

    One of `digest` and `certificate` is set.
    """

    id: str
    role: Role
    models: frozenset[str] | None  # None: all
    created_at: datetime
    expires_at: datetime | None
    note: str
    digest: str | None = None
    certificate: str | None = None  # a name that it has
    rates: Rates = NO_LIMITS

    @property
    def principal(self) -> Principal:
        name = f"token {self.id}" if self.certificate is None else f"certificate {self.certificate}"
        return Principal(name, self.role, self.models, self.rates)

    @property
    def ended(self) -> bool:
        return self.expires_at is not None and self.expires_at <= datetime.now(UTC)

    def document(self) -> dict[str, Any]:
        """The token as the file of tokens has it."""
        return {
            "id": self.id,
            "role": str(self.role),
            "models": None if self.models is None else sorted(self.models),
            "created_at": self.created_at.isoformat(),
            "expires_at": None if self.expires_at is None else self.expires_at.isoformat(),
            "note": self.note,
            **({"sha256": self.digest} if self.certificate is None else {"certificate": self.certificate}),
            **({"rates": asdict(self.rates)} if self.rates else {}),
        }

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> Token:
        """ValueError, TypeError or KeyError for an entry that `document` did not make."""
        models, expires, certificate = entry["models"], entry["expires_at"], entry.get("certificate")
        digest = entry["sha256"] if certificate is None else None
        if not re.fullmatch("[0-9a-f]{12}", entry["id"]) or (digest is not None and not _DIGEST.fullmatch(digest)):
            raise ValueError("expected an id of 12 and a sha256 of 64 hex digits")
        if certificate is not None and not _is_name(certificate):
            raise ValueError("expected a certificate's name as text")
        return cls(
            entry["id"],
            Role(entry["role"]),
            None if models is None else frozenset(map(check_model_name, models)),
            _moment(entry["created_at"]),
            None if expires is None else _moment(expires),
            str(entry["note"]),
            digest,
            certificate,
            check_rates(Rates(**entry.get("rates", {}))),
        )


def check_model_name(name: str) -> str:
    """`name`, if a model or a head may have it; InvalidInput otherwise."""
    model, head = model_and_head(name)
    check_name("model", model)
    if head:
        check_name("head", head)
    return name


def check_rates(rates: Rates) -> Rates:
    """`rates`, if each is a positive number or None; InvalidInput otherwise."""
    for name, rate in asdict(rates).items():
        if rate is not None and (type(rate) not in (int, float) or not 0 < rate < math.inf):
            raise InvalidInput(f"expected a positive number of {name} a second, got {rate!r}")
    return rates


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"expected a time with a zone, got {text!r}")
    return moment


def _is_name(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= _MOST_NAME and text.isprintable() and text == text.strip()


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _new(
    role: Role,
    models: Collection[str] | None,
    expires_at: datetime | None,
    note: str,
    rates: Rates,
    **credential: str,
) -> Token:
    """A token with an id of its own; `credential` is its digest, or the certificate's name."""
    if models is not None and not models:
        raise InvalidInput("expected the name of at least one model, or none of them for all models")
    if expires_at is not None and (expires_at.tzinfo is None or expires_at <= datetime.now(UTC)):
        raise InvalidInput(f"expected a time to come, with a zone, for the end of the token, got {expires_at}")
    names = None if models is None else frozenset(map(check_model_name, models))
    created = datetime.now(UTC).replace(microsecond=0)
    return Token(
        secrets.token_hex(6), role, names, created, expires_at, note[:200], rates=check_rates(rates), **credential
    )


class TokenFile:
    """The file of tokens, for those that change it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tokens(self) -> list[Token]:
        """All tokens, oldest first. NotFound where there is no file yet, Corruption for one that is not ours."""
        return list(_read(self.path).values())

    def create(
        self,
        role: Role,
        models: Collection[str] | None = None,
        *,
        expires_at: datetime | None = None,
        note: str = "",
        rates: Rates = NO_LIMITS,
    ) -> tuple[Token, str]:
        """A new token, and the text that stands for it, which is known to nobody afterwards.

        `models` limits it to those names; None: all models, also later ones. `expires_at` has a zone.
        `rates` is what its holder may ask for in a second.
        """
        secret = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
        token = _new(role, models, expires_at, note, rates, digest=_digest(secret))
        self._add(token)
        return token, f"{_PREFIX}_{token.id}_{secret}"

    def admit(
        self,
        certificate: str,
        role: Role,
        models: Collection[str] | None = None,
        *,
        expires_at: datetime | None = None,
        note: str = "",
        rates: Rates = NO_LIMITS,
    ) -> Token:
        """Let callers in by a client certificate that has `certificate` as a URI or a DNS name, or
        without either as its common name.
        """
        if not _is_name(certificate):
            raise InvalidInput(
                f"expected the name of a certificate, 1 to {_MOST_NAME} characters, got {certificate[:80]!r}"
            )
        token = _new(role, models, expires_at, note, rates, certificate=certificate)
        self._add(token)
        return token

    def _add(self, token: Token) -> None:
        with self._changing() as tokens:
            if len(tokens) >= MOST_TOKENS:
                raise InvalidInput(f"there are {MOST_TOKENS:,} tokens already; revoke some")
            same = (
                one for one in tokens.values() if token.certificate is not None and one.certificate == token.certificate
            )
            if (existing := next(same, None)) is not None:
                raise InvalidInput(
                    f"certificate {token.certificate!r} has an entry already, {existing.id} ({existing.role}); revoke "
                    "that first"
                )
            tokens[token.id] = token

    def revoke(self, token_id: str) -> Token:
        """Forget a token. NotFound if there is none of that id."""
        self.tokens()  # where there is no file, no lock says that there was one
        with self._changing() as tokens:
            token = tokens.pop(token_id, None)
            if token is None:
                raise NotFound(
                    f"no token {token_id[:80]!r} in {self.path}; `tierstore token list` shows those there are"
                )
        return token

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Token]]:
        """The tokens, to be changed; kept at the end of the block unless it fails. One process at a time."""
        files.make_dir(self.path.parent)
        lock = self._open_lock()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                tokens = _read(self.path)
            except NotFound:
                tokens = {}
            yield tokens
            document = {"format": FORMAT, "tokens": [token.document() for token in tokens.values()]}
            files.publish_record(self.path, document, private=True)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open too
            os.close(lock)

    def _open_lock(self) -> int:
        path = lock_of(self.path)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                make_private(lock, self.path)  # root may have made it: the owner of the file has to open it too
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            raise StorageError(f"cannot change {self.path}: {error.strerror or error}") from error
        return lock


def lock_of(path: Path) -> Path:
    """The lock of a file of tokens. Where it is and the file is not, there were tokens."""
    return path.with_name(f"{path.name}.lock")


def _read(path: Path) -> dict[str, Token]:
    """Tokens by id. NotFound, Corruption or StorageError where there are none to be had."""
    document = files.read_json(path)
    if document.get("format") != FORMAT:
        raise of_another_release(path, document.get("format"), str(FORMAT), document)
    try:
        tokens = [Token.parse(entry) for entry in document["tokens"]]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Corruption(f"{path} is invalid ({error!r}); restore it, or remove it and create tokens again") from error
    return {token.id: token for token in tokens}


class Tokens:
    """The tokens that a running service goes by."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Corruption or StorageError for a file that is there and cannot be read: a service must not start open."""
        self.path = path
        self._clock = clock
        # guarded by _lock; the tokens are replaced whole, so that readers need no lock
        self._lock = threading.Lock()
        self._tokens: Mapping[str, Token] = {}
        self._certificates: Mapping[str, Token] = {}  # by their names
        self._required = False
        self._stamp: tuple[int, ...] | None = None
        self._next_s = 0.0
        self._ends: datetime | None = None  # when the next of the tokens ends
        self.problem: str | None = None  # why the file could not be read again; those read before go on
        self.generation = 0  # moved on by every change, and by every token that ends
        self._reload(raising=True)

    @property
    def required(self) -> bool:
        """Whether callers need a token: there is a file of tokens, or there was one."""
        self.refresh()
        return self._required

    def refresh(self) -> None:
        """Read the file again if it has changed; looked for once in `CHECK_EVERY_S`."""
        if self._clock() >= self._next_s and self._lock.acquire(blocking=False):
            try:
                self._reload(raising=False)
            finally:
                self._lock.release()

    def principal(self, authorization: str | bytes | None) -> Principal:
        """The caller whose `Authorization` header, or gRPC metadata, this is. Unauthorized without a good token."""
        self.refresh()
        if authorization is None:
            raise Unauthorized("this service takes a token: send `Authorization: Bearer <token>`")
        text = authorization.decode("latin-1") if isinstance(authorization, bytes) else authorization
        scheme, _, credentials = text.partition(" ")
        match = _TOKEN.fullmatch(credentials.strip()) if scheme.lower() == "bearer" else None
        if match is None:
            raise Unauthorized("expected `Authorization: Bearer tierstore_…`; `tierstore token create` makes one")
        token = self._tokens.get(match[1])
        # the same work for an id that there is and for one that there is not
        same = hmac.compare_digest(_digest(match[2]), (token and token.digest) or _NOBODY)
        if token is None or not same:
            raise Unauthorized("the token is not known here; it may have been revoked")
        return self._principal_of(token)

    def of_certificate(self, names: Sequence[str]) -> Principal:
        """The caller whose client certificate has these names; of several that have an entry the first counts."""
        self.refresh()
        token = next((self._certificates[name] for name in names if name in self._certificates), None)
        if token is None:
            raise Unauthorized(
                f"the client certificate of {', '.join(map(repr, names))[:200]} has no role here: send a token, "
                "or create an entry with `tierstore token create --certificate NAME`"
            )
        return self._principal_of(token)

    @staticmethod
    def _principal_of(token: Token) -> Principal:
        if token.ended:
            assert token.expires_at is not None
            raise Unauthorized(f"{token.principal.name} ended at {token.expires_at.isoformat()}; create another one")
        return token.principal

    @property
    def next_end(self) -> datetime | None:
        """When the next of the tokens that are good ends; None where none will."""
        return self._ends

    def _reload(self, *, raising: bool) -> None:
        self._next_s = self._clock() + CHECK_EVERY_S
        if self._ends is not None and self._ends <= datetime.now(UTC):
            self._ends = _next_end(self._tokens)
            self.generation += 1
        try:
            stamp = _stamp(self.path)
            if stamp == self._stamp:
                return
            if stamp is not None and not self._required:  # before it is read: one that cannot be keeps everybody out
                self._required = True
                self.generation += 1
            tokens = {} if stamp is None else _read(self.path)
        except TierstoreError as error:
            if raising:
                raise
            if self.problem is None:
                log.error("tokens are not read again, those read before go on: %s", error)
            self.problem = str(error)
            return
        if stamp is None and self._required:  # gone: nobody gets in until it is back
            log.error("%s is gone: all tokens are refused", self.path)
        self._stamp, self._tokens, self._ends, self.problem = stamp, tokens, _next_end(tokens), None
        self._certificates = {one.certificate: one for one in tokens.values() if one.certificate is not None}
        self.generation += 1


def _next_end(tokens: Mapping[str, Token]) -> datetime | None:
    """When the next of the tokens that have not ended ends; None where none will."""
    now = datetime.now(UTC)
    return min(
        (token.expires_at for token in tokens.values() if token.expires_at and token.expires_at > now), default=None
    )


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What tells one file from the next; None where there is no file."""
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
