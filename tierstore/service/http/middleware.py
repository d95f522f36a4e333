"""Middleware around every request: the access check, and the log of requests.

A page in a browser on this machine can reach a loopback port too: under a name of its own that it rebinds to 127.0.0.1
(then `Host` is that name), or by a plain cross-site request (then `Origin` is the page's, and `Sec-Fetch-Site` says
so). Both are refused on every path, with and without tokens; but links to our pages may be followed from anywhere.
Python's answers send the request's own id back.

It keeps no state of a request.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from http import HTTPStatus
from urllib.parse import urlsplit

from tierstore.access.audit import ATTEMPT, Audit, AuditedChange
from tierstore.access.roles import CHANGES, LOCAL, NOBODY, Action
from tierstore.access.rules import of_http
from tierstore.engine.events.changes import REQUESTER, requester
from tierstore.errors import Closed, Forbidden, Unauthorized
from tierstore.service.access import Access, Allow, caller_key
from tierstore.service.error_status import CUT_OFF, message_of
from tierstore.service.forwarded import Proxies
from tierstore.service.http.messages import (
    ARRIVED,
    CONNECTION,
    ERROR,
    PEER,
    PRINCIPAL,
    REQUEST_ID,
    SPENT,
    UNNAMED,
    Response,
    Scope,
    error_for_path,
    error_response,
    principal_of,
)
from tierstore.service.request_log import LoggedRequest, RequestLog, one_line

_ADMIN_PATHS = "/admin/"
_HEALTH = ("/v2/health/live", "/v2/health/ready")
_JOB = re.compile("/admin/jobs/[^/]+(/acknowledge)?")
_OWN_SITE = (b"same-origin", b"none")  # a browser's word for its user's own requests, and those of our pages
_SAFE = ("GET", "HEAD", "OPTIONS")  # methods that change nothing


class AccessCheck:
    """Refuses requests under other names, requests of web pages, and those without a sufficient token."""

    def __init__(self, access: Access, allow: Allow, audit: Audit, proxies: Proxies) -> None:
        self._access, self._allow, self._audit, self._proxies = access, allow, audit, proxies

    def refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that may not be made; None if it may."""
        try:
            self._check(scope)
        except Forbidden as error:
            self._access.count(error)
            self._note(scope, error)
            scope[ERROR] = error
            return error_response(error)
        return None

    @contextlib.contextmanager
    def attempt(self, scope: Scope) -> Iterator[AttemptedRequest]:
        """In the block this thread or task works on a request, and sets its response. A change that fails before
        anything with a line in the audit began gets one here.
        """
        attempt = AttemptedRequest()
        action, model = of_http(scope["method"], scope["path"])
        if action not in CHANGES or scope["method"] in _SAFE:
            yield attempt
            return
        # the next request of the connection may be in the same context
        attempts, requesters = ATTEMPT.set(attempt), REQUESTER.set(_requester_of(scope, self._proxies))
        try:
            yield attempt
            response = attempt.response
            if response is not None and response.status >= 400 and not attempt.has_line:
                what = "delta" if action is Action.WRITE else f"{scope['method']} {scope['path']}"
                status, error = HTTPStatus(response.status), scope.get(ERROR)
                why = f"{status.value} {status.phrase}" if error is None else message_of(error)
                self._audit.change(what, requester(), "failed", flush=False, model=model, error=why)
        finally:
            ATTEMPT.reset(attempts)
            REQUESTER.reset(requesters)

    def _note(self, scope: Scope, error: Forbidden) -> None:
        """Note attempts at changes in the audit."""
        method, path = scope["method"], scope["path"]
        if of_http(method, path)[0] in CHANGES:
            self._audit.refused(f"{method} {path}", _requester_of(scope, self._proxies), error)

    def _check(self, scope: Scope) -> None:
        hosts, origins, authorizations = [], [], []
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origins.append(value)
            elif name == b"authorization":
                authorizations.append(value)
            elif name == b"sec-fetch-site" and value not in _OWN_SITE and scope["method"] not in _SAFE:
                raise Forbidden("the request is that of a page of another site, which may change nothing here")
        if not hosts and not origins and scope["path"] in _HEALTH:
            return  # a load balancer's check by HTTP/1.0, which learns only the status
        if len(hosts) != 1:
            raise Forbidden("expected exactly one Host header")
        (host,) = hosts
        self._access.check_host(host)
        for origin in origins:
            if not _is_same_origin(origin.decode("latin-1"), host.decode("latin-1")):
                raise Forbidden(
                    f"Origin {origin[:80].decode('latin-1')!r} is foreign: pages of other sites may not use this "
                    "service"
                )
        peer = scope.get(PEER, UNNAMED)
        if not self._access.required and not self._access.admin_apart:
            self._pass_all(scope, host)
            return
        action, model = of_http(scope["method"], scope["path"])
        if action is Action.ADMIN or scope["path"].lower().startswith(_ADMIN_PATHS):
            self._access.check_listener(peer.admin)
        if not self._access.required:
            self._pass_all(scope, host)
            return
        if action is Action.OPEN:
            return
        if len(authorizations) > 1:
            raise Unauthorized("expected one Authorization header")
        authorization = authorizations[0] if authorizations else None
        principal = scope[PRINCIPAL] = self._access.principal(authorization, peer.names)
        if _JOB.fullmatch(scope["path"]):
            principal.check_role(action)  # its model is checked where it is known
        else:
            principal.check(action, model)
        key = caller_key(peer.names) if authorization is None else authorization
        if key and principal.may_at_all(Action.READ):
            self._allow(host, key, principal)

    def _pass_all(self, scope: Scope, host: bytes) -> None:
        """Accept a request if no caller needs a token."""
        scope[PRINCIPAL] = LOCAL
        self._allow(host, None, LOCAL)


def _is_same_origin(origin: str, host: str) -> bool:
    """Whether the page at `origin` came from the service itself, which was called as `host`."""
    try:
        page, here = urlsplit(origin), urlsplit(f"//{host}")
        usual = {"http": 80, "https": 443}.get(page.scheme)
        ports = page.port or usual, here.port or usual
    except ValueError:
        return False
    # `null`, sent by sandboxed pages, has no name
    return bool(page.hostname) and page.hostname == here.hostname and ports[0] == ports[1]


class AttemptedRequest(AuditedChange):
    """A request that is worked on, and its response."""

    response: Response | None = None


class RequestLogging:
    """What comes last for every request, refused ones included: its id is sent back, and it is logged. Any thread."""

    def __init__(self, log: RequestLog, proxies: Proxies) -> None:
        self._log, self._proxies = log, proxies

    def note(self, scope: Scope, response: Response | None) -> None:
        request_id = _id_of(scope)
        self._send_back(response, request_id)
        self._note(scope, response, scope[ARRIVED], request_id)

    def cut_off(self, scope: Scope) -> Response:
        """The response to a request whose time is over."""
        ended = scope[ERROR] = Closed(CUT_OFF)
        response = error_for_path(scope["path"], ended)
        self.note(scope, response)
        return response

    @staticmethod
    def _send_back(response: Response | None, request_id: bytes | None) -> None:
        if response is not None and request_id is not None:
            response.headers.append((REQUEST_ID, request_id))

    def _note(self, scope: Scope, response: Response | None, began_ns: int, request_id: bytes | None) -> None:
        if response is None or (response.status < 400 and not self._log.of_successes):
            return
        text = None if request_id is None else request_id.decode("latin-1")
        request = LoggedRequest(
            scope["method"], scope["path"], began_ns, lambda: _client_of(scope, self._proxies), text, scope["headers"]
        )
        self._log.note(request, response.status, error=scope.get(ERROR), spent=scope.get(SPENT))


def _id_of(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == REQUEST_ID:
            found: bytes = value
            return found
    return None


def _requester_of(scope: Scope, proxies: Proxies) -> str:
    """The requester's name for the audit."""
    who, request_id = _client_of(scope, proxies) or "somebody", _id_of(scope)
    if request_id is not None:
        who = f"{who} (id {one_line(request_id.decode('latin-1'))})"
    principal = principal_of(scope)
    return who if principal in (LOCAL, NOBODY) else f"{principal.name} at {who}"


def _client_of(scope: Scope, proxies: Proxies) -> str | None:
    client = scope.get("client")
    if client is None:
        connection = scope.get(CONNECTION)
        client = None if connection is None else connection.client
    return None if client is None else proxies.client(client[:2], scope["headers"])
