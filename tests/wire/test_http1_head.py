"""The parser of request heads beside one in Python that reads them with regular expressions, and dates beside the library's."""

from __future__ import annotations

import random
import re
from email.utils import formatdate

import numpy as np
import pytest

from tests.compiled import heads
from tierstore.kernels.codec import address_of
from tierstore.wire.http1 import date as http1_date
from tierstore.wire.http1 import head as http1_head
from tierstore.wire.http1.head import CUT, FOREIGN, PLAIN

# --- the twin: what the module's docstring says, once more

PATH = rb"/v2/models/[A-Za-z0-9_./:-]+/infer|/v1/models/[A-Za-z0-9_./:-]+:predict|/upstream/m[A-Za-z0-9_./:-]+/rows"
LINE = re.compile(rb"POST (" + PATH + rb") HTTP/1\.([01])\r\n")
NAME = rb"[A-Za-z0-9!#$%&'*+.^_`|~-]"
HEADER = re.compile(rb"(" + NAME + rb"+):[ \t]*([\t\x20-\x7e\x80-\xff]*)\r\n")
PLAIN_VALUE = re.compile(rb"(?:[\x20-\x7e]*[\x21-\x7e])?")
READ = {b"host", b"content-length", b"connection", b"inference-header-content-length", b"accept-encoding", b"x-request-id",
        b"authorization", b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms", b"origin", b"content-encoding", b"upgrade", b"traceparent"}  # fmt: skip
MEANT = {*READ, b"transfer-encoding", b"expect"}
OPTIONS = {b"close", b"keep-alive", b"te", b"upgrade", b"http2-settings"}
TRACEPARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0"
NUMBER = re.compile(rb"[0-9]{1,9}")
# what could still become a plain head, were there more of it
_OPENINGS = (b"POST /v2/models/", b"POST /v1/models/", b"POST /upstream/m")


def is_sampled(traceparent: bytes) -> bool:
    if len(traceparent) < 55:
        return False
    digit = traceparent[54:55]
    if digit in b"0123456789abcdefABCDEF":
        return int(digit, 16) % 2 == 1
    return (digit[0] ^ digit[0] >> 6) % 2 == 1  # what is no digit may be taken for either: Python looks closer


def twin(data: bytes) -> tuple[int, dict[str, int]]:
    """(verdict, what it has found) of bytes."""
    if any(opening.startswith(data[: len(opening)]) for opening in _OPENINGS) and len(data) < len(_OPENINGS[0]):
        return CUT, {}
    line = LINE.match(data)
    if line is None:
        open_ended = re.fullmatch(
            rb"POST /(v[12]/models/|upstream/m)[A-Za-z0-9_./:-]*( (H(T(T(P(/(1(\.([01](\r)?)?)?)?)?)?)?)?)?)?", data
        )
        return (CUT if open_ended else FOREIGN), {}
    kinds = {b"/v2": http1_head.INFER, b"/v1": http1_head.PREDICT, b"/up": http1_head.ROWS}
    found = {"PATH_AT": line.start(1), "PATH_BYTES": len(line[1]), "KIND": kinds[line[1][:3]]}
    found["CLOSING"] = int(line[2] == b"0")
    found |= {
        "BODY_BYTES": -1,
        "JSON_BYTES": -1,
        "HOST_BYTES": 0,
        "TIMEOUT_MS": 0,
        "UNUSUAL": 0,
        "AUTHORIZATION_BYTES": 0,
    }
    at, seen = line.end(), set()
    while not data.startswith(b"\r\n", at):
        header = HEADER.match(data, at)
        if header is None:
            rest = data[at:]
            unfinished = re.fullmatch(rb"\r|" + NAME + rb"*|" + NAME + rb"+:[\t\x20-\x7e\x80-\xff]*\r?", rest)
            return (CUT if unfinished else FOREIGN), {}
        name, value = header[1].lower(), header[2]
        at = header.end()
        if name not in MEANT:
            continue
        if name not in READ or name in seen or not PLAIN_VALUE.fullmatch(value):
            return FOREIGN, {}
        seen.add(name)
        number = int(value) if NUMBER.fullmatch(value) else None
        match name:
            case b"host":
                found |= {"HOST_AT": header.start(2), "HOST_BYTES": len(value)}
            case b"content-length":
                if number is None:
                    return FOREIGN, {}
                found["BODY_BYTES"] = number
            case b"connection":
                options = {option.strip(b" ") for option in value.lower().split(b",")}
                if not options <= OPTIONS:
                    return FOREIGN, {}
                found["CLOSING"] |= int(b"close" in options)
            case b"inference-header-content-length":
                found["JSON_BYTES"] = -1 if number is None else number
                found["UNUSUAL"] |= 0 if number is not None else http1_head.ODD_VALUE
            case b"accept-encoding":
                refused = b";" in value and (b"*" in value or b"identity" in value.lower())
                found["UNUSUAL"] |= http1_head.CODED if refused else 0
            case b"content-encoding":
                found["UNUSUAL"] |= http1_head.CODED if value.lower() not in (b"", b"identity") else 0
            case b"upgrade":
                if value.lower() != b"h2c":
                    return FOREIGN, {}
            case b"origin":
                found["UNUSUAL"] |= http1_head.FROM_A_PAGE
            case b"traceparent":
                found["UNUSUAL"] |= http1_head.SAMPLED if is_sampled(value) else 0
            case b"x-request-id":
                found["UNUSUAL"] |= http1_head.ROUTED
            case b"authorization":
                found |= {"AUTHORIZATION_BYTES": len(value)}
                found |= {"AUTHORIZATION_AT": header.start(2)} if value else {}
            case _ if number is None:
                found["UNUSUAL"] |= http1_head.ODD_VALUE
            case _ if number:
                found["TIMEOUT_MS"] = min(number, found["TIMEOUT_MS"] or number)
    if not {b"host", b"content-length"} <= seen:
        return FOREIGN, {}
    return PLAIN, found | {"HEAD_BYTES": at + 2}


def parse(data: bytes) -> tuple[int, dict[str, int]]:
    """What the kernel says. The bytes lie at the end of their memory, behind others."""
    memory = np.frombuffer(b"\x00\xff?" + data, np.uint8).copy()
    head = np.full(http1_head.HEAD.bytes // 8, -77, np.int64).view(http1_head.HEAD.dtype)
    verdict = int(heads.parse(address_of(memory) + 3, len(data), address_of(head)))
    if verdict != PLAIN:
        return verdict, {}
    names = ["PATH_AT", "PATH_BYTES", "BODY_BYTES", "JSON_BYTES", "HOST_BYTES", "TIMEOUT_MS", "UNUSUAL", "HEAD_BYTES"]
    names += ["AUTHORIZATION_BYTES", "KIND", "CLOSING"]
    found = {name: int(head[name.lower()][0]) for name in names}
    if found["AUTHORIZATION_BYTES"]:
        found["AUTHORIZATION_AT"] = int(head["authorization_at"][0])
    return verdict, found | {"HOST_AT": int(head["host_at"][0])}


# --- heads

UNREAD = [b"x-correlation-id", b"x-envoy-peer-metadata", b"X-Scheme", b"cf-ray", b"sentry-trace", b"l5d-dst-canonical", b"ce-id", b"TE", b"sec-fetch-mode",
          b"Accept", b"User-Agent", b"x_y", b"!#$%&'*+.^_`|~", b"HTTP2-Settings", b"Content-Type", b"Keep-Alive", b"a"]  # fmt: skip


def head(rng: random.Random) -> bytes:
    """A plain one."""
    path = rng.choice([b"/v2/models/ctr/infer", b"/v2/models/a_B.c-1/versions/2/infer", b"/v1/models/ctr:predict",
                       b"/v1/models/ctr/versions/1:predict", b"/v2/models/:/infer", b"/upstream/models/ctr/versions/1/tables/t/rows"])  # fmt: skip
    values = {
        b"Inference-Header-Content-Length": b"%d" % rng.randrange(500), b"Connection": rng.choice([b"keep-alive", b"Close", b"Upgrade, HTTP2-Settings"]),
        b"Accept-Encoding": rng.choice([b"gzip", b"gzip, deflate, br", b"identity", b"*;q=0", b"gzip;q=1.0, *;q=0.5"]), b"Upgrade": b"h2c",
        b"Origin": rng.choice([b"http://localhost:8000", b"HTTP://localhost:8000", b"http://localhost", b"null"]), b"Content-Encoding": rng.choice([b"gzip", b"identity"]), b"X-Request-Id": b"a-1", b"Authorization": rng.choice([b"Bearer a_b", b"Basic eDp5"]),
        b"X-Request-Timeout-Ms": b"%d" % rng.randrange(1000), b"X-Envoy-Expected-Rq-Timeout-Ms": b"%d" % rng.randrange(1000),
        b"Traceparent": TRACEPARENT[rng.choice([0, 0, 1]):] + b"%x" % rng.randrange(16) + rng.choice([b"", b"", b"-later"]),
    }  # fmt: skip
    headers = [(b"Host", b"localhost:8000"), (b"Content-Length", b"%d" % rng.randrange(100_000))]
    headers += rng.sample([*values.items()], rng.randrange(4))
    headers += [(name, rng.choice([b"a b", b"\xe4\t;", b""])) for name in rng.sample(UNREAD, rng.randrange(4))]
    rng.shuffle(headers)
    lines = [name + b":" + b" " * rng.choice([1, 1, 0, 3]) + value for name, value in headers]
    return b"\r\n".join([b"POST " + path + rng.choice([b" HTTP/1.1", b" HTTP/1.0"]), *lines]) + b"\r\n\r\n"


_BITS = [b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b": ", b"0", b"\x00", b"\x7f", b"\x80", b"Host: a\r\n", b"Content-Length: 1\r\n",
         b"X: 1\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"Accept: \r\n", b"x-request-id:\r\n", b"_", b"-", b"9" * 12,
         b"X-Request-Timeout-Ms: 0\r\n", b"Inference-Header-Content-Length: x\r\n", b"Content-Length:\r\n", b"/", b"%", b"/infer", b"/rows", b"\r\n\r\n"]  # fmt: skip


def spoil(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 4])):
        i = rng.randrange(len(data) + 1)
        if rng.random() < 0.3:
            i = rng.choice([match.start() for match in re.finditer(rb"\r\n|: ?|$", data)])
        match rng.randrange(6):
            case 0:
                data = data[:i] + bytes([rng.randrange(256)]) + data[i + 1 :]
            case 1:
                data = data[:i] + data[i + rng.choice([1, 1, 2, 5]) :]
            case 2 | 3:
                data = data[:i] + rng.choice(_BITS) + data[i:]
            case 4:
                data = data[:i] + bytes([data[i] ^ 32]) + data[i + 1 :] if i < len(data) else data
            case _:
                data = data[:i]
    return data


@pytest.mark.parametrize("seed", range(8))
def test_the_parser_and_its_twin_agree_about_spoiled_heads(seed: int) -> None:
    rng = random.Random(seed)
    verdicts = [0, 0, 0]
    for _ in range(2500):
        data = head(rng)
        if rng.random() < 0.9:
            data = spoil(rng, data)
        said = parse(data)
        assert said == twin(data), data
        assert parse(data + b"GET / HTTP/1.1\r\n\r\n") == said or said[0] != PLAIN, data
        verdicts[said[0]] += 1
    assert min(verdicts) > 200, verdicts


def test_a_head_that_is_cut_anywhere_is_cut() -> None:
    rng = random.Random(5)
    for _ in range(60):
        data = head(rng)
        assert parse(data) == twin(data)
        assert parse(data)[0] == PLAIN
        for end in range(len(data)):
            assert parse(data[:end])[0] == twin(data[:end])[0] == CUT, data[:end]


@pytest.mark.parametrize("name", sorted(MEANT - {b"host", b"content-length"}))
def test_a_name_is_known_in_every_case_and_in_no_other_spelling(name: bytes) -> None:
    """Known is told by a value that is not taken, where another name changes nothing."""
    start = b"POST /v2/models/a/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n"
    for spelled in (name, name.upper(), name.title(), name.swapcase()):
        assert parse(start + spelled + b": a\tb\r\n\r\n")[0] == FOREIGN
    for spelled in (name[:-1], name + b"s", b"x" + name, name.replace(b"-", b"_") + b"_", name[1:]):
        assert parse(start + spelled + b": a\tb\r\n\r\n") == twin(start + spelled + b": a\tb\r\n\r\n")
        assert parse(start + spelled + b": a\tb\r\n\r\n")[0] == PLAIN


def fnv1a(text: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in text:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


def test_a_name_made_to_have_the_hash_of_another_does_not_pass_for_it() -> None:
    """A proxy would see a request without a body where the reactor sees one with the next request in it."""
    made = b"du6zecr4bjlmmpfijq2c"
    assert fnv1a(made) == fnv1a(b"content-length")
    data = b"POST /v2/models/a/infer HTTP/1.1\r\nHost: a\r\n" + made + b": 5\r\n\r\n"
    assert parse(data)[0] == twin(data)[0] == FOREIGN, "it has no length"


def test_dates_are_the_librarys() -> None:
    rng = random.Random(1)
    edges = [
        0,
        951_782_399,
        951_782_400,
        951_868_800,
        4_107_542_399,
        4_107_542_400,
        253_402_300_799,
    ]  # leap days; the year 9999
    text = np.zeros(http1_date.DATE_BYTES + 1, np.uint8)
    for seconds in edges + [rng.randrange(1 << 33) for _ in range(3000)]:
        heads.write_date(seconds, address_of(text))
        assert text.tobytes().decode() == formatdate(seconds, usegmt=True) + "\0"
