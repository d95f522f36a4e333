"""HTTP to a service: one pool of connections, and the service's refusals turned back into our errors.

Any thread may use one `Transport`; it holds no state but its connections. Nothing is sent twice: a
request that failed on its way is the caller's to repeat (look-ups and deltas may always be repeated).
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np

from tierstore.client import wire
from tierstore.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    SequenceGap,
    TierstoreError,
    TooLarge,
    Unreachable,
)

CONNECT_TIMEOUT_S = 5.0


class Transport:
    """Constant after construction, but for the pool of connections inside, which has its own lock."""

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        """Raises InvalidInput for a `url` that is not `http://host[:port]` or `https://…`."""
        try:
            self.url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise InvalidInput(f"expected a url such as http://127.0.0.1:8000, came {url!r}: {error}") from error
        if self.url.scheme not in ("http", "https") or not self.url.host:
            raise InvalidInput(f"expected a url such as http://127.0.0.1:8000, came {url!r}")
        headers = {"Accept-Encoding": "identity", "User-Agent": "tierstore"}  # vectors do not compress
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
            trust_env=not _is_loopback(self.url.host),  # a proxy for the outside is none for this machine
        )

    def json(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """Send `body` as JSON (or `content=` as it is) and return the JSON that comes back, None if it is empty."""
        if body is not None:
            more["json"] = body
        try:
            response = self._http.request(method, path, **more)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise error_of(response.status_code, response.headers, response.content)
        try:
            return response.json() if response.content else None
        except ValueError as error:
            raise TierstoreError(
                f"{self.url} answered {method} {path} with something that is not JSON: is it a tierstore?"
            ) from error

    def succeeds(self, path: str) -> bool:
        """Whether GET `path` answers 2xx. Raises Unreachable if nothing answers."""
        try:
            return self._http.get(path).is_success
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def infer(self, path: str, headers: Mapping[str, str], body: bytes) -> wire.Answer:
        """Send an inference request; its answer is received straight into the memory of the arrays returned."""
        try:
            with self._http.stream("POST", path, headers=headers, content=body) as response:
                if response.is_error:
                    raise error_of(response.status_code, response.headers, response.read())
                header_nbytes = response.headers.get(wire.HEADER_LENGTH)
                length = response.headers.get("Content-Length")
                if header_nbytes is None or length is None:
                    raw = np.frombuffer(response.read(), np.uint8)
                    return wire.answer(raw, len(raw) if header_nbytes is None else int(header_nbytes))
                memory = wire.buffer(int(length), int(header_nbytes))
                at = 0
                for chunk in response.iter_raw():
                    memory[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
                    at += len(chunk)
                return wire.answer(memory, int(header_nbytes))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def close(self) -> None:
        """Close the connections. Requests under way on other threads fail."""
        self._http.close()

    def _unreachable(self, error: httpx.HTTPError) -> Unreachable:
        if isinstance(error, httpx.TimeoutException):
            return Unreachable(f"{self.url} did not answer in time ({type(error).__name__})")
        return Unreachable(f"no service answers at {self.url}: {error}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> TierstoreError:
    """The error that a refusal stands for. `headers` by case-insensitive name."""
    document = _document(body)
    message = str(
        document.get("detail") or document.get("error") or document.get("title") or f"the service answered {status}"
    )
    match status:
        case 401 | 403:
            return Forbidden(message)
        case 404:
            return NotFound(message)
        case 409 if isinstance(document.get("expected_seq"), int):
            return SequenceGap(message, expected_seq=document["expected_seq"])
        case 409:
            return Conflict(message)
        case 413:
            return TooLarge(message)
        case 429 | 503 if "Retry-After" in headers:
            return Overloaded(message, retry_after_s=_seconds(headers["Retry-After"]))
        case 429:
            return Overloaded(message)
        case 503:
            return NotReady(message)
        case _ if 400 <= status < 500:
            return InvalidInput(message)
        case _:
            return TierstoreError(f"the service failed ({status}): {message}")


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        text = body[:200].decode("utf-8", "replace").strip()
        return {"error": text} if text else {}
    return document if isinstance(document, dict) else {"error": str(document)}


def _seconds(value: str) -> float:
    try:
        return max(0.0, float(value))
    except ValueError:
        return 1.0  # the other form of the header, a date, which our service does not send
