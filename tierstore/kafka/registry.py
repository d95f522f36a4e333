"""Schemas of messages by their ids, from a schema registry over HTTP (Confluent's API: `GET /schemas/ids/{id}`).

A schema never changes under its id, so each is asked for once. One thread.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tierstore.errors import ConfigError, DeltaError, Unreachable

TIMEOUT_S = 10.0
LONGEST_S = 30.0  # that a schema may take, with all that it refers to
LARGEST = 16 << 20  # bytes of an answer
MOST_REFERENCES = 200  # of a schema, and of those that it refers to
_PART = 64 << 10
_DOCUMENT = (b"{", b"[")  # how a document begins
PROPERTIES = "schema.registry."  # the beginning of names in a file of properties, which librdkafka does not know
_MISSING = 404


@dataclass(frozen=True, slots=True)
class Schema:
    """kind: AVRO, PROTOBUF or JSON. text: as the registry has it. references: name → text,
    each after what it needs itself.
    """

    kind: str
    text: str
    references: dict[str, str]


class _Reference(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    subject: str
    version: int


class _Answer(BaseModel):
    """A schema as the registry writes it."""

    model_config = ConfigDict(strict=True)

    kind: str = Field("AVRO", alias="schemaType")
    text: str = Field(alias="schema")
    references: list[_Reference] | None = None


class Registry:
    """Asks one registry. properties: `schema.registry.basic.auth.user.info` and `schema.registry.ssl.ca.location`,
    as Confluent's clients name them.
    """

    def __init__(self, url: str, properties: Mapping[str, str] | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"kafka_config: {PROPERTIES}url: expected an http or https URL, got {url!r}")
        if "@" in url:
            raise ConfigError(
                f"kafka_config: {PROPERTIES}url: expected a URL without a password; write "
                f"{PROPERTIES}basic.auth.user.info=USER:PASSWORD"
            )
        self._url = url.rstrip("/")
        given = dict(properties or {})
        user = given.pop(f"{PROPERTIES}basic.auth.user.info", None)
        authority = given.pop(f"{PROPERTIES}ssl.ca.location", None)
        if given:
            raise ConfigError(
                f"kafka_config: {', '.join(sorted(given))}: no such property of a schema registry is known"
            )
        self._headers = {"Accept": "application/vnd.schemaregistry.v1+json"}
        if user is not None:
            self._headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        try:
            self._tls = ssl.create_default_context(cafile=authority) if url.startswith("https://") else None
        except OSError as error:
            raise ConfigError(f"kafka_config: cannot read {authority}: {error}") from error

    def schema(self, number: int, form: str = "") -> Schema:
        """The schema of an id. form: `serialized` for Protobuf.

        DeltaError where there is none, or an invalid one; Unreachable where the registry is silent.
        """
        query = f"?format={form}" if form else ""
        until_s = time.monotonic() + LONGEST_S
        found = self._get(f"/schemas/ids/{number}{query}", until_s)
        if found is None:
            raise DeltaError(f"the schema registry has no schema {number}")
        references: dict[str, str] = {}
        self._collect(found, query, until_s, references, set())
        return Schema(found.kind, found.text, references)

    def _collect(self, schema: _Answer, query: str, until_s: float, found: dict[str, str], requested: set[str]) -> None:
        for of in schema.references or ():
            if of.name in requested:
                continue
            if len(requested) == MOST_REFERENCES:
                raise DeltaError(f"the schema needs more than {MOST_REFERENCES} references")
            requested.add(of.name)
            inner = self._get(f"/subjects/{quote(of.subject, safe='')}/versions/{of.version}{query}", until_s)
            if inner is None:
                raise DeltaError(f"the schema registry has no version {of.version} of {of.subject!r}")
            self._collect(inner, query, until_s, found, requested)
            found[of.name] = inner.text

    def _get(self, path: str, until_s: float) -> _Answer | None:
        request = urllib.request.Request(self._url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._tls) as answer:
                body = b""
                while part := answer.read1(_PART):
                    body += part
                    if len(body) > LARGEST:
                        raise DeltaError(f"the schema registry {self._url}: {path} has more than {LARGEST} bytes")
                    if time.monotonic() > until_s:
                        raise TimeoutError(f"it takes more than {LONGEST_S:.0f} s")
        except urllib.error.HTTPError as error:
            if error.code == _MISSING:
                return None
            raise Unreachable(f"the schema registry {self._url} answers {error.code} to {path}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, DeltaError):
                raise
            raise Unreachable(f"the schema registry {self._url} does not answer: {error}") from error
        try:
            return _Answer.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            if first["type"] == "json_invalid" and body.strip()[:1] not in _DOCUMENT:  # somebody else, on its way
                raise Unreachable(f"the schema registry {self._url} does not answer in JSON to {path}") from error
            raise DeltaError(
                f"the schema registry {self._url}: expected an object with `schema` at {path}: {first['msg']}"
            ) from error
