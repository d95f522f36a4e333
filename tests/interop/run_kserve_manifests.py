"""Holds manifests against the types of KServe and Kubernetes, as the package `kserve` has them: python run_kserve_manifests.py FILE…

Prints a line for each name that a type does not have, and for each value that is not of its type.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import kserve
import yaml
from kubernetes import client as kubernetes

PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}


def problems(value: Any, kind: str, where: str) -> Iterator[str]:
    if kind in PLAIN:
        if not isinstance(value, PLAIN[kind]) or (kind == "int" and isinstance(value, bool)):
            yield f"{where}: expected {kind}, got {value!r}"
    elif inner := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            yield f"{where}: expected a list, got {value!r}"
            return
        for number, one in enumerate(value):
            yield from problems(one, inner[1], f"{where}[{number}]")
    elif inner := re.fullmatch(r"dict\(str, (.+)\)", kind):
        for name, one in value.items():
            yield from problems(one, inner[1], f"{where}.{name}")
    else:
        made = getattr(kserve, kind, None) or getattr(kubernetes, kind, None)
        if not hasattr(made, "attribute_map"):
            return  # free, as a quantity is
        if not isinstance(value, dict):
            yield f"{where}: expected {kind}, got {value!r}"
            return
        of = {written: made.openapi_types[name] for name, written in made.attribute_map.items()}
        for name, one in value.items():
            if name in of:
                yield from problems(one, of[name], f"{where}.{name}")
            else:
                yield f"{where}: {kind} has no {name!r}"


if __name__ == "__main__":
    for file in sys.argv[1:]:
        with open(file, encoding="utf-8") as text:
            for document in yaml.safe_load_all(text):
                for problem in problems(document, "V1beta1InferenceService", document["metadata"]["name"]):
                    print(f"{file}: {problem}")
