"""Documents of TensorFlow Serving about a model: its status and its metadata.

Functions of the store; they may take locks for a moment, and any thread may call them.
"""

from __future__ import annotations

from typing import Any

from tierstore.engine.serving.routing import STABLE
from tierstore.errors import NotFound, shown
from tierstore.service.dataplane.datatypes import DATATYPES
from tierstore.service.dataplane.inference import DataPlane
from tierstore.service.dataplane.view import TensorInfo
from tierstore.service.protocols.tfserving.signature import METHOD, signature_of
from tierstore.types import NAME, model_and_head

# state of a version in the store's status → TensorFlow Serving's ModelVersionStatus.State
STATES = {"active": "AVAILABLE", "canary": "AVAILABLE", "loading": "LOADING", "kept": "END", "stale": "END"}
STATE_NUMBERS = {"UNKNOWN": 0, "START": 10, "LOADING": 20, "AVAILABLE": 30, "UNLOADING": 40, "END": 50}


def checked_label(text: str) -> str:
    """A label in a request, which is never a version's number. NotFound for what no label can be called."""
    if NAME.fullmatch(text) is None or text.isdigit():
        raise NotFound(f"no label {shown(text)}: labels are names that are not all digits, such as 'stable'")
    return text


def version_states(store: Any, dataplane: DataPlane, name: str, version: int | str | None) -> list[tuple[int, str]]:
    """(version, state) of the versions of a model, or of a head, or of the requested one, newest first.

    A kept version that does not answer is END; one whose load has not started is not listed. NotFound for an unknown
    model, version or label.
    """
    if isinstance(version, str):
        with dataplane.view(name, version) as view:
            version = view.version
    model, head = model_and_head(name)
    entries = store.status(model)["models"][model]["versions"]
    states = [
        (entry["version"], STATES[entry["state"]]) for entry in entries if not head or head in entry.get("heads", ())
    ]
    if version is not None:
        states = [entry for entry in states if entry[0] == version]
    if not states:
        what = "any version" if version is None else f"version {version}"
        raise NotFound(f"could not find {what} of model {name!r}")
    return sorted(states, reverse=True)


def status_document(store: Any, dataplane: DataPlane, name: str, version: int | str | None) -> dict[str, Any]:
    """The response to GetModelStatus in its JSON form."""
    return {
        "model_version_status": [
            {"version": str(number), "state": state, "status": {"error_code": "OK", "error_message": ""}}
            for number, state in version_states(store, dataplane, name, version)
        ]
    }


def metadata(dataplane: DataPlane, name: str, version: int | str | None) -> dict[str, Any]:
    """The response to GetModelMetadata in its JSON form. NotReady if no version serves, NotFound for an unknown
    version.
    """
    with dataplane.view(name, STABLE if version is None else version) as view:
        signature = signature_of(view)
        number = view.version
    inputs = {each: _tensor_document(tensor) for each, tensor in signature.inputs.items()}
    signatures = {
        each: {
            "inputs": inputs,
            "outputs": {tensor.name: _tensor_document(tensor) for tensor in outputs},
            "method_name": METHOD,
            "defaults": {},
        }
        for each, outputs in signature.outputs.items()
    }
    return {
        "model_spec": {"name": name, "signature_name": "", "version": str(number)},
        "metadata": {"signature_def": {"signature_def": signatures}},
    }


def _tensor_document(tensor: TensorInfo) -> dict[str, Any]:
    sizes = [{"size": str(size), "name": ""} for size in tensor.shape]
    return {
        "dtype": DATATYPES[tensor.datatype].tf_name,
        "tensor_shape": {"dim": sizes, "unknown_rank": False},
        "name": f"{tensor.name}:0",
    }
