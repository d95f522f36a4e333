"""Write a bill of materials of the packages that a service needs, as CycloneDX JSON, from the installed environment.

python -m tools.make_sbom dist/sbom.cdx.json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = "tierstore"
EXTRAS = frozenset({"all"})


def normal(name: str) -> str:
    """A package's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(name: str, extras: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    """(name, extras) of what a package needs here."""
    found = []
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            found.append((normal(requirement.name), frozenset(requirement.extras)))
    return found


def closure() -> dict[str, list[str]]:
    """Every package that the service needs, with the names of those that it needs itself. What is not installed is missing."""
    graph: dict[str, set[str]] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    ahead = [(ROOT, EXTRAS)]
    while ahead:
        name, extras = here = ahead.pop()
        if here in seen:
            continue
        seen.add(here)
        further = needed(name, extras)
        graph.setdefault(name, set()).update(other for other, _ in further if other != name)
        ahead += further
    return {name: sorted(others) for name, others in sorted(graph.items())}


def purl(name: str) -> str:
    return f"pkg:pypi/{name}@{metadata.version(name)}"


def licence(name: str) -> list[dict[str, Any]]:
    """What a package says of its licence: an SPDX expression, or words."""
    about = metadata.metadata(name)
    if expression := about.get("License-Expression"):
        return [{"expression": expression}]
    names = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier", ()) if text.startswith("License ::")]
    text = (about.get("License") or "").strip().partition("\n")[0][:100]
    return [{"license": {"name": one}} for one in names or ([text] if text else [])]


def component(name: str) -> dict[str, Any]:
    kind = "application" if name == ROOT else "library"
    document = {
        "type": kind,
        "bom-ref": purl(name),
        "name": name,
        "version": metadata.version(name),
        "purl": purl(name),
    }
    return {**document, **({"licenses": licences} if (licences := licence(name)) else {})}


def bill() -> dict[str, Any]:
    """The document. The same packages give the same document."""
    graph = closure()
    tool = {"type": "application", "name": "tools.make_sbom", "version": metadata.version(ROOT)}
    refs = [purl(name) for name in graph]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, ' '.join(refs))}",
        "version": 1,
        "metadata": {"component": component(ROOT), "tools": {"components": [tool]}},
        "components": [component(name) for name in graph if name != ROOT],
        "dependencies": [{"ref": purl(name), "dependsOn": [purl(other) for other in graph[name]]} for name in graph],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    document = bill()
    out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{out}: {len(document['components'])} packages\n")


if __name__ == "__main__":
    main()
