"""The base of `Client` and `AsyncClient`: their arguments, and how full their pools are."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from tierstore.arguments import check_seconds, number_or_none, whole_number
from tierstore.client.attempts import RetryBudget
from tierstore.client.balancing import Balancer
from tierstore.client.operations import Operations
from tierstore.client.settings import Address, ClientSettings, Node, RetryPolicy, TlsFiles, lines_of_headers
from tierstore.client.transport import Transport
from tierstore.errors import InvalidInput, shown

if TYPE_CHECKING:
    from tierstore.client.async_transport import AsyncTransport

SPLIT_KEYS = 1 << 15  # of one request
SPLIT_ITEMS = 2048  # of one request

AnyTransport = TypeVar("AnyTransport", Transport, "AsyncTransport")


class ClientBase(ABC, Generic[AnyTransport]):
    """A running service, or several nodes that serve the same models.

    Args:
        url: where it listens, such as `http://127.0.0.1:8000`, `https://…` or `unix:/run/tierstore.sock`. With
            several, as a list or separated by commas, each request goes to the least busy node and to another
            one if that fails. A node that fails is skipped for a pause, which grows. Verbs that change a node
            need a client of that node alone.
        token: sent as a bearer token, if the service asks for one. To another machine it is sent with TLS alone.
        ca: file of the authorities (PEM) whose services are trusted; None: those that the system trusts.
        cert, key: files with the client's own certificate and its key (PEM), for a service that asks
            for one. Both may be in `cert`.
        allow_insecure_token: send the token without TLS, where something else encrypts.
        timeout_s: of a verb from its beginning to its end, retries included, unless the call names its own.
            It is sent to the service too, which drops requests that nobody waits for any more.
        retries: how often a request is repeated whose connection failed or that the service was too busy for. Look-ups,
            `predict`, reads and deltas are repeated (a delta's seq makes it count once); other changes never.
        backoff_s: the longest wait before the first retry; it doubles with each. The wait is drawn at random.
        hedge_after_s: send a look-up or `predict` a second time after so long without an answer, and use the
            answer that is first. None: never.
        split_keys: keys of one request; a larger look-up is split into several, side by side. None: never.
        split_items: the same for the items of one `predict`. None: never.
        parallel: requests of one call that run at once.
        max_connections: to each node, of all calls together.

    Every verb raises Unreachable when nothing answers, DeadlineExceeded when the time is over, Overloaded when the
    service is too busy, Forbidden when the token does not allow it, and otherwise the errors of the embedded store.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        token: str | None = None,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        allow_insecure_token: bool = False,
        timeout_s: float = 30.0,
        retries: int = 3,
        backoff_s: float = 0.05,
        hedge_after_s: float | None = None,
        split_keys: int | None = SPLIT_KEYS,
        split_items: int | None = SPLIT_ITEMS,
        parallel: int = 4,
        max_connections: int = 32,
    ) -> None:
        addresses = parse_addresses(url)
        retries, parallel = whole_number("retries", retries, 0), whole_number("parallel", parallel, 1)
        max_connections = whole_number("max_connections", max_connections, 1)
        split_keys = number_or_none("split_keys", split_keys, 1)
        split_items = number_or_none("split_items", split_items, 1)
        timeout_s, backoff_s = check_seconds("timeout_s", timeout_s), check_seconds("backoff_s", backoff_s, zero=True)
        if hedge_after_s is not None:
            hedge_after_s = check_seconds("hedge_after_s", hedge_after_s, zero=True)
        retry = RetryPolicy(retries=retries, backoff_s=backoff_s, parallel=parallel)
        files = TlsFiles(ca, cert, key)
        nodes = tuple(
            Node(
                address,
                address.tls_context(files),
                lines_of_headers(address, token, allow_insecure_token=allow_insecure_token),
            )
            for address in addresses
        )
        settings = ClientSettings(nodes, timeout_s, hedge_after_s, split_keys, split_items, max_connections, retry)
        self._budget = RetryBudget(retry.retry_burst, retry.retry_share)
        self._balancer, self._urls = Balancer(len(nodes)), [address.url for address in addresses]
        self._operations = Operations(settings)
        self._transport: AnyTransport = self._make_transport(settings)

    @abstractmethod
    def _make_transport(self, settings: ClientSettings) -> AnyTransport:
        """The transport that carries the operations out."""

    def figures(self) -> dict[str, Mapping[str, float]]:
        """How full the client's pools are: connections, and the budget of retries with its use so far.

        `nodes` has for each URL for how many seconds it is skipped yet; 0: it is used.
        """
        budget = self._budget
        return {
            "connections": self._transport.stats(),
            "repeats": {
                "left": budget.remaining,
                "limit": budget.limit,
                "taken": budget.reserved,
                "refused": budget.refused,
            },
            "nodes": dict(zip(self._urls, self._balancer.pauses(time.monotonic()), strict=True)),
        }


def parse_addresses(urls: str | Sequence[str]) -> list[Address]:
    """The addresses of a client: one URL, several separated by commas, or a list.

    InvalidInput for none, or one named twice.
    """
    words = urls.split(",") if isinstance(urls, str) else list(urls) if isinstance(urls, Sequence) else [urls]
    if not all(isinstance(word, str) for word in words):
        raise InvalidInput(f"expected a url such as http://127.0.0.1:8000, got {shown(urls)}")
    addresses = [Address.parse(word.strip()) for word in words]
    if not addresses:
        raise InvalidInput("url: expected at least one, got none")
    names = [address.url for address in addresses]
    if len(set(names)) < len(names):
        raise InvalidInput(f"url: expected each node once, got {', '.join(names)}")
    return addresses
