"""Look-ups of any size, with ids and without, and the clients that send them: each as it comes, its requests its own.

A client is given a URL and look-ups, and gives the answers in their order. Programs in other languages read a look-up a line,
`<id>\\t<key> <key> …`, `-` for none, and write an answer a line: the bytes of its JSON, and the whole body in base64.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio

import tierstore

HERE = Path(__file__).parent
KSERVE = HERE.parents[1] / ".clients/kserve"
MODEL, FEATURE, DIM = "ctr", "item_id", 4
OUTPUTS = (FEATURE, f"{FEATURE}.found")
PATH = f"/v2/models/{MODEL}/infer"
DEADLINE_S = 120


@dataclass
class LookUp:
    keys: np.ndarray
    id: str | None


@dataclass
class Answer:
    rows: np.ndarray
    found: np.ndarray
    id: str | None = None


Client = Callable[[str, list[LookUp], Path], list[Answer]]  # the directory is for what it needs


def answer_of(body: bytes, json_bytes: int) -> Answer:
    """Of an answer's body, whose JSON has so many bytes."""
    document = json.loads(body[:json_bytes])
    assert [output["name"] for output in document["outputs"]] == [*OUTPUTS]
    (n, dim), (same,) = (output["shape"] for output in document["outputs"])
    assert n == same
    data, end = body[json_bytes:], 4 * n * dim
    assert [output["parameters"]["binary_data_size"] for output in document["outputs"]] == [end, n]
    assert len(data) == end + n
    return Answer(
        np.frombuffer(data[:end], np.float32).reshape(n, dim), np.frombuffer(data[end:], np.bool_), document.get("id")
    )


# --- Python, in this process


def _triton_arguments(look_up: LookUp) -> dict[str, Any]:
    keys = triton.InferInput(FEATURE, [len(look_up.keys)], "INT64")
    keys.set_data_from_numpy(look_up.keys)
    return {
        "inputs": [keys],
        "outputs": [triton.InferRequestedOutput(name) for name in OUTPUTS],
        "request_id": look_up.id or "",
    }


def _triton_answer(result: Any) -> Answer:
    rows, found = (result.as_numpy(name) for name in OUTPUTS)
    return Answer(rows, found, result.get_response().get("id"))


def triton_sync(url: str, look_ups: list[LookUp], _: Path, **more: Any) -> list[Answer]:
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        return [_triton_answer(client.infer(MODEL, **_triton_arguments(look_up), **more)) for look_up in look_ups]


def triton_with_timeouts(url: str, look_ups: list[LookUp], _: Path) -> list[Answer]:
    """Each with a timeout of its own."""
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        return [
            _triton_answer(client.infer(MODEL, **_triton_arguments(look_up), timeout=10**8 + 997**number % 10**7))
            for number, look_up in enumerate(look_ups)
        ]


def triton_asyncio(url: str, look_ups: list[LookUp], _: Path) -> list[Answer]:
    async def ask() -> list[Answer]:
        async with triton_aio.InferenceServerClient(url.removeprefix("http://")) as client:
            return [_triton_answer(await client.infer(MODEL, **_triton_arguments(look_up))) for look_up in look_ups]

    return asyncio.run(ask())


def ours(url: str, look_ups: list[LookUp], _: Path) -> list[Answer]:
    """It has no argument for an id."""
    with tierstore.Client(url) as client:
        return [
            Answer(*client.lookup(MODEL, FEATURE, look_up.keys, return_found=True, timeout_s=20 + number))
            for number, look_up in enumerate(look_ups)
        ]


def ours_asyncio(url: str, look_ups: list[LookUp], _: Path) -> list[Answer]:
    async def ask() -> list[Answer]:
        async with tierstore.AsyncClient(url) as client:
            return [
                Answer(*await client.lookup(MODEL, FEATURE, look_up.keys, return_found=True)) for look_up in look_ups
            ]

    return asyncio.run(ask())


# --- other programs


def found_program(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"no {name} on the PATH")
    return program


def lines_through(command: Sequence[str | Path], url: str, look_ups: list[LookUp]) -> list[Answer]:
    lines = [
        f"{'-' if look_up.id is None else look_up.id}\t{' '.join(map(str, look_up.keys.tolist()))}\n"
        for look_up in look_ups
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [*command, url + PATH],
        input="".join(lines),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    answers = [line.split() for line in ran.stdout.splitlines()]
    return [answer_of(base64.b64decode(body), int(json_bytes)) for json_bytes, body in answers]


def kserve(url: str, look_ups: list[LookUp], _: Path) -> list[Answer]:
    if not (KSERVE / ".installed").exists():
        pytest.skip("no environment .clients/kserve: make client-venvs")
    return lines_through([KSERVE / "bin/python", HERE / "run_kserve_look_ups.py"], url, look_ups)


def node(url: str, look_ups: list[LookUp], _: Path) -> list[Answer]:
    return lines_through([found_program("node"), HERE / "look_ups.mjs"], url, look_ups)


def java(url: str, look_ups: list[LookUp], work: Path) -> list[Answer]:
    """Compiled once for all tests."""
    quick = "-XX:TieredStopAtLevel=1"
    if not (work / "LookUps.class").exists():
        subprocess.run([found_program("javac"), f"-J{quick}", "-d", work, HERE / "LookUps.java"], check=True)
    return lines_through([found_program("java"), quick, "-cp", work, "LookUps"], url, look_ups)


def go(url: str, look_ups: list[LookUp], work: Path) -> list[Answer]:
    """Built once for all tests: the first time Go compiles its library too."""
    program = work / "look_ups"
    if not program.exists():
        environment = {"HOME": str(work), **os.environ, "GOTOOLCHAIN": "local", "GOPROXY": "off"}
        subprocess.run(
            [found_program("go"), "build", "-o", program, HERE / "look_ups.go"], check=True, cwd=work, env=environment
        )
    return lines_through([program], url, look_ups)


def curl(url: str, look_ups: list[LookUp], work: Path, *options: str) -> list[Answer]:
    """All by one process, so on one connection where it is kept."""
    work = work / uuid.uuid4().hex
    work.mkdir()
    command = [found_program("curl")]
    for number, look_up in enumerate(look_ups):
        document: dict[str, Any] = {} if look_up.id is None else {"id": look_up.id}
        document["inputs"] = [
            {
                "name": FEATURE,
                "datatype": "INT64",
                "shape": [len(look_up.keys)],
                "parameters": {"binary_data_size": 8 * len(look_up.keys)},
            }
        ]
        document["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in OUTPUTS]
        head = json.dumps(document).encode()
        sent, got = work / f"{number}.sent", work / f"{number}.got"
        sent.write_bytes(head + look_up.keys.tobytes())
        command += ["--next"] if number else []
        command += ["--silent", "--show-error", "--fail", "--include", *options, "--data-binary", f"@{sent}"]
        command += ["--header", f"Inference-Header-Content-Length: {len(head)}", "--output", str(got), url + PATH]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ran.returncode == 0, ran.stderr
    return [_included((work / f"{number}.got").read_bytes()) for number in range(len(look_ups))]


def _included(text: bytes) -> Answer:
    """Of an answer with its head, behind `100 Continue` where that was asked for."""
    head, _, body = text.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    return answer_of(body, int(fields[b"inference-header-content-length"]))


CLIENTS: dict[str, Client] = {
    "tritonclient": triton_sync,
    "tritonclient, with timeouts": triton_with_timeouts,
    "tritonclient that takes gzip": partial(triton_sync, response_compression_algorithm="gzip"),
    "tritonclient, asyncio": triton_asyncio,
    "tierstore": ours,
    "tierstore, asyncio": ours_asyncio,
    "kserve": kserve,
    "Go": go,
    "Node": node,
    "Java": java,
    "curl": curl,
    "curl --compressed": lambda *given: curl(*given, "--compressed"),
    "curl --http1.0": lambda *given: curl(*given, "--http1.0"),
    "curl --http2": lambda *given: curl(*given, "--http2"),
    "curl, Connection: close": lambda *given: curl(*given, "--header", "Connection: close"),
    "curl, usual headers": lambda *given: curl(
        *given,
        *("--header", "X-Request-Id: 8f70b08d-56ef-4a23-83b8-87e5413746d1", "--header", "X-Unheard-Of: 1"),
        *(
            "--header",
            "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "--header",
            "Cookie: a=b",
        ),
        *(
            "--header",
            "X-Forwarded-For: 10.0.0.1",
            "--header",
            "X-Request-Timeout-Ms: 60000",
            "--header",
            "Content-Type: application/octet-stream",
        ),
    ),
}
# Requests of which Python answers each.
LEFT_TO_PYTHON: dict[str, Client] = {
    "curl, Expect: 100-continue": lambda *given: curl(*given, "--header", "Expect: 100-continue"),
    "curl, chunked": lambda *given: curl(*given, "--header", "Transfer-Encoding: chunked"),
    "tritonclient that sends gzip": partial(triton_sync, request_compression_algorithm="gzip"),
    "tritonclient, with a query": partial(triton_sync, query_params={"a": "1"}),
}
SENDS_NO_ID = ("tierstore", "tierstore, asyncio")
