"""Requests of other nodes over HTTP: fronts, and peers that catch up from this node or copy its models.

See `tiers/upstream/wire.py` for the bytes, docs/upstream.md and docs/several-nodes.md for the use.

Runs on the event loop. Reactors answer requests for rows in memory, once a request of the same kind was answered here;
other requests are answered at once if they have few keys and memory has the rows. Work that may wait goes to the
pools.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from tierstore.access.rules import is_listed
from tierstore.engine.operations.explain import MOST_KEYS
from tierstore.engine.operations.for_peers import READ_BYTES
from tierstore.engine.operations.fronts import StoredRead
from tierstore.errors import InvalidInput, NotFound, shown
from tierstore.formats.backups import FILES
from tierstore.service.context import Service
from tierstore.service.error_status import HttpError
from tierstore.service.http.application import ProtocolApplication, allow
from tierstore.service.http.messages import (
    Headers,
    Receive,
    Response,
    Scope,
    caller_of,
    json_response,
    principal_of,
    read_body,
)
from tierstore.service.limits.worker_pool import Reservation
from tierstore.tiers.upstream import wire
from tierstore.types import NAME, Keys

DIRECT_KEYS = 2048  # of a request that is answered on the loop if all of them are in memory: a fifth of a millisecond
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

    async def _answer(self, scope: Scope, receive: Receive, holding: Reservation, began_ns: int) -> Response:
        kind, words = _parse(scope["path"])
        query = _Query(scope)
        pool = self._service.admin_pool
        if kind == "rows":
            allow(scope["method"], "POST")
            return await self._rows(scope, receive, holding, began_ns, words)
        if kind == "explain":
            allow(scope["method"], "POST")
            return await self._explain(scope, receive, holding, words)
        if kind == "image":
            allow(scope["method"], "POST")
            return json_response(await pool.run(self._peers.image, words[0]))
        allow(scope["method"], "GET")
        if kind == "logs":
            logs = await pool.run(self._peers.logs)
            return json_response({"node": self._peers.node, "copying": self._service.copying, "models": logs})
        if kind == "log digest":
            after, upto = query.number("after"), query.number("upto")
            return json_response({"digest": await pool.run(self._peers.digest, words[0], after, upto)})
        if kind == "image file":
            begin, count = query.number("begin"), query.number("count")
            holding.reserve(min(count, READ_BYTES))
            return Response(200, [await pool.run(self._peers.read, words[0], words[1], begin, count)], _OCTETS)
        if kind == "state":  # microseconds for each model
            return json_response(self._fronts.state(query.text("front"), query.versions("serves")))
        if kind == "deltas":
            after, count = query.number("after"), query.number("count")
            return Response(200, await pool.run(self._fronts.deltas, words[0], after, count), _OCTETS)
        model, number, line = words[0], int(words[1]), query.text("line")
        if kind == "version":
            return json_response(await pool.run(self._fronts.version, model, number, line))
        return Response(200, [await pool.run(self._fronts.file, model, number, line, words[2])], _OCTETS)

    async def _rows(
        self, scope: Scope, receive: Receive, holding: Reservation, began_ns: int, words: list[str]
    ) -> Response:
        headers: Headers = dict(scope["headers"])
        body = await read_body(receive, headers, wire.MOST_REQUEST_BYTES, holding)
        request = _decode(body)
        self._admit(scope, words[0], len(body), len(request.codes))
        if len(request.codes) > DIRECT_KEYS:
            caller = caller_of(scope, headers, began_ns)
            read, chunks = await self._service.lookup_pool.run(self._read, words, request, caller=caller)
        else:
            read = self._begin(words, request)
            chunks = await self._later(read) if read.waits else read.finish()
        if (plans := self._service.plans) is not None:  # for reactors to answer the next request of this kind
            plans.learn_rows(words[0], read.view, read.table, scope["path"], request.line)
        holding.reserve(sum(map(len, chunks)))
        return Response(200, chunks, _OCTETS)

    async def _explain(self, scope: Scope, receive: Receive, holding: Reservation, words: list[str]) -> Response:
        body = await read_body(receive, dict(scope["headers"]), _EXPLAIN_BYTES, holding)
        line, upto, codes = _decode_explain(bytes(body))
        self._admit(scope, words[0], len(body), len(codes))
        run = self._service.explain_pool.run
        return json_response(await run(self._fronts.explain, words[0], int(words[1]), words[2], line, upto, codes))

    def _admit(self, scope: Scope, model: str, nbytes: int, keys: int) -> None:
        """Charge a request to its caller and its model. RateLimited if one of them has used up its rates."""
        if (charge := self._service.rates.admit(principal_of(scope), model, nbytes)) is not None:
            charge.keys(keys)

    def _begin(self, words: list[str], request: wire.RowsRequest) -> StoredRead:
        return self._fronts.rows(words[0], int(words[1]), words[2], request)

    def _read(self, words: list[str], request: wire.RowsRequest) -> tuple[StoredRead, list[bytes | memoryview]]:
        read = self._begin(words, request)
        return read, read.finish()

    async def _later(self, read: StoredRead) -> list[bytes | memoryview]:
        try:
            pending = self._service.lookup_pool.run(read.finish)
        except BaseException:
            read.close()
            raise
        pending.add_done_callback(lambda _: read.close())  # if it was not run
        return await asyncio.shield(pending)  # if this task is cancelled, the thread goes on with the view


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
