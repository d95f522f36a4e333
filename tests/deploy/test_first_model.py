"""How a model gets into what the manifests start: nothing is shared with its pods, so it is sent; then its first days, all rows compared."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.image import environment
from tests.deploy.test_deploy import kubernetes, settings_named
from tests.test_docs import blocks
from tierstore.config import ENV_PREFIX
from tools.elsewhere import COMMAND, Elsewhere, program

OF_THE_PLACE = {"data", "source_root", "host", "port", "grpc_port", "tokens"}  # and not of the manifest


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def settings_of(folder: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The settings of a pod, those of the image among them, and its volumes by where they are mounted."""
    spec = kubernetes(folder)["StatefulSet", "tierstore"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    variables = environment() | {entry["name"]: entry["value"] for entry in container["env"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes.get(mount["name"]) for mount in container["volumeMounts"]}
    names = settings_named(variables) - OF_THE_PLACE
    return {name: variables[ENV_PREFIX + name.upper()] for name in names}, mounts


@pytest.mark.thorough
@pytest.mark.parametrize(("nodes", "limits"), [(2, []), (1, ["--model", "ctr"])])
def test_the_first_model_of_the_manifests_is_sent_with_a_token_that_may_load_it(
    tmp_path: Path, nodes: int, limits: list[str]
) -> None:
    settings, mounts = settings_of("deploy/kubernetes-tokens")
    assert mounts[environment()["TIERSTORE_SOURCE_ROOT"]] == {"name": "snapshots", "emptyDir": {}}, "nothing is shared"
    lines = [line for _, block in blocks("docs/kubernetes.md", "sh") for line in block.splitlines()]
    assert [line for line in lines if re.match(r"tierstore rollout \S+ --nodes", line)], "as the page says"
    work, secret = tmp_path / "work", tmp_path / "secret"
    for folder in (work / "without", secret):
        folder.mkdir(parents=True)
    made = [*COMMAND, "token", "create", "--role", "admin", *limits, "--data", str(secret), "--json"]
    token = json.loads(subprocess.run(made, capture_output=True, check=True).stdout)["token"]
    settings |= {"tokens": str(secret / "tokens.json"), "host_budget": "16MiB", "load_workers": "1"}
    with ExitStack() as stack:
        there = stack.enter_context(Elsewhere(work))
        ports = enumerate(free_ports(nodes))
        urls = [stack.enter_context(there.serve(tmp_path / str(number), port, **settings)) for number, port in ports]

        def use(where: Path, **variables: str) -> subprocess.CompletedProcess[str]:
            line = program(urls, where, tmp_path / "0/data/exports", rows=3000)
            variables |= {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
            return subprocess.run(there.beside(line), env=variables, capture_output=True, text=True, timeout=250)

        assert "this service takes a token" in use(work / "without").stderr
        done = use(work, TIERSTORE_TOKEN=token)
        assert done.returncode == 0, done.stderr
    assert "the first snapshot is sent" in done.stdout
    for number in range(nodes):
        assert not any((tmp_path / f"{number}/roots").iterdir()), "by no directory"
        assert not any((tmp_path / f"{number}/data/uploads").iterdir()), "and what was sent is gone"
