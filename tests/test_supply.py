"""What a service is installed from: the lock file has all of it, with hashes and no index; the bill of materials names the same."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy import image

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def locked() -> dict[str, Requirement]:
    """The lock file's requirements by name."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert not re.search(r"https?:|file:|index-url|find-links|@ ", text), "it names no place to download from"
    entries = [entry for entry in re.sub(r"#.*\n", "", text).replace("\\\n", " ").splitlines() if entry.strip()]
    found = {}
    for entry in entries:
        pinned, *hashes = re.split(r"\s+--hash=", entry.strip())
        assert hashes, f"{pinned} has no hash"
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", one) for one in hashes), pinned
        requirement = Requirement(pinned)
        assert re.fullmatch("==[^,*]+", str(requirement.specifier)), pinned
        found[canonicalize_name(requirement.name)] = requirement
    return found


def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    return [
        Requirement(line) for lines in (project["dependencies"], *map(extras.get, everything.extras)) for line in lines
    ]


def for_the_build() -> list[Requirement]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [Requirement(line) for line in document["build-system"]["requires"]]


def test_the_lock_file_has_every_dependency_in_a_version_that_suits(locked: dict[str, Requirement]) -> None:
    for requirement in (*wanted(), *for_the_build()):
        (pinned,) = locked[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(pinned.version), f"{requirement}: run `make lock`"


def test_the_image_installs_nothing_without_a_hash() -> None:
    runs = [command for name, text in image.instructions() if name == "RUN" for command in text.split("&&")]
    installs = [shlex.split(command) for command in runs if "pip" in command]
    assert len(installs) == 2
    for words in installs:
        fetches_nothing = {"--no-deps", "--no-build-isolation", "."} <= set(words)
        assert fetches_nothing or {"--require-hashes", "-r", "requirements.lock"} <= set(words), words


def test_the_bill_of_materials_names_what_is_installed_and_locked(
    locked: dict[str, Requirement], tmp_path: Path
) -> None:
    out = tmp_path / "sbom.json"
    subprocess.run([sys.executable, "-m", "tools.make_sbom", str(out)], cwd=ROOT, check=True, timeout=120)
    bill = json.loads(out.read_text())
    assert (bill["bomFormat"], bill["specVersion"], bill["metadata"]["component"]["name"]) == (
        "CycloneDX",
        "1.5",
        "tierstore",
    )
    names = {component["name"] for component in bill["components"]}
    assert {canonicalize_name(requirement.name) for requirement in wanted()} <= names
    assert names <= locked.keys(), "what is installed for a service is locked: run `make lock`"
    refs = {component["bom-ref"] for component in (*bill["components"], bill["metadata"]["component"])}
    assert {entry["ref"] for entry in bill["dependencies"]} == refs
    assert {other for entry in bill["dependencies"] for other in entry["dependsOn"]} <= refs
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@\S+", ref) for ref in refs)
