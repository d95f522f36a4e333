"""Requests and answers as files, so that a client in another Python environment can be asked: NumPy and JSON alone.

Used by the tests and, as a plain module, by the programs that run a client in an environment of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"INT64": np.int64, "UINT64": np.uint64, "FP32": np.float32, "BYTES": object}
Answer = dict[str, np.ndarray] | str  # outputs by name, or the message of an error


@dataclass
class Case:
    """One request. `outputs` are names with a datatype or None; None in all: the default outputs.

    `answers` names what is to come back, for clients that have to make room for it.
    """

    name: str
    model: str
    inputs: dict[str, np.ndarray]
    outputs: dict[str, str | None] | None = None
    version: int | str | None = None
    answers: list[str] = field(default_factory=list)
    datatypes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, array in self.inputs.items():
            self.datatypes[name] = next(word for word, dtype in DTYPES.items() if array.dtype == dtype)


@dataclass
class Job:
    """What a program is given: where the service is, and what to ask it."""

    http: str  # host:port
    grpc: str
    cases: list[Case]


def _document(array: np.ndarray) -> dict[str, Any]:
    flat = array.reshape(-1).tolist()
    if array.dtype == object:
        flat = [text.decode() if isinstance(text, bytes) else text for text in flat]
    return {"dtype": str(array.dtype), "shape": array.shape, "data": flat}


def _array(document: dict[str, Any]) -> np.ndarray:
    return np.array(document["data"], document["dtype"]).reshape(document["shape"])


def write_job(path: Path, job: Job) -> None:
    cases = [
        {**vars(case), "inputs": {name: _document(array) for name, array in case.inputs.items()}} for case in job.cases
    ]
    path.write_text(json.dumps({"http": job.http, "grpc": job.grpc, "cases": cases}), encoding="utf-8")


def read_job(path: Path) -> Job:
    document = json.loads(path.read_text(encoding="utf-8"))
    for case in document["cases"]:
        case["inputs"] = {name: _array(array) for name, array in case["inputs"].items()}
    return Job(document["http"], document["grpc"], [Case(**case) for case in document["cases"]])


def write_answers(path: Path, answers: dict[str, dict[str, Answer]]) -> None:
    """Answers by client and case."""
    document = {
        client: {
            case: answer if isinstance(answer, str) else {name: _document(array) for name, array in answer.items()}
            for case, answer in of.items()
        }
        for client, of in answers.items()
    }
    path.write_text(json.dumps(document), encoding="utf-8")


def read_answers(path: Path) -> dict[str, dict[str, Answer]]:
    document = json.loads(path.read_text(encoding="utf-8"))
    return {
        client: {
            case: answer if isinstance(answer, str) else {name: _array(array) for name, array in answer.items()}
            for case, answer in of.items()
        }
        for client, of in document.items()
    }


def run(answer_all: Callable[[Job], dict[str, dict[str, Answer]]]) -> None:
    """The main of a program: `python program.py JOB ANSWERS`."""
    job, answers = map(Path, sys.argv[1:])
    write_answers(answers, answer_all(read_job(job)))
