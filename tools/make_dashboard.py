"""Write deploy/grafana/tierstore.json, the dashboard of Grafana: what its panels are is said here once, in few lines each.

python -m tools.make_dashboard
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[1] / "deploy/grafana/tierstore.json"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
NODE = 'job="tierstore", instance=~"$instance"'  # labels that every query asks for
MODEL = NODE + ', model=~"$model"'
WIDTH, HEIGHT, ACROSS = 8, 8, 24  # of a panel; of the dashboard


class Panel(NamedTuple):
    """`queries` are (expression, legend); `unit` is Grafana's word."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    text: str = ""
    stacked: bool = False


class Row(NamedTuple):
    """A collapsed row has what not every node has, or needs."""

    title: str
    panels: Sequence[Panel]
    collapsed: bool = False


def rate(metric: str, labels: str = NODE, within: str = "$__rate_interval") -> str:
    return f"rate({metric}{{{labels}}}[{within}])"


def or_zero(expression: str, by: str, there: str) -> str:
    """The expression, and 0 for the others that there are: so that nothing wrong is a line at 0 and no empty panel."""
    return f"{expression} or 0 * sum by ({by}) ({there})"


def quantiles(
    metric: str, labels: str, by: str, legend: str, within: str = "$__rate_interval"
) -> list[tuple[str, str]]:
    counted = f"sum by (le, {by}) ({rate(f'{metric}_bucket', labels, within)})"
    return [(f"histogram_quantile({q}, {counted})", f"{legend} p{round(100 * q)}") for q in (0.5, 0.99)]


def gauges(labels: str, *named: tuple[str, str]) -> list[tuple[str, str]]:
    return [(f"{metric}{{{labels}}}", f"{{{{instance}}}} {legend}".strip()) for metric, legend in named]


DATA_PLANE = NODE + ', protocol!~"admin|upstream"'
FAILED = 'outcome=~"error|overloaded|deadline|unavailable"'
READ = rate("tierstore_lookup_keys_total", f'{MODEL}, tier=~"disk|remote"', "5m")
ABSENT = rate("tierstore_lookup_keys_total", f'{MODEL}, tier="absent"', "5m")
KEYS = rate("tierstore_lookup_keys_total", MODEL, "5m")
# Of the canary alone: series of the version that the canary is at the moment. Versions are labels there, and values here.
IS_CANARY = f'and on (instance, model, version) count_values by (instance, model) ("version", tierstore_canary_version{{{MODEL}}} > 0)'
IS_ACTIVE = f'and on (instance, model, version) count_values by (instance, model) ("version", tierstore_active_version{{{MODEL}}} > 0)'


def _of_version(which: str, name: str) -> list[tuple[str, str]]:
    counted = f"sum by (le, instance, model, version) ({rate('tierstore_model_request_seconds_bucket', MODEL, '5m')})"
    return [(f"histogram_quantile(0.99, {counted}) {which}", f"{{{{model}}}} {{{{version}}}} ({name})")]


def _errors(which: str, name: str) -> tuple[str, str]:
    by = "sum by (instance, model, version)"
    all_of = f"{by} ({rate('tierstore_model_requests_total', MODEL, '5m')})"
    failed = f"{by} ({rate('tierstore_model_requests_total', f'{MODEL}, {FAILED}', '5m')})"
    return f"(({failed} or 0 * {all_of}) / ({all_of} > 0)) {which}", f"{{{{model}}}} {{{{version}}}} ({name})"


ROWS = (
    Row("Requests", [
        Panel("Nodes", "short", [
            (f"sum(tierstore_ready{{{NODE}}})", "ready"), (f"count(up{{{NODE}}})", "there are"),
            (f"sum(tierstore_problem{{{NODE}}})", "problems"),
        ], "The status of the node describes its problems, and the runbook says what to do."),
        Panel("Requests a second", "reqps", [(f"sum by (instance, protocol) ({rate('tierstore_request_seconds_count', NODE)})", "{{instance}} {{protocol}}")]),
        Panel("Failed requests a second", "reqps", [(
            or_zero(f"sum by (instance, outcome) ({rate('tierstore_request_seconds_count', f'{DATA_PLANE}, {FAILED}')})", "instance", rate("tierstore_request_seconds_count")),
            "{{instance}} {{outcome}}",
        )], "Faults of the service, and requests for which it had no room or time. Errors of clients are not counted."),
        Panel("Latency of look-ups and predictions", "s", quantiles("tierstore_request_seconds", DATA_PLANE, "instance", "{{instance}}")),
        Panel("Latency by model, p99", "s", quantiles("tierstore_model_request_seconds", MODEL, "instance, model", "{{instance}} {{model}}")[1:]),
        Panel("Queue time", "s", quantiles("tierstore_queue_seconds", NODE, "instance, pool", "{{instance}} {{pool}}", "5m"),
              "How long requests that Python answers waited for a thread. Requests that reactors answer do not wait."),
    ]),
    Row("Rows", [
        Panel("Keys a second by tier", "short", [(f"sum by (tier) ({rate('tierstore_lookup_keys_total', MODEL)})", "{{tier}}")], stacked=True),
        Panel("Answered from memory", "percentunit", [(f"1 - sum by (instance, model) ({READ}) / (sum by (instance, model) ({KEYS}) > 0)", "{{instance}} {{model}}")],
              "Share of the keys that were not read from disk or from other machines. Absent keys do not count against it."),
        Panel("Absent keys", "percentunit", [(
            f"sum by (instance, model) ({ABSENT}) / (sum by (instance, model) ({KEYS}) > 0)",
            "{{instance}} {{model}}",
        )], "Share of the keys that have no row and get the default."),
        Panel("What memory would answer with so many times of it", "percentunit",
              [(f"avg by (model, memory) (tierstore_cache_hit_rate_at{{{MODEL}}})", "{{model}} {{memory}} times")],
              "Mean over tables and nodes, estimated from sampled look-ups."),
        Panel("Bytes by tier", "bytes", [(f"sum by (instance, tier) (tierstore_tier_bytes{{{MODEL}}})", "{{instance}} {{tier}}")]),
        Panel("Rows", "short", [(f"sum by (instance, model) (tierstore_table_rows{{{MODEL}}})", "{{instance}} {{model}}")]),
    ]),
    Row("Versions and deltas", [
        Panel("Delta age", "s", gauges(MODEL, ("tierstore_delta_age_seconds", "{{model}}")), "Since the event time of the newest delta that is visible."),
        Panel("Freshness of deltas", "s", quantiles("tierstore_delta_freshness_seconds", MODEL, "instance, model", "{{instance}} {{model}}", "5m"),
              "From the event time of each delta until it was visible."),
        Panel("Watermark", "short", gauges(MODEL, ("tierstore_delta_watermark", "{{model}}"))),
        Panel("Active version", "short", gauges(MODEL, ("tierstore_active_version", "{{model}}"))),
        Panel("Deltas not folded yet", "bytes", [(f"sum by (instance, model) (tierstore_overlay_bytes{{{MODEL}}})", "{{instance}} {{model}}"), *gauges(NODE, ("tierstore_overlay_budget_bytes", "budget"))]),
        Panel("Deltas in the log", "short", gauges(MODEL, ("tierstore_log_entries", "{{model}}"))),
        Panel("Versions by state", "short", [(f"sum by (instance, model, state) (tierstore_versions{{{MODEL}}}) > 0", "{{instance}} {{model}} {{state}}")]),
        Panel("Loads, exports and backups", "short", [*gauges(NODE, ("tierstore_jobs", "run or wait")), (f"sum by (instance, kind, state) (increase(tierstore_jobs_ended_total{{{NODE}}}[1h]))", "{{instance}} {{kind}} {{state}}, in an hour")]),
        Panel("Time for background work", "percentunit", gauges(NODE, ("tierstore_background_share", "share of the time"), ("tierstore_warm_share", "warm after the start")),
              "How much of the time loads, verification and warming may work beside look-ups."),
    ]),
    Row("Memory and disk", [
        Panel("Resident memory and budget", "bytes", gauges(NODE, ("process_resident_memory_bytes", "resident"), ("tierstore_memory_limit_bytes", "limit"), ("tierstore_host_used_bytes", "host tier"), ("tierstore_host_budget_bytes", "host budget"))),
        Panel("Memory by part", "bytes", [(f"sum by (part) (tierstore_memory_bytes{{{NODE}}})", "{{part}}")], "`other` is the interpreter, code, threads, and everything that is not counted.", stacked=True),
        Panel("Disk", "bytes", gauges(NODE, ("tierstore_disk_free_bytes", "free"), ("tierstore_disk_reserve_bytes", "kept free"))),
        Panel("Bytes of requests in progress", "bytes", gauges(NODE, ("tierstore_inflight_bytes", "look-ups"), ("tierstore_delta_inflight_bytes", "deltas"), ("tierstore_unsent_bytes", "answers not taken yet"))),
        Panel("Processors", "short", [(f"sum by (instance) ({rate('process_cpu_seconds_total', NODE)})", "{{instance}}")], "Seconds of processor time a second."),
        Panel("Open files", "short", gauges(NODE, ("process_open_fds", "open"), ("process_max_fds", "limit"))),
    ]),
    Row("Where requests wait, and why", [
        Panel("Reactors", "reqps", [(f"sum by (instance) ({rate('tierstore_reactor_answers_total')})", "{{instance}} answered by reactors"), (f"sum by (instance) ({rate('tierstore_reactor_handed_on_total')})", "{{instance}} handed to Python")]),
        Panel("Why requests left the reactors", "reqps", [(f"sum by (reason) ({rate('tierstore_reactor_handed_on_total')})", "{{reason}}")], "docs/overload.md has what each reason means.", stacked=True),
        Panel("Refused a second", "reqps", [(f"sum by (instance, reason) ({rate('tierstore_shed_total')})", "{{instance}} {{reason}}")]),
        Panel("Requests that wait", "short", gauges(NODE, ("tierstore_lookup_queue_depth", "look-ups"), ("tierstore_control_queue_depth", "admin"), ("tierstore_switch_queue_depth", "switches"), ("tierstore_explain_queue_depth", "explain"))),
        Panel("Threads at work", "short", gauges(NODE, ("tierstore_lookup_threads_busy", "look-ups"), ("tierstore_lookup_threads", "look-ups, there are"), ("tierstore_switch_threads_busy", "switches"))),
        Panel("Connections", "short", gauges(NODE, ("tierstore_connections", "open"), ("tierstore_connections_limit", "limit"))),
        Panel("p99 of look-ups, and in quiet", "s", gauges(NODE, ("tierstore_lookup_p99_seconds", "measured last"), ("tierstore_lookup_quiet_p99_seconds", "without background work")),
              "These two decide how much background work may run."),
        Panel("Not let in", "reqps", [(f"sum by (instance, why) ({rate('tierstore_access_refused_total')})", "{{instance}} {{why}}")]),
    ]),
    Row("Canary", [
        Panel("Share of the canary", "percentunit", gauges(MODEL, ("tierstore_canary_share", "{{model}}"))),
        Panel("Requests of the canary", "reqps", [(f"sum by (instance, model, version, outcome) ({rate('tierstore_model_requests_total', MODEL)}) {IS_CANARY}", "{{model}} {{version}} {{outcome}}")]),
        Panel("Failures of the canary beside the active version", "percentunit", [_errors(IS_CANARY, "canary"), _errors(IS_ACTIVE, "active")]),
        Panel("p99 of the canary beside the active version", "s", [*_of_version(IS_CANARY, "canary"), *_of_version(IS_ACTIVE, "active")]),
    ], collapsed=True),
    Row("Predictions", [
        Panel("Predictions a second", "reqps", [(f"sum by (instance, model) ({rate('tierstore_predicts_total', MODEL)})", "{{instance}} {{model}}")]),
        Panel("Where a prediction's time goes", "s", [(f"sum by (model, part) ({rate('tierstore_predict_seconds_total', MODEL, '5m')}) / ignoring (part) group_left sum by (model) ({rate('tierstore_predicts_total', MODEL, '5m')})", "{{model}} {{part}}")],
              "Mean seconds. `total` includes the other parts and the service's own time."),
        Panel("Runs of dense parts", "ops", [(f"sum by (instance, model) ({rate('tierstore_dense_runs_total', MODEL)})", "{{instance}} {{model}}"), (f"sum by (instance, model) ({rate('tierstore_dense_failed_runs_total', MODEL)})", "{{instance}} {{model}} failed")]),
        Panel("Joined requests", "short", [(f"histogram_quantile(0.5, sum by (le, instance) ({rate('tierstore_batch_requests_bucket', NODE, '5m')}))", "{{instance}} requests of a batch, p50")], "With micro-batching."),
    ], collapsed=True),
    Row("Sources of changes", [
        Panel("Kafka: messages behind", "short", [(f"sum by (instance) (tierstore_kafka_lag_messages{{{NODE}}})", "{{instance}} deltas"), (f"sum by (instance, topic) (tierstore_kafka_rows_lag_messages{{{NODE}}})", "{{instance}} {{topic}}")]),
        Panel("Kafka: time behind", "s", [*gauges(NODE, ("tierstore_kafka_lag_seconds", "deltas"), ("tierstore_kafka_rows_lag_seconds", "{{topic}}"))]),
        Panel("Kafka: state", "short", [(f"tierstore_kafka_state{{{NODE}}} > 0", "{{instance}} {{state}}"), (f"tierstore_kafka_rows_state{{{NODE}}} > 0", "{{instance}} {{topic}} {{state}}")]),
        Panel("Kafka: applied a second", "short", [(f"sum by (instance) ({rate('tierstore_kafka_applied_total')})", "{{instance}} deltas"), (f"sum by (instance, topic) ({rate('tierstore_kafka_rows_rows_total')})", "{{instance}} rows of {{topic}}")]),
        Panel("Kafka: parked, held up, failed tries", "short", [*gauges(NODE, ("tierstore_kafka_parked", "parked"), ("tierstore_kafka_held_up", "{{model}} held up")), (f"sum by (instance) (increase(tierstore_kafka_errors_total{{{NODE}}}[5m]))", "{{instance}} failed tries")]),
        Panel("Freshness of rows from Kafka", "s", quantiles("tierstore_kafka_rows_freshness_seconds", NODE, "instance, topic", "{{instance}} {{topic}}", "5m")),
        Panel("Watched directories and locations", "short", [
            (f"increase(tierstore_watch_applied_total{{{NODE}}}[5m])", "{{instance}} deltas"), (f"increase(tierstore_watch_errors_total{{{NODE}}}[5m])", "{{instance}} deltas, failed tries"),
            (f"increase(tierstore_watched_snapshots_loaded_total{{{NODE}}}[1h])", "{{instance}} snapshots in an hour"), *gauges(NODE, ("tierstore_watched_snapshots_problems", "snapshots, problems")),
        ]),
    ], collapsed=True),
    Row("Cache on SSD", [
        Panel("Used and budget", "bytes", gauges(NODE, ("tierstore_ssd_cache_used_bytes", "used"), ("tierstore_ssd_cache_budget_bytes", "budget"), ("tierstore_ssd_cache_waiting_bytes", "waits to be written"))),
        Panel("Answered by the SSD", "percentunit", [(f"sum by (instance, model) ({rate('tierstore_ssd_cache_hits_total', MODEL, '5m')}) / (sum by (instance, model) ({rate('tierstore_ssd_cache_hits_total', MODEL, '5m')}) + sum by (instance, model) ({rate('tierstore_ssd_cache_misses_total', MODEL, '5m')}))", "{{instance}} {{model}}")], "Of the keys that were not in memory."),
        Panel("On", "short", gauges(NODE, ("tierstore_ssd_cache_on", ""))),
    ], collapsed=True),
    Row("Device tier", [
        Panel("Used and budget of the GPU", "bytes", gauges(NODE, ("tierstore_device_used_bytes", "used"), ("tierstore_device_budget_bytes", "budget"))),
        Panel("Offers that wait", "short", gauges(NODE, ("tierstore_device_promotions_waiting", "wait"), ("tierstore_device_promotions_limit", "may wait"))),
        Panel("Workspaces", "short", gauges(NODE, ("tierstore_device_workspaces_taken", "in use"), ("tierstore_device_workspaces", "there are"))),
    ], collapsed=True),
    Row("Credentials", [
        Panel("Until credentials end", "s", [(f"tierstore_credential_ends_timestamp_seconds{{{NODE}}} - time()", "{{instance}} {{kind}}")]),
    ], collapsed=True),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The document that Grafana takes."""
    found: list[dict[str, Any]] = []
    number, top = 0, 0
    for row in ROWS:
        number += 1
        panels = [_panel(panel, number + 1 + at, at, top + 1) for at, panel in enumerate(row.panels)]
        number += len(panels)
        place = {"h": 1, "w": ACROSS, "x": 0, "y": top}
        head = {
            "id": number - len(panels),
            "title": row.title,
            "type": "row",
            "collapsed": row.collapsed,
            "gridPos": place,
        }
        found += [head | {"panels": panels}] if row.collapsed else [head | {"panels": []}, *panels]
        top += 1 + (0 if row.collapsed else HEIGHT * -(-len(panels) * WIDTH // ACROSS))
    return {
        "uid": "tierstore",
        "title": "tierstore",
        "schemaVersion": 39,
        "version": 2,
        "editable": True,
        "refresh": "10s",
        "graphTooltip": 1,  # one line through all panels
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["tierstore"],
        "templating": {"list": [_variable("instance", "tierstore_ready"), _variable("model", "tierstore_active_version")]},
        "annotations": {"list": [_annotation()]},
        "panels": found,
    }  # fmt: skip


def _variable(name: str, metric: str) -> dict[str, Any]:
    query = {"query": f"label_values({metric}, {name})", "refId": name}
    every = {"includeAll": True, "allValue": ".*", "multi": True, "current": {"text": "All", "value": "$__all"}}
    return {"name": name, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, **every}


def _annotation() -> dict[str, Any]:
    """A line in every panel where another version became active."""
    switched = f"changes(tierstore_active_version{{{MODEL}}}[30s]) > 0"
    text = {"titleFormat": "another version", "textFormat": "{{instance}} {{model}}"}
    return {
        "name": "Switches",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "orange",
        "expr": switched,
        "step": "30s",
        **text,
    }


def _panel(panel: Panel, number: int, at: int, top: int) -> dict[str, Any]:
    across = ACROSS // WIDTH
    place = {"h": HEIGHT, "w": WIDTH, "x": WIDTH * (at % across), "y": top + HEIGHT * (at // across)}
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.stacked else {}
    bounds = {"min": 0} | ({"max": 1} if panel.unit == "percentunit" else {})
    return {
        "id": number,
        "title": panel.title,
        "description": panel.text,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, **bounds, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + n), "expr": expression, "legendFormat": legend}
            for n, (expression, legend) in enumerate(panel.queries)
        ],
    }  # fmt: skip


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
