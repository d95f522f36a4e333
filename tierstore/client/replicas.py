"""Compares nodes that should serve the same: versions, watermarks, and digests of sampled rows at one seq.

Only reads, through the public interface, on the calling thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tierstore.client.sync import Client
from tierstore.errors import NotFound, TierstoreError

POLL_S = 0.05
CLOCKS_S = 60.0  # by which clocks of nodes may differ

Clients = Mapping[str, Client]  # by the URL of the node


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Sampled rows of several nodes. `seq`: at which they were compared; None: never all at one.

    `problems` names nodes.
    """

    keys: int
    seq: int | None
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One model on several nodes.

    `problems`: what differs, in sentences that name nodes; empty where all serve the same.
    """

    model: str
    nodes: dict[str, dict[str, Any]]  # of each that has the model: `active_version`, `watermark`, `canary`, `problem`
    rows: SampledRows | None = None
    problems: list[str] = field(default_factory=list)


def compare_replicas(
    clients: Clients, model: str | None = None, *, rows: int = 256, wait_s: float = 10.0
) -> tuple[dict[str, str], list[Comparison]]:
    """Compare the nodes, in every model that one of them has, or in the one.

    Args:
        rows: sampled of each table.
        wait_s: for how long nodes at different seqs are asked again, until they were seen at the same one.

    Returns (error by node that does not answer, a comparison by model).
    """
    documents: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    for url, client in clients.items():
        try:
            documents[url] = client.status()["models"]
        except TierstoreError as error:
            errors[url] = str(error)
    names = sorted({name for document in documents.values() for name in document})
    if model is not None and documents:
        if model not in names:
            raise NotFound(f"no model {model!r} on any node; they have {', '.join(names) or 'none'}")
        names = [model]
    alive = {url: client for url, client in clients.items() if url in documents}
    return errors, [_compared(alive, documents, name, rows, wait_s) for name in names]


def _compared(
    clients: Clients, documents: Mapping[str, Mapping[str, Any]], model: str, rows: int, wait_s: float
) -> Comparison:
    shown = ("active_version", "watermark", "canary", "problem")
    states = {
        url: {name: document[model].get(name) for name in shown}
        for url, document in documents.items()
        if model in document
    }
    problems = [f"{url} has no model {model!r}" for url in clients if url not in states]
    problems += [f"{url}: {state['problem']}" for url, state in states.items() if state["problem"]]
    versions = {url: state["active_version"] for url, state in states.items()}
    if len(set(versions.values())) > 1:
        problems.append("active versions differ: " + _by_value(versions))
        return Comparison(model, states, None, problems)
    canaries = {url: None if state["canary"] is None else state["canary"]["version"] for url, state in states.items()}
    if len(set(canaries.values())) > 1:
        problems.append("canaries differ: " + _by_value(canaries))
    version = next(iter(versions.values()))
    if version is None:
        return Comparison(model, states, None, problems)
    compared = compare_rows({url: clients[url] for url in states}, model, version, rows=rows, wait_s=wait_s)
    return Comparison(model, states, compared, [*problems, *compared.problems])


def compare_rows(clients: Clients, model: str, version: int, *, rows: int = 256, wait_s: float = 10.0) -> SampledRows:
    """Compare rows of a version that every node serves, at a seq at which all of them were seen.

    Each node chooses keys, and all of them answer all of these. Nodes remove expired rows at times of
    their own, so rows that are expired, or will be in a minute, count as absent. Raises what a node
    raises, with its URL in the message.
    """
    chosen = {url: _sample(client, url, model, version, None, rows)["tables"] for url, client in clients.items()}
    tables = {url: ", ".join(sorted(sampled)) for url, sampled in chosen.items()}
    if len(set(tables.values())) > 1:
        return SampledRows(0, None, [f"version {version} has other tables: " + _by_value(tables)])
    keys = {
        name: _distinct(sampled[name]["keys"] for sampled in chosen.values()) for name in next(iter(chosen.values()))
    }
    total = sum(map(len, keys.values()))
    expire = any(table.get("ttl_s") is not None for sampled in chosen.values() for table in sampled.values())
    expired_at_s = int(time.time() + wait_s + CLOCKS_S) if expire else None
    seen: dict[str, dict[int, dict[str, Any]]] = {url: {} for url in clients}
    until = time.monotonic() + wait_s
    behind: Iterable[str] = list(clients)
    while True:
        for url in behind:
            answer = _sample(clients[url], url, model, version, keys, rows, expired_at_s)
            seen[url][answer["seq"]] = answer["tables"]
        common = set.intersection(*(set(by_seq) for by_seq in seen.values()))
        if common:
            seq = max(common)
            return SampledRows(total, seq, _differences({url: by_seq[seq] for url, by_seq in seen.items()}, seq))
        if time.monotonic() >= until:
            at = {url: max(by_seq) for url, by_seq in seen.items()}
            return SampledRows(
                total, None, [f"watermarks differ, and did not meet within {wait_s:g} s: " + _by_value(at)]
            )
        time.sleep(POLL_S)
        newest = max(max(by_seq) for by_seq in seen.values())
        behind = [url for url, by_seq in seen.items() if max(by_seq) < newest]


def _sample(
    client: Client,
    url: str,
    model: str,
    version: int,
    keys: Mapping[str, list[int]] | None,
    rows: int,
    expired_at_s: int | None = None,
) -> dict[str, Any]:
    try:
        return client.sample(model, version=version, keys=keys, rows=rows, expired_at_s=expired_at_s)
    except TierstoreError as error:
        error.add_note(f"node {url}")
        raise


def _distinct(lists: Iterable[list[int]]) -> list[int]:
    distinct: list[int] = np.unique(np.concatenate([np.array(codes, np.int64) for codes in lists])).tolist()
    return distinct


def _differences(answers: Mapping[str, Mapping[str, Any]], seq: int) -> list[str]:
    found = []
    for table in next(iter(answers.values())):
        digests = {
            url: f"{tables[table]['digest']} ({tables[table]['found']} found)" for url, tables in answers.items()
        }
        if len(set(digests.values())) > 1:
            found.append(f"rows of table {table!r} differ at seq {seq}: " + _by_value(digests))
    return found


def _by_value(values: Mapping[str, Any]) -> str:
    """`3 on a, b; 4 on c`."""
    groups: dict[Any, list[str]] = {}
    for url, value in values.items():
        groups.setdefault(value, []).append(url)
    return "; ".join(f"{'none' if value is None else value} on {', '.join(urls)}" for value, urls in groups.items())
