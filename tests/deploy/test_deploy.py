"""The files and examples for deployment agree with the service, and with each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from pydantic import ByteSize, TypeAdapter

from tests.deploy.image import copy_context, environment, instruction
from tests.service.fake_store import FakeStore
from tests.test_docs import blocks
from tierstore.config import ENV_PREFIX, Settings, load_settings, memory
from tierstore.service.limits.slow_clients import FINISH_S
from tierstore.service.server import GRPC_PORT, ServerThread

ROOT = Path(__file__).parents[2]
LONGEST_END_S = load_settings(None).drain_s + FINISH_S
COMPILING_S = 60  # the health check's start period


def pod() -> dict[str, Any]:
    (document,) = yaml.safe_load_all((ROOT / "deploy/kubernetes/statefulset.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == ("apps/v1", "StatefulSet")
    labels = document["spec"]["template"]["metadata"]["labels"]
    assert document["spec"]["selector"]["matchLabels"] == labels
    claims = [claim["metadata"]["name"] for claim in document["spec"]["volumeClaimTemplates"]]
    spec: dict[str, Any] = document["spec"]["template"]["spec"]
    volumes = [*claims, *(volume["name"] for volume in spec["volumes"])]
    assert sorted(mount["name"] for mount in spec["containers"][0]["volumeMounts"]) == sorted(volumes)
    return spec


def settings_named(variables: Any) -> set[str]:
    """The settings that variables of the environment set; an unknown one fails."""
    names = {name.removeprefix(ENV_PREFIX).lower() for name in variables if name.startswith(ENV_PREFIX)}
    assert names <= set(Settings.model_fields)
    return names


def test_the_pod_is_what_the_image_expects() -> None:
    spec, image = pod(), environment()
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsUser"] == int(instruction("USER"))
    assert spec["terminationGracePeriodSeconds"] > LONGEST_END_S
    assert container["args"] == json.loads(instruction("CMD"))
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert mounts == {image["TIERSTORE_DATA"]: False, image["TIERSTORE_SOURCE_ROOT"]: True, "/tmp": False}
    assert settings_named(entry["name"] for entry in container["env"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [str(port) for port in ports.values()] == instruction("EXPOSE").split()
    assert ports == {"http": int(image["TIERSTORE_PORT"]), "grpc": GRPC_PORT}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > COMPILING_S


def test_probes_ask_for_what_there_is(tmp_path: Path) -> None:
    (container,) = pod()["containers"]
    probes = {name: one["httpGet"] for name, one in container.items() if name.endswith("Probe")}
    assert set(probes) == {"startupProbe", "readinessProbe", "livenessProbe"}
    assert {probe["port"] for probe in probes.values()} == {"http"}
    store = FakeStore(load_settings(None, data=tmp_path, port=0, grpc_port="off"))
    with ServerThread(store) as server:  # type: ignore[arg-type]
        paths = [probe["path"] for probe in probes.values()]
        paths += re.findall(r"127\.0\.0\.1:8000(/[\w/]+)", instruction("HEALTHCHECK"))
        assert [httpx.get(server.url + path).status_code for path in paths] == [200] * 4


def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return document


def test_compose_runs_the_image_as_it_is_meant_to_run() -> None:
    both = {name: one for name, one in compose()["services"].items() if name.startswith("node-")}
    assert set(both) == {"node-a", "node-b"}
    volumes, host_ports = set(), set()
    for name, service in both.items():
        assert settings_named(service["environment"])
        assert name in service["environment"]["TIERSTORE_ALLOWED_HOST"].split(",")
        assert float(service["stop_grace_period"].removesuffix("s")) > LONGEST_END_S
        assert service["read_only"] is True
        assert [port.rpartition(":")[2] for port in service["ports"]] == instruction("EXPOSE").split()
        in_dockerfile = instruction("HEALTHCHECK")
        assert json.dumps(service["healthcheck"]["test"][1:]) == in_dockerfile.partition("CMD ")[2]
        for option in ("interval", "timeout", "retries", "start_period"):
            assert f"--{option.replace('_', '-')}={service['healthcheck'][option]}" in in_dockerfile
        volumes.add(service["volumes"][0])
        host_ports.update(port.rpartition(":")[0] for port in service["ports"])
    assert (len(volumes), len(host_ports)) == (2, 4), "nothing is shared by the nodes"


def test_compose_names_what_there_is() -> None:
    document = compose()
    ports = [port for service in document["services"].values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert len({port.rpartition(":")[0] for port in ports}) == len(ports)
    used = set()
    for service in document["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert source == "./snapshots" or (ROOT / source).is_file(), source
            else:
                used.add(source)
        assert set(service.get("depends_on", ())) <= set(document["services"])
        assert set(service.get("networks", ())) <= set(document["networks"])
    assert used == set(document["volumes"])
    targets = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0][
        "static_configs"
    ]
    assert [target.split(":")[0] for target in targets[0]["targets"]] == ["node-a", "node-b"]


@pytest.mark.parametrize("name", ["kafka", "redis", "objects"])
def test_additions_to_compose_set_what_the_service_has(name: str) -> None:
    addition, services = compose(f"deploy/{name}.yml"), compose()["services"]
    for node in addition["services"].values():
        assert set(node.get("depends_on", ())) <= set(services)
        wanted = {key.removeprefix(ENV_PREFIX).lower() for key in node["environment"] if key.startswith(ENV_PREFIX)}
        missing = wanted - set(Settings.model_fields)
        if missing:
            pytest.skip(f"this build has no setting {', '.join(sorted(missing))}")
        load_settings(
            None,
            **{
                key.removeprefix(ENV_PREFIX).lower(): value
                for key, value in node["environment"].items()
                if key.startswith(ENV_PREFIX)
            },
        )


def test_the_memory_that_compose_allows_holds_what_the_settings_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [one for name, one in compose()["services"].items() if name.startswith("node-")]
    (limit,) = {TypeAdapter(ByteSize).validate_python(one["mem_limit"] + "ib") for one in nodes}  # 3g is 3 GiB there
    monkeypatch.setattr(memory, "memory_bytes", lambda: limit)
    monkeypatch.setattr(memory, "processors", lambda: 64)
    for one in nodes:
        settings = load_settings(None, host_budget=one["environment"]["TIERSTORE_HOST_BUDGET"])
        assert memory.why_too_much(settings) is None
        assert memory.why_too_much(settings.model_copy(update={"host_budget": limit})) is not None


def test_the_bucket_that_nodes_read_from_is_made_before_they_start() -> None:
    makes = compose()["services"]["objects-bucket"]
    key = makes["environment"]["MC_HOST_objects"]
    for node in compose("deploy/objects.yml")["services"].values():
        bucket = node["environment"]["TIERSTORE_SOURCE_ROOT"].partition("s3://")[2]
        assert makes["command"].endswith(f" objects/{bucket}")
        assert f"//{node['environment']['AWS_ACCESS_KEY_ID']}:{node['environment']['AWS_SECRET_ACCESS_KEY']}@" in key
        assert node["depends_on"] == {"objects-bucket": {"condition": "service_completed_successfully"}}


def test_compose_is_of_its_schema() -> None:
    compose_spec = pytest.importorskip("compose_spec", reason="compose_spec is not installed")
    document = compose()
    compose_spec.ComposeSpecification.model_validate(document)
    with pytest.raises(ValueError, match="read_only"):
        compose_spec.ComposeSpecification.model_validate({"services": {"a": {"read_only": ["/"]}}})
    allowed = {field.alias or name for name, field in compose_spec.Service.model_fields.items()}
    assert {"stop_grace_period", "healthcheck"} <= allowed, "an unknown name passes its validation"
    for service in document["services"].values():
        assert service.keys() <= allowed
    for name in ("kafka", "redis", "objects"):
        compose_spec.ComposeSpecification.model_validate(compose(f"deploy/{name}.yml"))


def kubernetes(folder: str = "deploy/kubernetes") -> dict[tuple[str, str], dict[str, Any]]:
    """What `kubectl apply -k` of the folder applies, by kubectl itself."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl on the PATH")
    done = subprocess.run([program, "kustomize", str(ROOT / folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def test_the_manifests_fit_the_image_and_each_other() -> None:
    of = kubernetes()
    stateful = of["StatefulSet", "tierstore"]["spec"]
    labels, spec = stateful["template"]["metadata"]["labels"], stateful["template"]["spec"]
    (container,) = spec["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert settings_named(env)
    load_settings(None, **{name.removeprefix(ENV_PREFIX).lower(): value for name, value in env.items()})
    assert spec["terminationGracePeriodSeconds"] > float(env["TIERSTORE_DRAIN_S"]) + 2 * FINISH_S
    assert stateful["minReadySeconds"] > 0
    readiness = container["readinessProbe"]
    assert float(env["TIERSTORE_DRAIN_S"]) > readiness["periodSeconds"] * readiness["failureThreshold"]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert 0.5 <= float(env["TIERSTORE_HOST_BUDGET"].removesuffix("GiB")) / limit <= 0.8
    assert not [volume for volume in spec["volumes"] if "emptyDir" not in volume], "it starts as it is"
    assert of["Service", stateful["serviceName"]]["spec"]["clusterIP"] == "None"
    names = [f"tierstore-{number}.tierstore" for number in range(stateful["replicas"])]
    services = [name for kind, name in of if kind == "Service"]
    assert {*names, *services} <= set(env["TIERSTORE_ALLOWED_HOST"].split(","))
    for name in services:
        service = of["Service", name]["spec"]
        assert service["selector"] == labels
        assert {port["targetPort"] for port in service["ports"]} == {port["name"] for port in container["ports"]}
    for apart in spec["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]:
        assert apart["podAffinityTerm"]["labelSelector"]["matchLabels"] == labels
    (claim,) = stateful["volumeClaimTemplates"]
    assert "storageClassName" not in claim["spec"], "the cluster's default"
    assert of["PodDisruptionBudget", "tierstore"]["spec"]["selector"]["matchLabels"] == labels
    assert of["NetworkPolicy", "tierstore"]["spec"]["podSelector"]["matchLabels"] == labels


def test_the_kserve_files_fit_the_image_and_the_transformer() -> None:
    """That they are of KServe's own types is for tests/interop/test_kserve.py."""
    files = {
        name: yaml.safe_load((ROOT / f"deploy/kserve/{name}.yaml").read_text()) for name in ("predictor", "transformer")
    }
    image, spec = environment(), files["predictor"]["spec"]["predictor"]
    (container,), (first,) = spec["containers"], spec["initContainers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert settings_named(env)
    load_settings(None, **{name.removeprefix(ENV_PREFIX).lower(): value for name, value in env.items()})
    assert (
        container["name"] == files["transformer"]["spec"]["transformer"]["containers"][0]["name"] == "kserve-container"
    )
    assert container["args"] == json.loads(instruction("CMD"))
    assert spec["securityContext"]["runAsUser"] == int(instruction("USER"))
    assert spec["terminationGracePeriodSeconds"] > float(env["TIERSTORE_DRAIN_S"]) + FINISH_S
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
    assert (mounts["data"], mounts["snapshots"]) == (image["TIERSTORE_DATA"], image["TIERSTORE_SOURCE_ROOT"])
    assert env["TIERSTORE_WATCH_SNAPSHOTS"] == mounts["snapshots"]
    assert {mount["name"]: mount["mountPath"] for mount in first["volumeMounts"]}.items() <= mounts.items()
    (other,) = pod()["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": other[probe]["httpGet"]["path"], "port": 8000}
    service = f"{files['predictor']['metadata']['name']}-predictor"
    assert service in env["TIERSTORE_ALLOWED_HOST"].split(",")
    (transformer,) = files["transformer"]["spec"]["transformer"]["containers"]
    given = dict(word.removeprefix("--").split("=") for word in transformer["args"])
    assert given["tierstore_url"].removeprefix("http://") in env["TIERSTORE_ALLOWED_HOST"].split(",")
    program = (ROOT / "deploy/kserve/transformer.py").read_text()
    assert all(f'"--{name}"' in program for name in given if name.startswith("tierstore"))


def test_tokens_are_added_to_the_manifests() -> None:
    of = kubernetes("deploy/kubernetes-tokens")
    assert of.keys() == kubernetes().keys()
    spec = of["StatefulSet", "tierstore"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "tokens"]
    assert env["TIERSTORE_TOKENS"] == f"{mount['mountPath']}/tokens.json"
    assert (environment()["TIERSTORE_ALLOW_OPEN_NETWORK"], env["TIERSTORE_ALLOW_OPEN_NETWORK"]) == (
        "true",
        "false",
    )
    assert "tokens" in [volume["name"] for volume in spec["volumes"]]
    assert "TIERSTORE_HOST_BUDGET" in env


def unit() -> str:
    """The unit of systemd."""
    ((_, text),) = blocks("docs/deploy.md", "ini")
    return text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("more", ["", "Restarts=always\n"])
def test_systemd_takes_the_unit(tmp_path: Path, more: str) -> None:
    """What it does not know it passes over with a word on standard error."""
    path = tmp_path / "tierstore.service"
    path.write_text(
        re.sub("(?m)^ExecStart=/.* serve$", "ExecStart=/bin/true serve", unit()).replace(
            "[Install]", f"{more}[Install]"
        )
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60
    )
    found = [line for line in done.stdout.splitlines() + done.stderr.splitlines() if str(path) in line]
    assert (done.returncode, bool(found)) == (0, bool(more)), done.stderr


def test_systemd_gives_it_time_to_start_and_to_end() -> None:
    options = dict(line.split("=", 1) for line in unit().splitlines() if "=" in line)
    assert float(options["TimeoutStopSec"]) > LONGEST_END_S
    assert settings_named(pair.partition("=")[0] for pair in options["Environment"].split()) == {"data", "source_root"}


def test_what_is_copied_into_the_image_is_all_that_its_package_is_built_of(tmp_path: Path) -> None:
    """The whole of the Dockerfile is for test_image.py; this is the step that a new file breaks."""
    copy_context(tmp_path)
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    command = [sys.executable, "-m", "pip", "wheel", ".", *options, "-w", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("out/*.whl"))
