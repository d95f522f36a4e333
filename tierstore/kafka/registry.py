"""Schemas of messages by their ids, from a schema registry over HTTP (Confluent's API: `GET /schemas/ids/{id}`).

A schema never changes under its id, so each is asked for once. One thread.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from tierstore.errors import ConfigError, DeltaError, Unreachable

TIMEOUT_S = 10.0
LARGEST = 16 << 20  # bytes of an answer
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

        DeltaError where there is none, Unreachable where the registry is silent.
        """
        query = f"?format={form}" if form else ""
        found = self._get(f"/schemas/ids/{number}{query}")
        if found is None:
            raise DeltaError(f"the schema registry has no schema {number}")
        references: dict[str, str] = {}
        self._collect(found, query, references)
        return Schema(str(found.get("schemaType", "AVRO")), str(found["schema"]), references)

    def _collect(self, schema: Mapping[str, Any], query: str, found: dict[str, str]) -> None:
        for of in schema.get("references") or ():
            if of["name"] not in found:
                path = f"/subjects/{quote(of['subject'], safe='')}/versions/{of['version']}{query}"
                inner = self._get(path)
                if inner is None:
                    raise DeltaError(f"the schema registry has no version {of['version']} of {of['subject']!r}")
                self._collect(inner, query, found)
                found[of["name"]] = str(inner["schema"])

    def _get(self, path: str) -> Mapping[str, Any] | None:
        request = urllib.request.Request(self._url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._tls) as answer:
                found = json.loads(answer.read(LARGEST))
        except urllib.error.HTTPError as error:
            if error.code == _MISSING:
                return None
            raise Unreachable(f"the schema registry {self._url} answers {error.code} to {path}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Unreachable(f"the schema registry {self._url} does not answer: {error}") from error
        if not isinstance(found, dict) or "schema" not in found:
            raise Unreachable(f"the schema registry {self._url}: expected an object with `schema` at {path}")
        return found
