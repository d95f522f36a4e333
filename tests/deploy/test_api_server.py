"""The manifests and the chart are taken by a real API server of Kubernetes, and violate nothing of its strictest standard for pods."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_deploy import kubernetes
from tests.deploy.test_helm import CERTIFICATES, OPEN, WHOLE, render
from tests.engine.scenes import eventually

ROOT = Path(__file__).parents[2]
PLACES = f"{ROOT / '.clients/bin'}:/usr/local/bin:/usr/bin"
HOW = {"kube-apiserver": "`make .clients/bin/kube-apiserver`", "etcd": "Debian's etcd-server", "kubectl": "kubectl"}
MISSING = [how for name, how in HOW.items() if shutil.which(name, path=PLACES) is None]
Apply = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]


def program(name: str) -> str:
    return str(shutil.which(name, path=PLACES))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def apply(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apply]:
    """What applies documents in a new namespace that warns of pods that are not restricted."""
    root = tmp_path_factory.mktemp("api")
    key, tokens = root / "key", root / "tokens"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    tokens.write_text('token,admin,1,"system:masters"\n')
    store, peers, port = (free_port() for _ in range(3))
    url = f"http://127.0.0.1:{store}"
    etcd = [
        program("etcd"), "--data-dir", str(root / "etcd"), "--listen-client-urls", url, "--advertise-client-urls", url,
        "--listen-peer-urls", f"http://127.0.0.1:{peers}", "--initial-advertise-peer-urls", f"http://127.0.0.1:{peers}",
        "--initial-cluster", f"default=http://127.0.0.1:{peers}",
    ]  # fmt: skip
    server = [
        program("kube-apiserver"), "--etcd-servers", url, "--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1",
        "--secure-port", str(port), "--cert-dir", str(root / "certificates"), "--service-account-issuer", "https://test",
        "--service-account-key-file", str(key), "--service-account-signing-key-file", str(key), "--token-auth-file", str(tokens),
        "--authorization-mode", "RBAC", "--service-cluster-ip-range", "10.0.0.0/24", "--disable-admission-plugins", "ServiceAccount",
    ]  # fmt: skip

    def kubectl(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        where = ["--server", f"https://127.0.0.1:{port}", "--insecure-skip-tls-verify", "--token", "token"]
        command = [program("kubectl"), *where, "--cache-dir", str(root / "cache"), *arguments]
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)

    namespaces = iter(range(100))

    def applied(*documents: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        name = f"n{next(namespaces)}"
        kubectl("create", "namespace", name).check_returncode()
        kubectl("label", "namespace", name, "pod-security.kubernetes.io/warn=restricted").check_returncode()
        options = ["--namespace", name, "--server-side", "--validate=strict", "--filename", "-"]
        return kubectl("apply", *options, given=yaml.safe_dump_all(documents))

    with (root / "log").open("wb") as log:
        running: list[subprocess.Popen[bytes]] = []
        try:
            running.extend(subprocess.Popen(command, stdout=log, stderr=log, cwd=root) for command in (etcd, server))
            eventually(lambda: kubectl("get", "namespace", "default").returncode == 0, "it answers", 120, 0.5)
            yield applied
        finally:
            for process in reversed(running):
                process.terminate()
                process.wait(60)


def is_of_kubernetes(document: dict[str, Any]) -> bool:
    return "monitoring.coreos.com" not in document["apiVersion"]


@pytest.mark.parametrize("folder", ["deploy/kubernetes", "deploy/kubernetes-tokens"])
def test_it_takes_the_manifests(apply: Apply, folder: str) -> None:
    done = apply(*kubernetes(folder).values())
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("values", [OPEN, WHOLE, CERTIFICATES], ids=["open", "whole", "certificates"])
def test_it_takes_the_chart(apply: Apply, values: dict[str, Any]) -> None:
    documents = [
        {**one, "metadata": {key: value for key, value in one["metadata"].items() if key != "namespace"}}
        for one in render(values).values()
    ]
    done = apply(*filter(is_of_kubernetes, documents))
    assert (done.returncode, done.stderr) == (0, "")


def test_it_refuses_what_is_wrong(apply: Apply) -> None:
    document = yaml.safe_load((ROOT / "deploy/kubernetes/statefulset.yaml").read_text())
    done = apply(document)
    assert (done.returncode, done.stderr) == (0, "")
    document["spec"]["replicaz"] = document["spec"].pop("replicas")
    assert "field not declared in schema" in apply(document).stderr
    del document["spec"]["replicaz"], document["spec"]["template"]["spec"]["securityContext"]
    assert "would violate PodSecurity" in apply(document).stderr
