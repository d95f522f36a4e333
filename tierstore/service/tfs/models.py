"""Model status in TensorFlow Serving's words.

Functions of the store; they may take locks for a moment, and any thread may call them.
"""

from __future__ import annotations

from typing import Any

from tierstore.errors import NotFound

# state of a version in the store's status → TensorFlow Serving's ModelVersionStatus.State
STATES = {"active": "AVAILABLE", "canary": "AVAILABLE", "loading": "LOADING", "kept": "END", "stale": "END"}
STATE_NUMBERS = {"UNKNOWN": 0, "START": 10, "LOADING": 20, "AVAILABLE": 30, "UNLOADING": 40, "END": 50}


def version_states(store: Any, name: str, version: int | str | None) -> list[tuple[int, str]]:
    """(version, state) of a model's versions, or of the one asked for, the newest first.

    A kept version that does not answer is END; one whose load waits for its turn is not listed yet. NotFound for a
    model, version or label that there is not.
    """
    if isinstance(version, str):
        with store.model(name).view(version) as view:
            version = view.version
    document = store.status(name)["models"][name]
    states = [(entry["version"], STATES[entry["state"]]) for entry in document["versions"]]
    if version is not None:
        states = [entry for entry in states if entry[0] == version]
    if not states:
        what = "any version" if version is None else f"version {version}"
        raise NotFound(f"could not find {what} of model {name!r}")
    return sorted(states, reverse=True)


def status_document(store: Any, name: str, version: int | str | None) -> dict[str, Any]:
    """The answer to GetModelStatus in its JSON form."""
    return {
        "model_version_status": [
            {"version": str(number), "state": state, "status": {"error_code": "OK", "error_message": ""}}
            for number, state in version_states(store, name, version)
        ]
    }
