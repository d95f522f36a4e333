"""What is carried to a machine with a GPU and without a network, and what is run there."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tierstore.tiers.device.cupy_device import find_devices
from tools import gpu_bundle

ROOT = Path(__file__).parents[1]
ON_CARD = ROOT / "tools" / "on_card.sh"
# stands for Python on a machine with a GPU: keeps the commands that it gets, and fails where the soak test is asked for
PYTHON = """#!/bin/sh
case "$*" in
  -) echo "1 GPUs" ;;
  *) echo "$*" >> "$COMMANDS"; echo done; case "$*" in *soak*) exit 1 ;; esac ;;
esac
"""


def test_a_bundle_has_what_the_package_needs_and_the_machine_lacks() -> None:
    packages = gpu_bundle.needed(("tierstore",), "3.12", set(gpu_bundle.THERE))
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {canonicalize_name(Requirement(line).name) for line in asked}
    assert names <= {*packages, *gpu_bundle.THERE}
    assert not {*packages} & {*gpu_bundle.THERE}
    assert {"starlette", "pydantic-core"} <= {*packages}, "what its dependencies need comes too"
    assert not {"grpcio", "redis", "boto3"} & {*packages}, "extras are left out"
    assert all(metadata.version(name) == version for name, version in packages.items())


def test_what_the_other_machine_has_is_left_out_however_it_spells_it() -> None:
    has = gpu_bundle.names_in("Pydantic_Core==2.1\n# comment\nfastapi\n\nnumba @ file:///x\n")
    assert has == {"pydantic-core", "fastapi", "numba"}
    packages = gpu_bundle.needed(("tierstore",), "3.12", has)
    assert not {*packages} & has
    assert "numpy" in packages


def _run(out: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(ON_CARD), str(out / "no-bundle"), str(out)]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(find_devices()[0] > 0, reason="there is a GPU")
def test_without_a_gpu_the_script_says_so_and_ends_well(tmp_path: Path) -> None:
    ran = _run(tmp_path, PYTHON=sys.executable)
    assert ran.returncode == 0, ran.stderr
    assert "no GPU: " in ran.stdout
    assert not list(tmp_path.glob("bench*"))


def test_each_step_leaves_its_log_and_the_last_ones_run_where_an_earlier_one_failed(tmp_path: Path) -> None:
    python, commands = tmp_path / "python", tmp_path / "commands"
    python.write_text(PYTHON)
    python.chmod(0o755)
    ran = _run(tmp_path, PYTHON=str(python), COMMANDS=str(commands), STEPS="tests soak bench", PARTS="keys filled")
    assert ran.returncode == 1, "the soak test failed"
    assert "soak: rc 1" in ran.stdout
    asked = commands.read_text().splitlines()
    assert [line.split()[1] for line in asked] == ["pytest", "tools.soak_device", *["benchmarks.device_lookup"] * 2]
    assert [line.split()[3] for line in asked[2:]] == ["keys", "filled"]
    assert {"tests.txt", "soak.txt", "bench-keys.txt", "bench-filled.txt", "summary.txt"} <= {
        file.name for file in tmp_path.iterdir()
    }


def test_no_step_begins_without_time_left_for_it(tmp_path: Path) -> None:
    python, commands = tmp_path / "python", tmp_path / "commands"
    python.write_text(PYTHON)
    python.chmod(0o755)
    ran = _run(tmp_path, PYTHON=str(python), COMMANDS=str(commands), STEPS="bench", PARTS="keys", SECONDS_IN_ALL="5")
    assert "bench-keys: not run, no time left" in ran.stdout
    assert not commands.exists()
