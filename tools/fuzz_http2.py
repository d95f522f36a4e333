"""The compiled machine of HTTP/2 beside the packages h2 and hpack: the same headers, messages and errors, and nothing is left behind.

`python -m tools.fuzz_http2 --count 100000 --seed 1`, from the root of the repository. An exchange is a request and what became of it.

A connection is a function of the seed and its number. In most of them a client, which is h2, sends what the protocol allows: header blocks
with Huffman codes and without, tables that are resized, blocks and data cut into any frames, padding, priorities, pings, unknown
frames, streams interleaved, reset, and answered before they have ended, windows from one byte on. Requests have to come as they
were sent, and answers as they were given; in the end nothing is open and no byte is held. In the others the bytes of such a client are spoiled, and go to a server of h2 as well.
What h2 takes the machine has to take, as the same requests; what h2 refuses it has to refuse, and with the same error. What may
differ, and why, is in `fuzz_http2_spoiled.ALIKE`.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections import Counter
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import hpack

from tests.h2_answers import Answers
from tests.h2_machine import SECOND, Machine
from tools.fuzz_http2_requests import (
    PREFACE_BYTES,
    Request,
    Wrong,
    check,
    client,
    fields_of,
    parts_of,
    recut,
    request,
)
from tools.fuzz_http2_spoiled import ALIKE, alike, by_h2, by_machine, spoiled

Settings = h2.settings.SettingCodes
TURNS = 20_000  # of a connection that moves bytes to and fro; more is a connection that hangs


class Talk:
    """One connection of a client that is right."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._machine = Machine(room=rng.choice((1 << 12, 1 << 14, 1 << 17)))
        self._peer, self._got = client(rng), Answers()
        self._window = rng.choice((1, 100, 65535, 65535, 65535, 1 << 20))
        self._tiny = self._window <= 100
        self._requests: dict[int, Request] = {}
        self._open: list[int] = []
        self._came: dict[int, tuple[bytes, bytes, bool]] = {}  # of methods that stream: head, data, whether ended
        self._seen = 0

    def run(self, exchanges: int) -> Counter[str]:
        rng, peer = self._rng, self._peer
        try:
            self._machine.feed(peer.data_to_send()[PREFACE_BYTES:])
            self._got.take(peer, self._machine.take_sent())
            peer.update_settings({Settings.INITIAL_WINDOW_SIZE: self._window})
            self._move()
            at_once, next_stream = rng.choice((1, 4, 90)), 1
            while next_stream < 2 * exchanges or self._open:
                if next_stream < 2 * exchanges and len(self._open) < at_once and rng.random() < 0.6:
                    self._begin(next_stream)
                    next_stream += 2
                for stream in rng.sample(self._open, min(len(self._open), rng.choice((1, 3)))):
                    self._go_on(stream)
                if rng.random() < 0.02:
                    self._change_settings()
                if rng.random() < 0.5:
                    self._move()
                    self._close_up()
            check(self._machine.state.open == 0, "streams are open")
            check(self._machine.state.held == 0, "bytes are held", self._machine.state.held)
            check(self._machine.state.waiting == 0, "blocks wait")
            check(not self._machine.failed and self._got.goodbye is None, "the connection was ended", self._got.goodbye)
        finally:
            self._machine.close()
        counts = Counter(exchanges=len(self._requests))
        counts["refused as they have to be"] = sum(one.refused is not None for one in self._requests.values())
        counts["reset by the client"] = sum(one.reset for one in self._requests.values())
        return counts

    def _change_settings(self) -> None:
        rng = self._rng
        changed = {
            Settings.MAX_FRAME_SIZE: rng.choice((16384, 70000)),
            Settings.HEADER_TABLE_SIZE: rng.choice((0, 100, 4096)),
        }
        if not self._tiny:
            changed[Settings.INITIAL_WINDOW_SIZE] = rng.choice((1000, 65535, 1 << 20))
        which = rng.choice(list(changed))
        self._peer.update_settings({which: changed[which]})

    def _begin(self, stream: int) -> None:
        made = self._requests[stream] = request(self._rng, 300 if self._tiny else 20_000)
        made.complete = not made.body and made.trailers is None
        fields: Any = [
            hpack.NeverIndexedHeaderTuple(*one) if self._rng.random() < 0.1 else hpack.HeaderTuple(*one)
            for one in made.fields
        ]
        self._peer.send_headers(stream, fields, end_stream=made.complete)
        self._open.append(stream)
        self._machine.now += SECOND // 50

    def _go_on(self, stream: int) -> None:
        """Send some more of a request, reset it, or have it answered."""
        rng, one, peer = self._rng, self._requests[stream], self._peer
        if stream in self._got.resets or stream in self._got.ended:
            return
        if rng.random() < 0.01 and one.refused is None and not one.reset:
            peer.reset_stream(stream, rng.choice((0, 8)))
            one.reset = True
            return
        if one.reset:
            return
        if not one.complete:
            left = len(one.body) - one.sent
            room = min(peer.local_flow_control_window(stream), peer.max_outbound_frame_size)
            size = min(left, room, rng.choice((0, 1, 64, 3000, 16384)))
            last = size == left and one.trailers is None
            padding = rng.choice((None, None, None, 0, 7)) if room - size > 8 else None
            if size or last or rng.random() < 0.1:
                data = one.body[one.sent : one.sent + size]
                peer.send_data(stream, data, end_stream=last, pad_length=padding)
                one.sent += size
                one.complete = last
            elif not left and one.trailers is not None:
                peer.send_headers(stream, one.trailers, end_stream=True)
                one.complete = True
        known = stream in self._machine.requests or stream in self._came
        if known and one.refused is None and not one.answered and rng.random() < 0.6:
            self._answer(stream, one)

    def _answer(self, stream: int, one: Request) -> None:
        rng = self._rng
        data = rng.randbytes(rng.choice((0, 1, 20)) if self._tiny else rng.choice((0, 1, 64, 64, 1000, 30_000)))
        one.answered = True
        if not one.streams and rng.random() < 0.5:
            one.answer = 200, [(b"content-type", b"application/grpc")], b"\0" + len(data).to_bytes(4, "big") + data, [(b"grpc-status", b"0")]  # fmt: skip
            gone = not self._machine.answer_call(stream, data)
        else:
            trailers = fields_of(rng, 3) if rng.random() < 0.6 else None
            one.answer = rng.choice((200, 200, 404, 503, 418)), fields_of(rng, 4), data, trailers or None
            status, fields, data, trailers = one.answer
            cuts = parts_of(rng, data, 3)
            gone = False
            for number, part in enumerate(cuts):
                ends = number == len(cuts) - 1
                head = (status, fields) if number == 0 else (0, [])
                gone |= not self._machine.answer(stream, *head, part, trailers if ends else None, ends=ends)
        check(not gone or stream in self._reset_there(), stream, "was gone when it was answered")

    def _reset_there(self) -> set[int]:
        return {stream for kind, stream, _ in self._machine.events if kind == "reset"}

    def _move(self) -> None:
        """Move bytes both ways until neither side has any."""
        rng = self._rng
        for _ in range(TURNS):
            data = self._peer.data_to_send()
            if not data:
                return
            cut = b"".join(recut(rng, data))
            while cut:
                size = rng.choice((1, 9, 10, 100, 5000, len(cut), len(cut), len(cut)))
                self._machine.feed(cut[:size])
                cut = cut[size:]
            check(not self._machine.failed, "the machine ended the connection")
            self._take_events()
            self._got.take(self._peer, self._machine.take_sent())
        raise Wrong("a connection without end")

    def _take_events(self) -> None:
        for kind, stream, data in self._machine.events[self._seen :]:
            head, body, ended = self._came.get(stream, (b"", b"", False))
            if kind == "opened":
                self._came[stream] = data, b"", False
            elif kind == "data":
                self._came[stream] = head, body + data, ended
            elif kind == "ended":
                self._came[stream] = head, body, True
        self._seen = len(self._machine.events)

    def _close_up(self) -> None:
        """Look at what has come to an end."""
        for stream in list(self._open):
            one = self._requests[stream]
            if one.reset:
                check(self._machine.row(stream) is None, stream, "is open though it was reset")
            elif one.refused is not None:
                if not (one.complete or stream in self._got.resets or stream in self._got.ended):
                    continue
                check(stream not in self._machine.requests, stream, one.fields, "was taken")
                if one.refused == 431:
                    check(self._got.heads.get(stream) == {b":status": b"431"}, stream, self._got.heads.get(stream))
                else:
                    check(self._got.resets.get(stream) == one.refused, stream, one.fields, self._got.resets.get(stream))
            elif not self._is_answered(stream, one):
                continue
            self._open.remove(stream)

    def _is_answered(self, stream: int, one: Request) -> bool:
        """Whether a stream is at its end, of which all has to be right then."""
        early = not one.complete
        if one.complete and not one.answered:
            if one.streams:
                check(self._came.get(stream) == (one.head, one.body, True), stream, one, self._came.get(stream))
            else:
                check(self._machine.requests.get(stream) == (one.head, one.body), stream, one, self._machine.requests.get(stream))  # fmt: skip
        if stream in self._got.resets:
            check(early and stream in self._got.ended, stream, "was reset", self._got.resets[stream])
        if not one.answered or stream not in self._got.ended:
            return False
        assert one.answer is not None
        status, fields, data, trailers = one.answer
        check(
            self._got.heads[stream] == {b":status": b"%d" % status, **dict(fields)},
            stream,
            one,
            self._got.heads[stream],
        )
        check(self._got.bodies.get(stream, b"") == data, stream, "another body")
        check(self._got.trailers.get(stream) == (None if trailers is None else dict(trailers)), stream, one, self._got.trailers.get(stream))  # fmt: skip
        return True


class Fuzzer:
    """Counts exchanges, and keeps what was wrong."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.counts: Counter[str] = Counter()
        self.different: list[str] = []

    def run(self, count: int, until: float = float("inf"), first: int = 0) -> int:
        """Make so many exchanges; returns the number of the next connection."""
        number = first
        while self.counts["exchanges"] < count and time.monotonic() < until:
            self.one(number)
            number += 1
        return number

    def one(self, number: int) -> None:
        rng = random.Random(f"{self._seed}-{number}")
        self.counts["connections"] += 1
        try:
            if rng.random() < 0.85:
                self.counts.update(Talk(rng).run(rng.choice((1, 10, 60))))
            else:
                self._spoiled(rng, number)
        except (Wrong, h2.exceptions.H2Error, hpack.HPACKError) as error:
            self.different.append(f"seed {self._seed} connection {number}: {type(error).__name__} {str(error)[:1500]}")

    def _spoiled(self, rng: random.Random, number: int) -> None:
        data = spoiled(rng)
        ours, other = by_machine(data), by_h2(data)
        how = alike(data, ours, other)
        self.counts[how] += 1
        self.counts["exchanges"] += len(ours.requests | other.requests)
        if how not in ALIKE:
            self.different.append(
                f"seed {self._seed} connection {number}: {how}\n  {data.hex()}\n  ours {ours}\n  h2   {other}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="exchanges")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="one connection, by its number")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin none after that")
    options = parser.parse_args()
    began, fuzzer = time.monotonic(), Fuzzer(options.seed)
    if options.only is not None:
        fuzzer.one(options.only)
    else:
        fuzzer.run(options.count, began + options.seconds)
    for line in fuzzer.different:
        print(line)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{time.monotonic() - began:.0f} s, {memory} MiB at most")
    print(", ".join(f"{name}: {count}" for name, count in sorted(fuzzer.counts.items())))
    raise SystemExit(1 if fuzzer.different else 0)


if __name__ == "__main__":
    main()
