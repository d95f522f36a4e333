"""The same bytes to reactors that answer what they can, and to others that leave all to Python: the answers are to be the same.

`python -m tools.fuzz_reactor --count 100000 --seed 1`, from the root of the repository.

Two services over one store: the second one learns no plan, so its reactors find where requests end, and no more. That is
compared with llhttp by tests/wire/test_http1_frame.py. An exchange is a few
requests (`fuzz_requests.py`), whole or spoiled, cut into packets; it is a function of the seed and its number. Behind each comes a question
that names it, so it shows whether the connection still stands, and where the next request was taken to begin. In a share of them the client ends
its side (`--half-closes`): it gets what it would have got otherwise, and then the end of the connection.

What may differ, and why, is in `Fuzzer._look_again`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import re
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import httptools
import numpy as np
import uvloop

import tierstore
from tierstore.config import load_settings
from tierstore.engine.store import Store
from tierstore.service.context import Service
from tierstore.service.server import ServerThread
from tools.fuzz_requests import ROWS, Exchange, Template, make_exchange

QUIET_S = 0.4  # without a byte: nothing more is coming
PATIENCE_S = 20.0  # where the other side has more
AT_ONCE = 24  # exchanges
HALF_CLOSES = 0.15  # the share of exchanges whose client ends its side
DIMS = {"item": 16, "half": 5, "big": 4, "one": 8, "user": 4}
COMPILING_S = 1800.0  # at most, until there are reactors


# --- what is served


def write_models(root: Path) -> Iterator[Path]:
    """Snapshots: `ctr` has every kind of feature that is looked up by number, hashed ones among them, `one` has one, `words` has strings, `scored` a dense part."""
    random_rows = np.random.default_rng(11)

    def rows(n: int, table: str) -> np.ndarray:
        return random_rows.standard_normal((n, DIMS[table])).astype(np.float32)

    keys = np.arange(ROWS, dtype=np.int64)
    with tierstore.SnapshotWriter(root / "ctr", model="ctr", version=3) as writer:
        writer.table("item", dim=DIMS["item"], default=[0.25] * DIMS["item"]).write(keys, rows(ROWS, "item"))
        writer.table("half", dim=DIMS["half"], dtype="float16", default="mean").write(keys[:500], rows(500, "half"))
        few = np.array([5, 1 << 63, (1 << 64) - 1, *range(100, 200)], np.uint64)
        writer.table("big", dim=DIMS["big"], key="uint64").write(few, rows(len(few), "big"))
        writer.feature("item_id", table="item")
        writer.feature("half", table="half")
        writer.feature("big", table="big")
        writer.feature("clicked", table="item", combiner="mean")
        writer.feature("padded", table="half", combiner="sum", padding_key=0)
        writer.feature("plain_padded", table="half", padding_key=7)
        writer.feature("rest", table="item", hash={"mod": ROWS})
        writer.feature("unsigned", table="item", hash={"mod": 500, "key": "uint64"})
        writer.feature("seeded", table="item", combiner="sum", padding_key=3, hash={"mod": 500, "seed": 9})
        writer.feature("hashed_word", table="item", hash={"mod": ROWS, "key": "string"})
        writer.warmup("item", keys[:300])
    yield root / "ctr"
    with tierstore.SnapshotWriter(root / "one", model="one", version=1) as writer:
        writer.table("one", dim=DIMS["one"]).write(keys[:1000], rows(1000, "one"))
        writer.feature("item_id", table="one")
    yield root / "one"
    with tierstore.SnapshotWriter(root / "words", model="words", version=1) as writer:
        writer.table("one", dim=DIMS["one"], key="string").write([f"w{i}" for i in range(50)], rows(50, "one"))
        writer.feature("word", table="one")
    yield root / "words"
    with tierstore.SnapshotWriter(root / "scored", model="scored", version=1) as writer:
        writer.table("user", dim=DIMS["user"], default=[0.25] * DIMS["user"]).write(keys[:1000], rows(1000, "user"))
        writer.feature("user", table="user")
        writer.feature("bag", table="user", combiner="mean")
        writer.feature("many", table="user", padding_key=0)
        writer.warmup("user", keys[:1000])
        writer.dense(dense_part())
    yield root / "scored"


def dense_part() -> bytes:
    """A sum of one row an item, a pooled one, two rows and a number, times a number; and that number as an integer."""
    from tests.predict import onnx_models as om

    nodes = [
        om.node("ReduceSum", "user one", "a", keepdims=1),
        om.node("ReduceSum", "bag one", "b", keepdims=1),
        om.node("ReduceSum", "many both", "c", keepdims=0),
        om.node("Unsqueeze", "c one", "d"),
        om.node("Sum", "a b d hour", "sum"),
        om.node("Mul", "sum scale", "score"),
        om.node("Cast", "hour", "whole", to=om.INT64),
    ]
    rows = ["batch", DIMS["user"]]
    inputs: om.Ports = {
        "user": (om.FLOAT, rows),
        "bag": (om.FLOAT, rows),
        "many": (om.FLOAT, ["batch", 2, DIMS["user"]]),
    }
    inputs |= {"hour": (om.FLOAT, ["batch", 1]), "scale": (om.FLOAT, [])}
    outputs: om.Ports = {"score": (om.FLOAT, ["batch", 1]), "whole": (om.INT64, ["batch", 1])}
    return om.build(nodes, inputs, outputs, {"one": np.array([1]), "both": np.array([1, 2])})


def change_some(store: Store, root: Path) -> None:
    """A delta that is folded, and one that stays laid over the tables."""
    for seq in (1, 2):
        path = root / f"delta-{seq}"
        with tierstore.DeltaWriter(path, model="ctr", seq=seq, event_time=datetime.now(UTC)) as writer:
            keys = np.arange(seq * 1000, seq * 1000 + 40, dtype=np.int64)
            writer.upsert("item", keys, np.full((40, DIMS["item"]), float(seq), np.float32))
            writer.delete("item", keys - 500)
            writer.upsert("half", keys[:9] - seq * 1000, np.full((9, DIMS["half"]), 1 / 3, np.float32))
        store.apply_delta(path)
        until = time.monotonic() + 60
        while seq == 1 and store.model("ctr").publisher.served.active.overlays and time.monotonic() < until:
            time.sleep(0.01)


class Server:
    """The services, with a port each."""

    def __init__(self, root: Path) -> None:
        self._stack = contextlib.ExitStack()
        settings = load_settings(
            None, data=root / "data", port=0, drain_s=0.0, host_budget="1MiB", lookup_threads=2, disk_threads=2,
            max_request="512KiB", max_response="8MiB", max_queue_s=3600, fold_grace_s=1.0, grpc_port="off",
        )  # fmt: skip
        self.store = self._stack.enter_context(Store(settings))
        for snapshot in write_models(root):
            self.store.load_snapshot(snapshot)
        change_some(self.store, root)
        self.store.label("ctr", "mine", 3)
        self.thread = self._stack.enter_context(ServerThread(self.store))
        alone = self._stack.enter_context(ServerThread(self.store))
        self.ports = self.thread.port, alone.port
        self._wait_for_reactors(self.thread.service, alone.service)
        alone.service.plans = None

    @staticmethod
    def _wait_for_reactors(*services: Service) -> None:
        """Return once they serve: until their kernels are compiled Python would be compared with itself."""
        until = time.monotonic() + COMPILING_S
        for service in services:
            while service.reactors_state != "running":
                if service.reactors_state == "failed" or time.monotonic() > until:
                    raise RuntimeError(f"expected reactors, got {service.reactors_state}")
                time.sleep(0.05)

    @property
    def by_reactors(self) -> int:
        """Look-ups that were answered without Python."""
        return int(self.thread.service.reactors.answers)

    @property
    def handed_on(self) -> str:
        """What reactors left to Python, by the reason."""
        reasons = self.thread.service.reactors.handed_on
        return ", ".join(f"{name}: {count}" for name, count in reasons.items() if count)

    @property
    def promoted(self) -> int:
        keys = self.store.status()["models"]["ctr"]["tables"]["item"]["lookup_keys"]
        return int(keys["disk"])

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


# --- the client


_WISH = re.compile(rb"(?i)\r\nupgrade:")


class _Ends:
    def __init__(self) -> None:
        self.complete = False

    def on_message_complete(self) -> None:
        self.complete = True


def split_requests(data: bytes) -> list[bytes]:
    """`data` cut behind every request that llhttp finds in it; what is no request stays in one."""

    ends = _Ends()
    parser, cuts, fed = httptools.HttpRequestParser(ends), [0], _WISH.sub(b"\r\nx-grade:", data)
    for i in range(len(data)):
        ends.complete = False
        try:
            parser.feed_data(fed[i : i + 1])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            break
        if ends.complete:
            cuts.append(i + 1)
    return [data[a:b] for a, b in pairwise([*cuts, len(data)]) if b > a]


Answer = tuple[int, tuple[tuple[str, str], ...], bytes]  # status, headers without the date and the request's id, body


@dataclass
class Seen:
    """What one side answered, and what became of the connection."""

    answers: list[Answer] = field(default_factory=list)
    end: str = ""  # open: the question behind was answered; closed; waiting: for more bytes

    def __str__(self) -> str:
        return " ".join(f"{status}:{body[:60]!r}" for status, _, body in self.answers) + f" {self.end}"


def _is_overtaken(few: Seen, all_of_them: Seen) -> bool:
    """Whether `few` are `all_of_them`, or those but for some that what ended the connection has overtaken."""
    if few == all_of_them:
        return True
    if few.end != "closed" or all_of_them.end != "closed":
        return False
    last = [answer[0] for answer in few.answers if _ends(answer)]
    return last == [answer[0] for answer in all_of_them.answers if _ends(answer)] and _begins_alike(few, all_of_them)


def _begins_alike(few: Seen, all_of_them: Seen) -> bool:
    answers = [answer for answer in few.answers if not _ends(answer)]
    return answers == all_of_them.answers[: len(answers)]


def _are_refused_alike(*sides: Seen) -> bool:
    """Whether all answered the same, but that some have refused the last request as well, of which a part had come."""
    longest = max(sides, key=lambda seen: len(seen.answers)).answers
    few = min(len(seen.answers) for seen in sides)
    return (
        len(longest) - few <= 1
        and (len(longest) == few or longest[-1][0] >= 400)
        and all(seen.answers == longest[: len(seen.answers)] and seen.end == "closed" for seen in sides)
    )


def _ends(answer: Answer) -> bool:
    """Whether it is what Python says to bytes that are no request."""
    return answer[0] == 400 and ("content-type", "text/plain; charset=utf-8") in answer[1]


class Side:
    """Connections to one port, one at a time, kept as long as they stand."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    def drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def ask(
        self, exchange: Exchange, seen: Seen, other: Seen | None, least: int = 0, quiet_s: float = QUIET_S
    ) -> None:
        """Send an exchange, and note in `seen` what comes.

        Nothing more comes if nothing has for `quiet_s`, there are `least` answers, and the `other` side has no more either.
        """
        loop = asyncio.get_running_loop()
        if self._socket is None:
            self._socket = socket.socket()
            self._socket.setblocking(False)
            await loop.sock_connect(self._socket, ("127.0.0.1", self._port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made, data = self._socket, b""
        sending = asyncio.ensure_future(self._send(made, exchange))
        receiving: asyncio.Future[bytes] | None = None
        until = time.monotonic() + PATIENCE_S
        behind = b"behind-%d'" % exchange.number
        try:
            while True:
                # never cancelled while it may have taken bytes from the socket
                receiving = receiving or asyncio.ensure_future(loop.sock_recv(made, 1 << 18))
                await asyncio.wait((receiving,), timeout=quiet_s)
                if not receiving.done():
                    ahead = other is not None and (other.end == "open" or len(other.answers) != len(seen.answers))
                    ahead |= bool(seen.answers) and _ends(seen.answers[-1])  # which closes the connection
                    if not sending.done() or ((ahead or len(seen.answers) < least) and time.monotonic() < until):
                        continue
                    seen.end = "waiting"
                    break
                more = b"" if receiving.exception() else receiving.result()
                receiving = None
                data += more
                data = _parse_answers(seen, data, ended=not more, half_closes=exchange.half_closes)
                if not more:
                    seen.end = "closed"
                    break
                if seen.answers and behind in seen.answers[-1][2] and not data and not exchange.half_closes:
                    seen.end = "open"
                    break
        finally:
            sending.cancel()
            if receiving is not None:
                receiving.cancel()
            await asyncio.wait((sending, *(() if receiving is None else (receiving,))))
        if data:
            seen.answers.append((0, (), data))

    @staticmethod
    async def _send(made: socket.socket, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            for i, packet in enumerate(exchange.packets):
                if i:
                    await asyncio.sleep(exchange.pause_s)
                await loop.sock_sendall(made, packet)
            if exchange.half_closes:
                if exchange.pause_s:
                    await asyncio.sleep(exchange.pause_s)
                made.shutdown(socket.SHUT_WR)


def _parse_answers(seen: Seen, data: bytes, *, ended: bool, half_closes: bool) -> bytes:
    """Move whole answers from `data` to `seen`, and return what is left.

    That the connection closes is not kept of answers to a client which `half_closes`: it depends on whether its end has come by then.
    """
    while True:
        head, found, remainder = data.partition(b"\r\n\r\n")
        if not found or not (match := re.match(rb"HTTP/1.1 (\d{3}) ", head)):
            return data
        status = int(match[1])
        if status == 100:  # whether it is requests for depends on whether the body has come by then
            data = remainder
            continue
        lines = [line.partition(b": ") for line in head.split(b"\r\n")[1:]]
        headers = {name.decode().lower(): value.decode("latin-1") for name, _, value in lines}
        headers.pop("date", None)
        headers.pop("x-request-id", None)  # which a reactor does not send back
        if half_closes:
            headers.pop("connection", None)
        length = headers.get("content-length")
        if length is None and not ended:
            return data
        size = len(remainder) if length is None else int(length)
        if len(remainder) < size:
            return data
        seen.answers.append((status, tuple(sorted(headers.items())), remainder[:size]))
        data = remainder[size:]


class Fuzzer:
    """Counts what was the same, and keeps what was not."""

    def __init__(self, ports: tuple[int, int], seed: int, half_closes: float = HALF_CLOSES) -> None:
        self._ports, self._seed, self._half_closes = ports, seed, half_closes
        rng = random.Random(f"templates {seed}")
        self.templates = [Template(rng) for _ in range(150)]
        self.counts: Counter[str] = Counter()
        self.different: dict[int, str] = {}  # by the exchange's number

    def run(self, numbers: Iterator[int]) -> None:
        """Make the exchanges of `numbers`.

        Those that differ are made once more, one at a time: on a busy machine a side may have been silent for longer than
        anybody waits, and what ends a connection overtakes answers that are at work. `different` has those that differ again.
        """
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run(numbers, AT_ONCE))
            again, self.different = sorted(self.different), {}
            if again:
                counts, self.counts = self.counts, Counter()
                runner.run(self._run(iter(again), 1))
                counts["different"] = len(self.different)
                counts["the same when made alone"] = len(again) - len(self.different)
                self.counts = counts

    async def _run(self, numbers: Iterator[int], at_once: int) -> None:
        await asyncio.gather(*(self._work(numbers) for _ in range(at_once)))

    async def _work(self, numbers: Iterator[int]) -> None:
        sides = [Side(port) for port in self._ports]
        try:
            for number in numbers:
                await self._compare(make_exchange(self._seed, number, self.templates, self._half_closes), sides)
        finally:
            for side in sides:
                side.drop()

    async def _compare(self, exchange: Exchange, sides: list[Side]) -> None:
        self.counts["exchanges"] += 1
        self.counts["requests"] += len(exchange.messages) - 1
        for quiet_s in (QUIET_S, 20 * QUIET_S):  # on a busy machine one may have been taken for silent too early
            ours, full = Seen(), Seen()
            requests = (
                sides[0].ask(exchange, ours, full, quiet_s=quiet_s),
                sides[1].ask(exchange, full, ours, quiet_s=quiet_s),
            )
            await asyncio.gather(*requests)
            if exchange.half_closes and (ours.end, full.end) != ("closed", "closed"):  # whatever was answered
                how = self._differ(exchange, ours, full, Seen())
            else:
                how = "the same" if ours == full else await self._look_again(exchange, ours, full)
            if ours != full or ours.end != "open":
                for side in sides:
                    side.drop()
            if how != "different" or "waiting" not in (ours.end, full.end) or quiet_s > QUIET_S:
                break
            del self.different[exchange.number]
        self.counts[how] += 1
        self.counts["half-closed"] += exchange.half_closes
        self.counts[ours.end] += 1
        for status, *_ in ours.answers:
            self.counts[f"status {status}"] += 1

    async def _look_again(self, exchange: Exchange, ours: Seen, full: Seen) -> str:
        """Two differed: what Python says to the same requests one by one.

        It reads ahead, and an answer that ends the connection overtakes those that are at work, so some may be missing
        before it. Whether a head is first found too long or wrong depends on how its bytes come.
        A request may have been refused for its head when its body turns out to be none.
        A wish for another protocol it passes over only where a packet begins with that head; else it closes.
        A head whose body has not come it may refuse at once, before it sees that the client has ended its side.
        """
        data = b"".join(exchange.messages)
        one_by_one, alone, parts = Seen(), Side(self._ports[1]), split_requests(data)
        try:
            for i, part in enumerate(parts):
                ends = exchange.half_closes and i == len(parts) - 1
                asked = Exchange(exchange.number, [part], [], [part], half_closes=ends)
                await alone.ask(asked, one_by_one, None, least=i + 1)
                if one_by_one.end == "closed":
                    break
        finally:
            alone.drop()
        if _WISH.search(data) and full.end == "closed":
            same = _begins_alike(ours, one_by_one)
        elif exchange.is_cut and _are_refused_alike(ours, full, one_by_one):
            same = True
        elif full.end == ours.end == "waiting":  # a head may be refused before its body has come; reactors wait for it
            same = full.answers[:-1] == ours.answers and full == one_by_one and full.answers[-1][0] >= 400
        else:
            longest = max(one_by_one, ours, full, key=lambda seen: len(seen.answers))
            refused = longest.answers[len(one_by_one.answers) - 1 : -1]
            same = all(_is_overtaken(seen, longest) for seen in (one_by_one, ours, full)) and (
                longest is one_by_one or all(status >= 400 for status, *_ in refused)
            )
        if same:
            return "the same one by one"
        return self._differ(exchange, ours, full, one_by_one)

    def _differ(self, exchange: Exchange, ours: Seen, full: Seen, one_by_one: Seen) -> str:
        shown = [packet if len(packet) < 700 else packet[:700] + b"..." for packet in exchange.packets]
        self.different[exchange.number] = (
            f"seed {self._seed} exchange {exchange.number} {exchange.spoiled}\n  sent {shown}\n"
            f"  reactor {ours}\n  full    {full}\n  alone   {one_by_one}"
        )
        return "different"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="one exchange, by its number")
    parser.add_argument(
        "--half-closes", type=float, default=HALF_CLOSES, help="share of exchanges whose client ends its side"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin none after that")
    options = parser.parse_args()
    logging.disable()  # most of what is sent is an error to somebody
    until = time.monotonic() + options.seconds

    def numbers() -> Iterator[int]:
        for number in range(options.count) if options.only is None else (options.only,):
            if time.monotonic() > until:
                return
            yield number

    with tempfile.TemporaryDirectory() as root, Server(Path(root)) as server:
        fuzzer = Fuzzer(server.ports, options.seed, options.half_closes)
        began = time.monotonic()
        fuzzer.run(numbers())
        for line in fuzzer.different.values():
            print(line)
        print(
            f"{time.monotonic() - began:.0f} s; {server.by_reactors} look-ups answered without Python; to Python {server.handed_on}"
        )
        print(", ".join(f"{name}: {count}" for name, count in sorted(fuzzer.counts.items())))


if __name__ == "__main__":
    main()
