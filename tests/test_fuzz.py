"""Inputs that were found to matter, and a few new ones, for everything that reads what others wrote (`tools/fuzz.py`)."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="needs the extra `dense`")
pytest.importorskip("onnxruntime", reason="needs the extra `dense`")

from tools.fuzz import fuzz
from tools.fuzz_mutator import parts_of, with_lengths
from tools.fuzz_targets import TARGETS
from tools.raw_server import http_answer


def _archive(content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a", content)
    return out.getvalue()


def _member(data: bytes) -> bytes:
    """Its content, which is read only where its checksum fits."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("a")


def _body(data: bytes) -> bytes:
    head, _, body = data.partition(b"\r\n\r\n")
    return body if b"Content-Length: %d" % len(body) in head else b""


def _replied(data: bytes) -> bytes:
    return b"" if b"$-1" in data else data


DOCUMENT = json.dumps({"version": 1, "schema": json.dumps({"fields": [{"size": 3}]})}).encode()
PLANTED: dict[str, tuple[bytes, Callable[[bytes], object]]] = {  # an input, and what fails for another
    "a value": (DOCUMENT, lambda data: 1 / (json.loads(data)["version"] != 2**63)),
    "a value in a string": (DOCUMENT, lambda data: json.loads(json.loads(data)["schema"])["fields"][0]["size"] + 0),
    "a body behind its length": (http_answer(DOCUMENT), lambda data: 1 / (json.loads(_body(data) or DOCUMENT)["version"] != 2**63)),
    "a body behind a line": (b"POST /x\n" + DOCUMENT, lambda data: 1 / (b"9223372036854775808" not in data)),
    "a member of an archive": (_archive(b"abcdefgh"), lambda data: 1 / (_member(data)[:1] == b"a")),
    "a part behind its length": (with_lengths([b"abcd", b"efgh"]), lambda data: 1 / (parts_of(data)[-1:] == [b"efgh"] or len(parts_of(data)) < 2)),
    "a reply": (b"*2\r\n$1\r\na\r\n:5\r\n", lambda data: 1 / (_replied(data) != b"")),
    "a number": (bytes(24), lambda data: 1 / (data[8:16] != (2**63 - 1).to_bytes(8, "little"))),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_that_lengths_and_checksums_hide_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, reads = PLANTED[name]
    (tmp_path / name).mkdir()
    (tmp_path / name / "whole").write_bytes(whole)

    def run(data: bytes) -> str:
        try:
            return str(reads(data))
        except (ValueError, KeyError, IndexError, zipfile.BadZipFile, NotImplementedError, EOFError, RecursionError):
            return "refused"

    monkeypatch.setattr("tools.fuzz.CORPUS", tmp_path)
    monkeypatch.setitem(TARGETS, name, lambda: contextlib.nullcontext(run))
    assert fuzz(name, 20_000, seed=3, most_faults=1).faults


COUNT = int(os.environ.get("FUZZ_INPUTS", 250))  # a target


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*TARGETS])
def test_whatever_is_read_is_answered_or_refused_by_name(name: str) -> None:
    if name == "grpc" and not all(importlib.util.find_spec(module) for module in ("grpc", "tritonclient")):
        pytest.skip("needs the extra `grpc` and tritonclient")
    if name == "redis":
        pytest.importorskip("redis", reason="needs the extra `redis`")
    if name == "registry":
        pytest.importorskip("fastavro", reason="needs the extra `kafka`")
    run = fuzz(name, COUNT, seed=20)
    assert run.faults == {}
    assert run.inputs >= COUNT
    assert len(run.outcomes) > 5, "it is about something"
