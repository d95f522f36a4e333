"""Each alert fires where the thing is broken, and none does where it is not: in a real Prometheus."""

from __future__ import annotations

import itertools
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import yaml

import tierstore
from tests.certificates import Authority
from tests.client.nodes import DIM, ITEMS, Node, nodes, write_change, write_version
from tests.engine.scenes import eventually
from tierstore.engine.data import disk_room
from tierstore.engine.operations.problems import MODEL_KINDS, STORE_KINDS
from tierstore.service.admin import health_metrics
from tierstore.service.context import SERVICE_KINDS
from tierstore.service.limits.shedding import REASONS

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yml"
RUNBOOK = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
METRICS = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
COMMANDS = set(
    re.findall(r"^## `tierstore ([\w-]+)`", (ROOT / "docs/cli.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
)


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs the program {name} (Debian's package prometheus)")
    return path


def parts_of_the_runbook() -> set[str]:
    return {
        re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^## (.+)$", RUNBOOK, flags=re.MULTILINE)
    }


def test_prometheus_takes_the_rules_and_its_configuration(tmp_path: Path) -> None:
    shutil.copytree(RULES.parent, tmp_path / "prometheus")
    subprocess.run(
        [program("promtool"), "check", "config", str(tmp_path / "prometheus/prometheus.yml")], check=True, timeout=60
    )


def test_each_alert_has_a_part_in_the_runbook_and_each_part_an_alert() -> None:
    links = [urlsplit(rule["annotations"]["runbook_url"]) for rule in rules()]
    assert {(link.scheme, link.path) for link in links} == {("https", "/tierstore/runbook.html")}
    named = {link.fragment for link in links}
    there = parts_of_the_runbook()
    assert named <= there
    linked = set(re.findall(r"\(#([a-z0-9-]+)\)", RUNBOOK))
    assert there <= named | linked


def test_each_alert_says_what_it_means_and_by_which_command_the_cause_is_found() -> None:
    for rule in rules():
        text = rule["annotations"]["description"]
        assert re.search(r"`[a-z_(]+", text), rule["alert"]
        for name in re.findall(r"`tierstore (\w+)", text):
            assert name in COMMANDS, text
        for metric in re.findall(r"tierstore_\w+", text):
            assert metric in METRICS, text


def test_the_runbook_names_commands_metrics_and_reasons_that_there_are() -> None:
    inline = re.findall(r"`([^`\n]+)`", RUNBOOK)
    assert {match[1] for text in inline if (match := re.match(r"tierstore ([a-z][\w-]*)", text))} <= COMMANDS
    assert {name for text in inline for name in re.findall(r"\btierstore_\w+", text) if name not in METRICS} == set()
    reasons = RUNBOOK[RUNBOOK.index("`tierstore_shed_total` by reason.") :].partition("`tierstore_inflight")[0]
    assert set(re.findall(r"`(\w+)`[,:]", reasons)) <= set(REASONS)


def test_who_is_called_has_minutes_left_to_find_the_cause() -> None:
    """Alerts of requests look at two minutes, and wait for two."""
    for rule in rules():
        if "request_seconds" in rule["expr"] and rule["labels"]["severity"] == "page":
            assert (rule["for"], set(re.findall(r"\[(\w+)\]", rule["expr"]))) == ("2m", {"2m"}), rule["alert"]


def test_the_runbook_has_every_kind_of_problem() -> None:
    table = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]+) \|", RUNBOOK, flags=re.MULTILINE))))
    assert table == {*MODEL_KINDS, *STORE_KINDS, *SERVICE_KINDS, "load_failed"}


# --- with a real Prometheus


@contextmanager
def prometheus(root: Path, targets: dict[str, str]) -> Iterator[str]:
    """One that scrapes `targets` (name: host and port) four times a second and waits for no alert. Its URL, once all were scraped."""
    group = {"name": "tierstore", "interval": "250ms", "rules": [{**rule, "for": "0s"} for rule in rules()]}
    (root / "alerts.yml").write_text(yaml.safe_dump({"groups": [group]}))
    static = [{"targets": [address], "labels": {"instance": name}} for name, address in targets.items()]
    job = {"job_name": "tierstore", "scrape_interval": "250ms", "scrape_timeout": "250ms", "static_configs": static}
    configuration = {"rule_files": ["alerts.yml"], "scrape_configs": [job]}
    (root / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        program("prometheus"),
        f"--config.file={root / 'prometheus.yml'}",
        f"--storage.tsdb.path={root / 'tsdb'}",
        f"--web.listen-address={address}",
        "--log.level=error",
    ]
    with subprocess.Popen(command) as process:
        try:
            eventually(lambda: _is_up(address), "Prometheus answers", pause_s=0.1)
            # it takes its targets from a list that it makes every five seconds
            eventually(lambda: len(scraped(f"http://{address}")) == len(targets), "all are scraped", pause_s=0.1)
            yield f"http://{address}"
        finally:
            process.terminate()


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/-/ready").status_code == 200
    except httpx.HTTPError:
        return False


def scraped(url: str) -> dict[str, float]:
    """When each instance was scraped last, in seconds since the epoch; it need not have answered."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": 'timestamp(up{job="tierstore"})'}).json()
    return {one["metric"]["instance"]: float(one["value"][1]) for one in answer["data"]["result"]}


def scraped_again(url: str) -> None:
    """Waits for Prometheus to have scraped all that it had."""
    before = scraped(url)
    eventually(lambda: all(at > before[name] for name, at in scraped(url).items()), "scraped again", pause_s=0.02)


def firing(url: str, instance: str) -> set[str]:
    """The alerts of an instance; of problems with their kind."""
    alerts = httpx.get(f"{url}/api/v1/alerts").json()["data"]["alerts"]
    of = [one["labels"] for one in alerts if one["labels"].get("instance", "") == instance]
    return {labels["alertname"] + (":" + labels["kind"] if "Problem" in labels["alertname"] else "") for labels in of}


def look_up(node: Node, keys: list[int], **headers: str) -> int:
    """Answered by Python, whose look-ups can be broken: reactors do not skip a list that nobody reads."""
    ids = {"name": "item_id", "datatype": "INT64", "shape": [len(keys)], "data": keys}
    asked = {"inputs": [ids], "unread": []}
    return httpx.post(f"{node.url}/v2/models/ctr/infer", json=asked, headers=headers).status_code


def address_of(node: Node) -> str:
    return node.url.removeprefix("http://")


def test_a_service_in_good_order_fires_nothing(tmp_path: Path) -> None:
    with nodes(tmp_path, 2, quotas={"*": {"freshness_max_s": 3600.0}}) as pair:
        snapshot, change = write_version(tmp_path, 1), write_change(tmp_path, 6, [1], 1.0)
        for node in pair:
            node.store.load_snapshot(snapshot)
            node.store.apply_delta(change)
        with prometheus(tmp_path, {f"node-{i}": address_of(node) for i, node in enumerate(pair)}) as url:
            query = {"query": "tierstore_problem and on (instance) count_over_time(up[1m]) > 8"}  # as rates need

            def seen() -> list[Any]:
                assert all(look_up(node, [1, 2, 3]) == 200 for node in pair)
                found: list[Any] = httpx.get(f"{url}/api/v1/query", params=query).json()["data"]["result"]
                return found

            eventually(lambda: len(seen()) > 2 * len(MODEL_KINDS), "both are scraped several times", pause_s=0.2)
            values = seen()
            assert {one["value"][1] for one in values} == {"0"}
            assert [firing(url, name) for name in ("node-0", "node-1", "")] == [set(), set(), set()]


def break_look_ups(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn they are slow, have no room, and fail."""
    plane, turn = node.server._http.service.dataplane, itertools.cycle(range(3))
    open_view = plane.open

    def broken(*args: Any, **options: Any) -> Any:
        which = next(turn)
        if which == 1:
            raise tierstore.Overloaded("no room")
        if which == 2:
            raise RuntimeError("a defect")
        time.sleep(0.1)
        return open_view(*args, **options)

    monkeypatch.setattr(plane, "open", broken)


def test_rows_that_cannot_be_read_are_errors_and_no_want_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are 503, and two alerts with two parts of the runbook."""
    with nodes(tmp_path, 1) as (node,):
        node.store.load_snapshot(write_version(tmp_path, 1))

        def broken(*_: Any, **__: Any) -> Any:
            raise tierstore.StorageError("a file ends before its rows")

        monkeypatch.setattr(node.server._http.service.dataplane, "open", broken)
        assert look_up(node, [1]) == 503
        predict = {"instances": [{"item_id": 1}]}
        assert httpx.post(f"{node.url}/v1/models/ctr:predict", json=predict).status_code == 503
        text = httpx.get(f"{node.url}/metrics").text
        counted = dict(
            re.findall(
                r'^tierstore_request_seconds_count{outcome="(\w+)",protocol="(?:oip|tfs)_http"} (\S+)$',
                text,
                re.MULTILINE,
            )
        )
        assert set(counted) == {"unavailable"}, counted


def test_each_alert_fires_where_the_thing_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All faults at once; the alert that compares with an hour ago is below."""
    expected = {rule["alert"] for rule in rules()} - {
        "TierstoreHitRateFell", "TierstoreDown", "TierstoreNodesDiffer", "TierstoreCredentialEnds",
    }  # fmt: skip
    with nodes(tmp_path, 2, quotas={"*": {"freshness_max_s": 3600.0}}) as (node, other):
        snapshot = write_version(tmp_path, 1)
        for one in (node, other):
            one.store.load_snapshot(snapshot)
        other.store.load_snapshot(write_version(tmp_path, 2))
        two_hours_old = datetime.now(UTC) - timedelta(hours=2)
        with tierstore.DeltaWriter(tmp_path / "old.arrow", model="ctr", seq=6, event_time=two_hours_old) as delta:
            delta.upsert("item", [1], np.zeros((1, DIM), np.float32))
        node.store.apply_delta(tmp_path / "old.arrow")
        node.server._http.service.draining = True
        monkeypatch.setattr(health_metrics, "memory_bytes", lambda: 1 << 20)
        monkeypatch.setattr(disk_room, "_free_and_floor", lambda root, reserve: (10, 20))
        break_look_ups(node, monkeypatch)
        targets = {"node": address_of(node), "other": address_of(other), "gone": "127.0.0.1:9"}
        with prometheus(tmp_path, targets) as url:

            def fired() -> bool:
                for _ in range(3):
                    look_up(node, [ITEMS + 1, ITEMS + 2, 1])
                look_up(node, [1], host="elsewhere.example")
                return expected <= {name.partition(":")[0] for name in firing(url, "node")}

            eventually(fired, f"all of {sorted(expected)}", pause_s=0.1)
            assert "TierstoreProblem:disk_full" in firing(url, "node")
            assert firing(url, "gone") == {"TierstoreDown"}
            assert "TierstoreNodesDiffer" in firing(url, "")
            alerts = httpx.get(f"{url}/api/v1/alerts").json()["data"]["alerts"]
            assert not [text for one in alerts for text in one["annotations"].values() if "<error" in text]


def test_a_certificate_that_ends_soon(tmp_path: Path) -> None:
    """Those of the tests are for two days."""
    authority = Authority(tmp_path)
    pair = authority.issue("node")
    with nodes(tmp_path, 1, tls_cert=pair.cert, tls_key=pair.key) as (node,):
        with httpx.Client(verify=ssl.create_default_context(cafile=authority.ca)) as client:
            text = client.get(f"{node.url}/metrics").text
        found = re.search(
            r'^tierstore_credential_ends_timestamp_seconds{kind="certificate"} (\S+)$', text, re.MULTILINE
        )
        assert found is not None
        assert 1.9 * 86400 < float(found[1]) - time.time() <= 2 * 86400


def test_what_compares_with_earlier(tmp_path: Path) -> None:
    """By Prometheus's own tests of rules: the hit rate fell, also on a node that started a quarter
    of an hour before, and not on one that warms; and a certificate ends within a week.
    """
    labels = 'job="tierstore", instance="node", model="ctr"'
    young, warms = (f'job="tierstore", instance="{name}", model="ctr"' for name in ("young", "warms"))
    series = [
        {"series": f'tierstore_lookup_keys_total{{{young}, tier="host"}}', "values": "_x20 0+900x15 13500+300x25 _x60"},
        {"series": f'tierstore_lookup_keys_total{{{young}, tier="disk"}}', "values": "_x20 0+100x15 1500+700x25 _x60"},
        {"series": f'tierstore_lookup_keys_total{{{warms}, tier="host"}}', "values": "0+100x5 500+900x150"},
        {"series": f'tierstore_lookup_keys_total{{{warms}, tier="disk"}}', "values": "0+900x5 4500+100x150"},
        {"series": f'tierstore_lookup_keys_total{{{labels}, tier="host"}}', "values": "0+900x60 54000+300x90"},
        {"series": f'tierstore_lookup_keys_total{{{labels}, tier="disk"}}', "values": "0+100x60 6000+700x90"},
        {
            "series": 'tierstore_credential_ends_timestamp_seconds{job="tierstore", instance="node", kind="token"}',
            "values": "604000x200",
        },
    ]

    def alert(name: str, at: str, *expected: dict[str, str]) -> dict[str, Any]:
        return {"alertname": name, "eval_time": at, "exp_alerts": [{"exp_labels": one} for one in expected]}

    fell = {"instance": "node", "model": "ctr", "severity": "ticket"}
    young_fell = fell | {"instance": "young"}
    ends = {"instance": "node", "job": "tierstore", "kind": "token", "severity": "ticket"}
    document = {
        "rule_files": ["bare.yml"],
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "alert_rule_test": [
                    alert("TierstoreHitRateFell", "35m"),
                    alert("TierstoreHitRateFell", "46m", young_fell),
                    alert("TierstoreHitRateFell", "70m", fell),
                    alert("TierstoreHitRateFell", "90m", fell),
                    alert("TierstoreCredentialEnds", "30m"),
                    alert("TierstoreCredentialEnds", "70m", ends),
                ],
            }
        ],
    }
    bare = [{name: value for name, value in rule.items() if name != "annotations"} for rule in rules()]
    (tmp_path / "bare.yml").write_text(yaml.safe_dump({"groups": [{"name": "tierstore", "rules": bare}]}))
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(tmp_path / "tests.yml")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
