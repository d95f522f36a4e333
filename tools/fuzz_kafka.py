"""Kafka messages as targets of `tools/fuzz.py`: their headers, their content, and how they are put together."""

from __future__ import annotations

import io
import json
import random

import numpy as np

import tierstore
from tierstore.errors import DeltaError
from tierstore.kafka.messages import KafkaMessage, check_digest, head_of, read_checked, split
from tierstore.kafka.window import Window
from tools.fuzz_target import Target, spoil_bytes, spoil_json

LIMIT = 1 << 20


class KafkaMessages(Target):
    """An input is a line of JSON, the headers of each message as [[name, value], …] and its length, and then their contents."""

    name = "kafka"

    def __exit__(self, *_: object) -> None:
        pass

    def seeds(self) -> list[bytes]:
        seeds = []
        for rows, most in ((3, 1 << 20), (40, 700)):
            writer = tierstore.DeltaWriter(io.BytesIO(), model="ctr", seq=5, event_time=0.0)
            writer.upsert("item", np.arange(rows), np.ones((rows, 4), np.float32))
            parts = [(headers, bytes(value)) for headers, value in split("ctr", 5, writer.to_bytes(), most)]
            seeds.append(_encoded([([[n, v.decode()] for n, v in headers], value) for headers, value in parts]))
            seeds.append(
                _encoded([([], b"".join(value for _, value in parts))])
            )  # as a trainer without headers sends it
        return seeds

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        line, _, content = data.partition(b"\n")
        if rng.random() < 0.6:
            return spoil_json(line, rng).replace(b"\n", b" ") + b"\n" + content
        return line + b"\n" + spoil_bytes(content, rng)

    def run(self, data: bytes) -> str:
        messages = _decoded(data)
        window, outcomes = Window(LIMIT), []
        for message in messages:
            try:
                held = window.add(message, head_of(message))
                if held is not None and held.complete:
                    content = held.data()
                    check_digest(content, held.digest)
                    delta = read_checked(content, held.model, held.seq)
                    window.remove(held)
                    outcomes.append(f"delta of {len(delta.tables)} tables")
            except DeltaError as error:
                outcomes.append(f"refused: {error}")
        for model in window.models():
            window.remove_model(model)
        if window.nbytes:
            raise AssertionError(f"{window.nbytes} bytes are counted for nothing")
        return "; ".join(sorted(set(outcomes))) or "nothing"


def _encoded(messages: list[tuple[list[list[str]], bytes]]) -> bytes:
    line = json.dumps([[headers, len(value)] for headers, value in messages]).encode()
    return line + b"\n" + b"".join(value for _, value in messages)


def _decoded(data: bytes) -> list[KafkaMessage]:
    """The messages of an input; what is no list of messages is none, and what is no header is left out."""
    line, _, content = data.partition(b"\n")
    try:
        heads = json.loads(line)
    except (ValueError, RecursionError):
        return []
    messages = []
    for offset, entry in enumerate(heads if isinstance(heads, list) else []):
        headers, length = entry if isinstance(entry, list) and len(entry) == 2 else (entry, 0)
        size = length if isinstance(length, int) and 0 <= length <= len(content) else len(content)
        value, content = content[:size], content[size:]
        pairs = [
            (str(pair[0]), _raw(pair[1])) for pair in (headers if isinstance(headers, list) else []) if _is_pair(pair)
        ]
        messages.append(KafkaMessage(offset % 3, offset, value, pairs, 0))
    return messages


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2


def _raw(value: object) -> bytes | None:
    return None if value is None else str(value).encode(errors="surrogatepass")
