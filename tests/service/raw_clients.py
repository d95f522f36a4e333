"""Many HTTP clients at once, as bare sockets on one event loop: a thousand of them cost next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any


def request(path: str, document: Any = None, headers: dict[str, object] | None = None) -> bytes:
    """A request's bytes: a POST of a JSON document, else a GET."""
    body = b"" if document is None else json.dumps(document).encode()
    lines = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Answer:
    """`status` 0: the connection was closed without an answer."""

    def __init__(self, status: int = 0, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.status, self.headers, self.body = status, headers or {}, body

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, message: bytes) -> Answer:
        try:
            self._writer.write(message)
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        except (OSError, asyncio.IncompleteReadError):
            return Answer()
        return Answer(int(head[0].split()[1]), headers, body)

    def close(self) -> None:
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def connections(port: int) -> AsyncIterator[Callable[[], Awaitable[Connection]]]:
    """What makes a connection. All are closed at the end: Python 3.11.2 closes none that nobody refers to any more."""
    made: list[Connection] = []

    async def connect() -> Connection:
        made.append(Connection(*await asyncio.open_connection("127.0.0.1", port)))
        return made[-1]

    try:
        yield connect
    finally:
        for connection in made:
            connection.close()


async def burst(port: int, count: int, message: bytes, each: int = 1) -> list[Answer]:
    """`count` connections that ask `each` times, all at once. Connections that cannot be made count as unanswered."""

    async def one() -> list[Answer]:
        async with connections(port) as connect:
            try:
                connection = await connect()
            except OSError:
                return [Answer()]
            return [await connection.ask(message) for _ in range(each)]

    return [answer for answers in await asyncio.gather(*(one() for _ in range(count))) for answer in answers]


def statuses(answers: list[Answer]) -> Counter[int]:
    return Counter(answer.status for answer in answers)


@contextlib.contextmanager
def many_files(wanted: int = 6000) -> Iterator[None]:
    """Let this process open so many: it has both ends of every connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted, hard)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
