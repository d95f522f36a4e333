"""The acts that a placement refuses, as one table: by act, the error and its text.

Acts that are not in the table are done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tierstore.engine.placement import Act, Refusal
from tierstore.errors import Conflict, InvalidInput, TierstoreError

Name = Literal["cluster", "upstream"]  # on this machine everything is done


def _not_yet(what: str) -> Refusal:
    return Refusal(InvalidInput, f"model {{model!r}} is in a cluster, and such a model has no {what} yet")


def _of_nodes(what: str) -> Refusal:
    return Refusal(
        InvalidInput,
        f"{what} is for the nodes that have the rows, and this node is in front of them: load and switch with "
        f"`tierstore rollout SNAPSHOT --nodes {{nodes}}`, and send deltas to each of these nodes",
    )


def _everywhere(error: type[TierstoreError], why: str) -> dict[Name, Refusal]:
    return {"cluster": Refusal(error, why), "upstream": Refusal(error, why)}


def _of_others(who: str) -> dict[Name, Refusal]:
    """A refusal of work that nobody requests here."""
    return _everywhere(InvalidInput, f"{who} does that")


TABLE: Mapping[Act, Mapping[Name, Refusal]] = {
    # changes
    "load": {"upstream": _of_nodes("a load")},
    "held": {"upstream": _of_nodes("a delta")},
    "apply_delta": {"upstream": _of_nodes("a delta")},
    "next_in_run": {"upstream": _of_nodes("a delta")},
    "apply_run": {"upstream": _of_nodes("a delta")},
    "activate": {"upstream": _of_nodes("a switch")},
    "force": {"cluster": _not_yet("switch by force")},
    "rollback": {"upstream": _of_nodes("a rollback")},
    "rollback_to": {"upstream": _of_nodes("a rollback")},
    "canary": {"upstream": _of_nodes("a canary")},
    "promote": {"upstream": _of_nodes("a canary")},
    "withdraw": {"upstream": _of_nodes("a canary")},
    "label": {"cluster": _not_yet("labels"), "upstream": _of_nodes("a label")},
    "unlabel": {"cluster": _not_yet("labels"), "upstream": _of_nodes("a label")},
    "deactivate": {"upstream": _of_nodes("a switch")},
    "drop": {"upstream": _of_nodes("a drop")},
    "adopt": _everywhere(Conflict, "the models of this node are those of other machines, and it has none of its own"),
    # what reads a whole version
    "export": {
        "cluster": Refusal(InvalidInput, "version {number} of {model!r} cannot be exported: its rows are in a cluster, "
            "and not on this machine. To have it elsewhere, load the snapshot that it was loaded from there, and send "
            "the deltas since"),
        "upstream": Refusal(InvalidInput, "version {number} of {model!r} cannot be exported: its rows are not on this "
            "machine but on the nodes upstream ({nodes}): export it there. Where each has a share of the keys, each "
            "exports its own"),
    },
    "backup": _everywhere(
        Conflict,
        "the rows, the log and the records of {model!r} are on other machines, and this node has copies alone: back "
        "up a cluster by the means of its engine (snapshots, append-only files), and behind a front the nodes "
        "upstream",
    ),
    "compare_unnamed": _everywhere(
        InvalidInput, "the rows are on other machines, which have no order of keys: name the keys to be compared"
    ),
    "serve_fronts": _everywhere(
        Conflict, "the rows of this node are on other machines, which it is a cache in front of: name those in "
            "--upstream"
    ),
    # work that a store does by itself
    "verify_rows": _of_others("who has the rows"),
    "catch_up": _of_others("the node with the lease, or each node upstream,"),
    "drop_surplus": _of_others("the node with the lease, or each node upstream,"),
    "check_files": _of_others("who has the files"),
    "keep_state": _of_others("who has the rows"),
}  # fmt: skip


def refusals_of(name: Name) -> Mapping[Act, Refusal]:
    """The column of one placement."""
    return {act: row[name] for act, row in TABLE.items() if name in row}
