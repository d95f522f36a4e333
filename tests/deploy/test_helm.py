"""The Helm chart: rendered by helm itself, of Kubernetes' schemas, and in agreement with the image, the settings and the manifests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.image import instruction
from tests.deploy.test_deploy import LONGEST_END_S, kubernetes, settings_named
from tierstore.config import ENV_PREFIX, load_settings
from tierstore.service.limits.slow_clients import FINISH_S

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/tierstore"
KUBERNETES = ("1.27", "1.31", "1.35")  # minor versions, whose schemas are asked
OPEN = {"tokens": {"open": True}}
WHOLE = {
    "replicas": 4, "partitions": 64, "copies": 2, "tokens": {"secret": "tokens"}, "tls": {"secret": "tls"},
    "fronts": {"replicas": 3, "memoryMiB": 4096, "hostBudgetMiB": 2048}, "storageClass": "local-ssd", "serviceAccount": "reader",
    "snapshots": {"claim": "snapshots", "urls": ["s3://bucket/models"]}, "allowedHosts": ["embeddings.example"],
    "settings": {"log_level": "debug", "slow_request_ms": 50, "traces": False},
    "monitor": {"enabled": True, "tokenSecret": "metrics", "labels": {"release": "prometheus"}},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}], "nodeSelector": {"disk": "nvme"},
}  # fmt: skip
CERTIFICATES = {"tokens": {"secret": "tokens"}, "tls": {"secret": "tls", "clientCA": True}}
Objects = dict[tuple[str, str], dict[str, Any]]


def helm(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    program = shutil.which("helm", path=f"{ROOT / '.clients/bin'}:/usr/local/bin:/usr/bin")
    if program is None:
        pytest.skip("no helm on the PATH or in .clients/bin: `make .clients/bin/helm` builds it")
    # helm from `go install` takes an old release of Kubernetes for granted
    command = [program, *arguments, "--kube-version", "1.31.0", "--values", "-"]
    return subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=120)


def render(values: dict[str, Any]) -> Objects:
    done = helm("template", "emb", str(CHART), "--namespace", "ads", values=values)
    assert done.returncode == 0, done.stderr
    documents = [one for one in yaml.safe_load_all(done.stdout) if one]
    found = {(one["kind"], one["metadata"]["name"]): one for one in documents}
    assert len(found) == len(documents)
    return found


def env_of(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def container_of(document: dict[str, Any]) -> dict[str, Any]:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


@pytest.mark.parametrize("values", [OPEN, WHOLE, CERTIFICATES], ids=["open", "whole", "certificates"])
def test_the_chart_is_of_kubernetes_schemas(values: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    done = helm("lint", "--strict", str(CHART), values=values)
    assert done.returncode == 0, done.stdout
    for document in render(values).values():
        if document["kind"] == "PodMonitor":  # of the Prometheus operator, not of Kubernetes
            continue
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)


def test_the_manifests_are_of_kubernetes_schemas() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in kubernetes().values():
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)
    broken = {**kubernetes()["StatefulSet", "tierstore"], "spec": {"replicas": "two"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize("values", [OPEN, WHOLE, CERTIFICATES], ids=["open", "whole", "certificates"])
def test_pods_are_what_the_image_and_the_settings_expect(values: dict[str, Any]) -> None:
    objects = render(values)
    pods = [one for (kind, _), one in objects.items() if kind in ("StatefulSet", "Deployment")]
    assert len(pods) == 1 + ("fronts" in values)
    for one in pods:
        spec, container = one["spec"]["template"]["spec"], container_of(one)
        env = env_of(container)
        assert settings_named(env)
        given = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in env.items() if value}
        settings = load_settings(None, **given)
        assert spec["securityContext"]["runAsUser"] == int(instruction("USER"))
        assert [str(port["containerPort"]) for port in container["ports"]] == instruction("EXPOSE").split()
        assert spec["terminationGracePeriodSeconds"] >= settings.drain_s + 2 * FINISH_S > LONGEST_END_S
        readiness = container["readinessProbe"]
        assert settings.drain_s > readiness["periodSeconds"] * readiness["failureThreshold"]
        memory = int(container["resources"]["limits"]["memory"].removesuffix("Mi")) << 20
        assert 0.5 * memory <= settings.host_budget <= 0.8 * memory
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        claims = [claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())]
        assert set(mounts) == {*claims, *(volume["name"] for volume in spec["volumes"])}
        files = [value for name, value in env.items() if value.startswith("/etc/") or name.endswith("_CA")]
        assert all(any(value.startswith(place + "/") for place in mounts.values()) for value in files)
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"] == labels
        (budget,) = [
            document for (kind, _), document in objects.items()
            if kind == "PodDisruptionBudget" and document["spec"]["selector"]["matchLabels"] == labels
        ]  # fmt: skip
        assert budget["spec"]["maxUnavailable"] == 1
        (apart,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert (apart["labelSelector"]["matchLabels"], apart["topologyKey"]) == (labels, "kubernetes.io/hostname")
        assert one["spec"]["minReadySeconds"] > 0, "an update waits for this long after a node is ready"
        assert (settings.ready_unserved, settings.ready_warm_share) == (False, 0.8)
        assert settings.allow_open_network is ("secret" not in values["tokens"])


def test_a_node_may_be_asked_by_every_name_that_the_cluster_gives_it() -> None:
    objects = render(WHOLE)
    allowed = set(env_of(container_of(objects["StatefulSet", "emb"]))["TIERSTORE_ALLOWED_HOST"].split(","))
    services = [name for kind, name in objects if kind == "Service"]
    pods = [f"emb-{number}.emb" for number in range(4)]
    for name in (*services, *pods):
        assert {name, f"{name}.ads", f"{name}.ads.svc", f"{name}.ads.svc.cluster.local"} <= allowed
    assert "embeddings.example" in allowed
    front = env_of(container_of(objects["Deployment", "emb-front"]))
    urls = front["TIERSTORE_UPSTREAM"].split(",")
    assert urls == [f"https://{pod}.ads.svc:8000" for pod in pods]
    assert front["TIERSTORE_UPSTREAM_CA"] == "/etc/tierstore/tls/ca.crt"
    assert "TIERSTORE_SOURCE_ROOT" not in front, "a front loads nothing"
    assert objects["Service", "emb-client"]["spec"]["selector"] == objects["Deployment", "emb-front"]["spec"]["selector"]["matchLabels"]  # fmt: skip


@pytest.mark.parametrize(("replicas", "copies", "partitions"), [(4, 2, 64), (3, 1, 64), (1, 1, 16), (6, 3, 10)])
def test_nodes_have_all_partitions_between_them(replicas: int, copies: int, partitions: int) -> None:
    values = {**OPEN, "replicas": replicas, "copies": copies, "partitions": partitions}
    container = container_of(render(values)["StatefulSet", "emb"])
    (program,) = container["args"]
    owned: list[int] = []
    for number in range(replicas):
        environment = {"HOSTNAME": f"emb-{number}", "PATH": "/usr/bin:/bin"}
        shown = [*container["command"], program.replace("exec tierstore", "exec echo tierstore")]
        line = subprocess.run(shown, env=environment, capture_output=True, text=True, check=True).stdout
        found = re.fullmatch(r"tierstore serve --partition ([0-9]+-[0-9]+/[0-9]+)\n", line)
        assert found is not None, line
        of = load_settings(None, partition=found[1]).partition
        assert of is not None
        first, last, count = map(int, re.split("[-/]", found[1]))
        assert count == partitions
        owned += range(first, last + 1)
    assert sorted(owned) == sorted([*range(partitions)] * copies)


def test_metrics_are_read_with_their_token_and_over_tls() -> None:
    monitor = render(WHOLE)["PodMonitor", "emb"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": {"name": "metrics", "key": "token"}}
    assert (endpoint["scheme"], endpoint["path"], endpoint["port"]) == ("https", "/metrics", "http")
    assert endpoint["tlsConfig"]["serverName"] == "emb.ads.svc"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert ("PodMonitor", "emb") not in render(OPEN)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "tokens.secret: expected the name of a Secret"),
        ({**OPEN, "hostBudgetMiB": 30000}, "hostBudgetMiB: expected at most 80% of memoryMiB .32768., got 30000"),
        ({**OPEN, "partitions": 64, "copies": 2, "replicas": 3}, "replicas: expected a multiple of copies .2., got 3"),
        ({**OPEN, "copies": 2}, "copies: every node is a copy"),
        ({**OPEN, "tls": {"clientCA": True}}, "tls.clientCA needs tls.secret"),
        ({**OPEN, "antiAffinity": "never"}, "antiAffinity: expected required or preferred, got never"),
        ({"tokens": {"secret": "t"}, "monitor": {"enabled": True}}, "monitor.tokenSecret: expected"),
    ],
)
def test_values_that_do_not_go_together_stop_the_rendering(values: dict[str, Any], why: str) -> None:
    done = helm("template", "emb", str(CHART), values=values)
    assert done.returncode != 0
    assert re.search(why, done.stderr), done.stderr
