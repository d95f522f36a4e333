"""Requests of other nodes over HTTP: fronts, and peers that catch up from this node or copy its models.

See `tiers/upstream/wire.py` for the bytes, docs/upstream.md and docs/several-nodes.md for the use.

Reactors answer requests for rows in memory, once a request of the same kind was answered here.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from tierstore.access.rules import is_listed
from tierstore.engine.operations.explain import MOST_KEYS
from tierstore.engine.operations.for_peers import READ_BYTES
from tierstore.errors import InvalidInput, NotFound, shown
from tierstore.formats.backups import FILES
from tierstore.service.context import Service
from tierstore.service.error_status import HttpError
from tierstore.service.http.application import HttpRequest, ProtocolApplication, Route, allow
from tierstore.service.http.messages import (
    Response,
    Scope,
    caller_of,
    json_response,
    principal_of,
)
from tierstore.service.limits.rates import Charge, RateLimits
from tierstore.tiers.upstream import wire
from tierstore.types import NAME, Keys

_OCTETS = wire.OCTETS.encode()
_EXPLAIN_BYTES = 64 << 10
_NAME = NAME.pattern
_PATHS = [
    (kind, re.compile(f"{wire.PREFIX}/{pattern}"))
    for kind, pattern in {
        "state": "models",
        "deltas": f"models/({_NAME})/deltas",
        "rows": f"models/({_NAME})/versions/([0-9]{{1,19}})/tables/({_NAME})/rows",
        "explain": f"models/({_NAME})/versions/([0-9]{{1,19}})/tables/({_NAME})/explain",
        "version": f"models/({_NAME})/versions/([0-9]{{1,19}})",
        "file": f"models/({_NAME})/versions/([0-9]{{1,19}})/files/(.+)",
        "logs": "logs",
        "log digest": f"models/({_NAME})/log",
        "image": f"models/({_NAME})/image",
        "image file": f"models/({_NAME})/image/({FILES}/[^/]+)",
    }.items()
]


class FrontsHttp(ProtocolApplication):
    """The application of everything below `/upstream`."""

    PROTOCOL = "upstream"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._fronts, self._peers = service.fronts, service.peer_side

    def route(self, request: HttpRequest) -> Route:
        kind, words = _parse(request.scope["path"])
        service, charge = self._service, _Charge(self._service.rates, words)
        allow(request.scope["method"], "POST" if kind in ("rows", "explain", "image") else "GET")
        if kind == "rows":
            caller = caller_of(request.scope, request.headers)
            answer = partial(self._rows, words, charge)
            return Route(answer, service.lookup_pool, wire.MOST_REQUEST_BYTES, "", caller, charge.admit)
        if kind == "explain":
            answer = partial(self._explain, words, charge)
            return Route(answer, service.explain_pool, _EXPLAIN_BYTES, admit=charge.admit)
        pool = None if kind == "state" else service.admin_pool  # it takes microseconds for each model
        return Route(partial(self._document, kind, words), pool)

    def _rows(self, words: list[str], charge: _Charge, request: HttpRequest) -> Response:
        wanted = _decode(request.body)
        charge.keys(len(wanted.codes))
        read = self._fronts.rows(words[0], int(words[1]), words[2], wanted)
        chunks = read.finish()
        if (plans := self._service.plans) is not None:  # for reactors to answer the next request of this kind
            plans.learn_rows(words[0], read.view, read.table, request.scope["path"], wanted.line)
        request.holding.reserve(sum(map(len, chunks)))
        return Response(200, chunks, _OCTETS)

    def _explain(self, words: list[str], charge: _Charge, request: HttpRequest) -> Response:
        line, upto, codes = _decode_explain(bytes(request.body))
        charge.keys(len(codes))
        return json_response(self._fronts.explain(words[0], int(words[1]), words[2], line, upto, codes))

    def _document(self, kind: str, words: list[str], request: HttpRequest) -> Response:
        query, fronts, peers = _Query(request.scope), self._fronts, self._peers
        if kind == "image":
            return json_response(peers.image(words[0]))
        if kind == "logs":
            return json_response({"node": peers.node, "copying": self._service.copying, "models": peers.logs()})
        if kind == "log digest":
            return json_response({"digest": peers.digest(words[0], query.number("after"), query.number("upto"))})
        if kind == "image file":
            begin, count = query.number("begin"), query.number("count")
            request.holding.reserve(min(count, READ_BYTES))
            return Response(200, [peers.read(words[0], words[1], begin, count)], _OCTETS)
        if kind == "state":
            return json_response(fronts.state(query.text("front"), query.versions("serves")))
        if kind == "deltas":
            return Response(200, fronts.deltas(words[0], query.number("after"), query.number("count")), _OCTETS)
        model, number, line = words[0], int(words[1]), query.text("line")
        if kind == "version":
            return json_response(fronts.version(model, number, line))
        return Response(200, [fronts.file(model, number, line, words[2])], _OCTETS)


class _Charge:
    """Charges a request to its caller and its model. RateLimited if one of them has used up its rates."""

    def __init__(self, rates: RateLimits, words: list[str]) -> None:
        self._rates, self._words = rates, words
        self._charge: Charge | None = None

    def admit(self, request: HttpRequest) -> None:
        self._charge = self._rates.admit(principal_of(request.scope), self._words[0], len(request.body))

    def keys(self, keys: int) -> None:
        if self._charge is not None:
            self._charge.keys(keys)


def _parse(path: str) -> tuple[str, list[str]]:
    """(the kind of request, the words in the path)."""
    for kind, pattern in _PATHS:
        if (match := pattern.fullmatch(path)) is not None and is_listed(path):
            return kind, list(match.groups())
    raise NotFound(f"no such path: {shown(path)}")


def _decode(body: memoryview) -> wire.RowsRequest:
    try:
        return wire.decode_request(body)
    except ValueError as error:
        raise InvalidInput(str(error)) from error


def _decode_explain(body: bytes) -> tuple[str, int, Keys]:
    """(line, upto, codes)."""
    try:
        document = json.loads(body)
        codes = np.array([int(code) for code in document["codes"]], np.int64)
        if not 1 <= len(codes) <= MOST_KEYS:
            raise ValueError(f"expected 1 to {MOST_KEYS} codes, got {len(codes)}")
        return str(document["line"]), int(document["upto"]), codes
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"expected an object with line, upto and codes: {error}") from error


class _Query:
    """The query of a request. HttpError 400 for missing or malformed parts."""

    def __init__(self, scope: Scope) -> None:
        self._values = parse_qs(scope["query_string"].decode("latin-1"))

    def text(self, name: str) -> str:
        values = self._values.get(name, [])
        if len(values) != 1:
            raise HttpError(400, f"expected one {name} in the query")
        return str(values[0])

    def number(self, name: str) -> int:
        text = self.text(name)
        if not text.isdigit() or len(text) > 19:
            raise HttpError(400, f"{name}: expected a number, got {text[:40]!r}")
        return int(text)

    def versions(self, name: str) -> dict[str, tuple[int, int]]:
        """`{model: (version, seq)}`."""
        try:
            document: Any = json.loads(self.text(name))
            return {str(model): (int(number), int(seq)) for model, (number, seq) in document.items()}
        except (ValueError, AttributeError, TypeError, OverflowError):  # of a number beyond all bounds
            raise HttpError(400, f"{name}: expected an object of [version, seq] by model") from None
