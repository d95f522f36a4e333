"""Documents of the Open Inference Protocol about the server and its models: metadata, configuration, repository index.

Functions of the store; they may take locks for a moment, and any thread may call them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tierstore import __version__
from tierstore.engine.reads.view import View
from tierstore.engine.serving.order import REJECTED
from tierstore.engine.serving.routing import STABLE
from tierstore.errors import InvalidInput, NotReady, shown
from tierstore.service.dataplane.inference import DataPlane
from tierstore.service.dataplane.view import TensorInfo, inputs_of, outputs_of
from tierstore.service.stats import InferenceStats
from tierstore.types import head_name

PLATFORM = "tierstore"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
_CONFIG_NAMES = {"BYTES": "TYPE_STRING", "BOOL": "TYPE_BOOL"}


def server_metadata(*, shared_memory: bool) -> dict[str, Any]:
    """Metadata of the server. `shared_memory`: whether system shared memory is served."""
    extensions = [*EXTENSIONS, "system_shared_memory"] if shared_memory else EXTENSIONS
    return {"name": "tierstore", "version": __version__, "extensions": extensions}


def model_metadata(dataplane: DataPlane, name: str, version: int | str | None) -> dict[str, Any]:
    """Metadata of a model, or of a head: of the active version, or of `version` (a number or label).

    NotReady, NotFound as `DataPlane.view`.
    """

    def entry(tensor: TensorInfo) -> dict[str, Any]:
        return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}

    with dataplane.view(name, STABLE if version is None else version) as view:
        document: dict[str, Any] = {
            "name": name,
            "versions": [str(number) for number in _served(dataplane, name, view, version)],
            "platform": PLATFORM,
            "inputs": [entry(tensor) for tensor in inputs_of(view)],
            "outputs": [entry(tensor) for tensor in outputs_of(view)],
        }
        if view.unserved is not None:
            document["parameters"] = {"dense": f"kept, not served: {view.unserved}"}
        return document


def model_config(dataplane: DataPlane, name: str, version: int | str | None) -> dict[str, Any]:
    """The model's configuration for Triton's clients; batching is the caller's own, hence size 0."""

    def entry(tensor: TensorInfo) -> dict[str, Any]:
        return {
            "name": tensor.name,
            "data_type": _CONFIG_NAMES.get(tensor.datatype, f"TYPE_{tensor.datatype}"),
            "dims": tensor.shape,
        }

    with dataplane.view(name, STABLE if version is None else version) as view:
        return {
            "name": name,
            "platform": PLATFORM,
            "backend": PLATFORM,
            "version_policy": {"specific": {"versions": _served(dataplane, name, view, version)}},
            "max_batch_size": 0,
            "input": [{**entry(tensor), "optional": tensor.optional} for tensor in inputs_of(view)],
            "output": [entry(tensor) for tensor in outputs_of(view)],
        }


def _served(dataplane: DataPlane, name: str, view: View, version: int | str | None) -> list[int]:
    """The versions that can be requested; for a request that names one, only that one."""
    return [view.version] if version is not None else dataplane.versions(name)


def is_ready(dataplane: DataPlane, name: str, version: int | str | None) -> bool:
    """Whether look-ups are answered; by `version` if it is given."""
    try:
        with dataplane.view(name, STABLE if version is None else version):
            return True
    except NotReady:
        return False


def repository_index(store: Any, only_ready: bool) -> list[dict[str, Any]]:
    """Every version of every model and head; a kept one is UNAVAILABLE until it is loaded, which activates it."""
    entries = []
    for model, document in store.status()["models"].items():
        for version in document["versions"]:
            ready = version["state"] in ("active", "canary")
            if not ready and only_ready:
                continue
            entry = {"version": str(version["version"]), "state": "READY" if ready else "UNAVAILABLE"}
            entry["reason"] = "" if ready else version["state"]  # always: a client of MLServer's requires it
            entries += [{"name": head_name(model, head)} | entry for head in ("", *version.get("heads", ()))]
    return entries


def statistics(
    dataplane: DataPlane, counted: InferenceStats, name: str | None, version: int | str | None
) -> dict[str, Any]:
    """Statistics of one model or head, or of every one; only of `version` if given. Errors as of a look-up."""
    stats: list[dict[str, Any]] = []
    for each in [name] if name is not None else dataplane.names():
        versions = dataplane.versions(each)
        if version is not None:
            with dataplane.view(each, version) as view:
                versions = [view.version]
        for number in versions:
            counts = counted.of(each, number)
            stats.append(
                {
                    "name": each,
                    "version": str(number),
                    "last_inference": counts.last_inference_ms,
                    "inference_count": counts.success,
                    "execution_count": counts.success,
                    "inference_stats": counts.document(),
                    "batch_stats": [],
                }
            )
    return {"model_stats": stats}


def check_load_parameters(names: Iterable[str]) -> None:
    """InvalidInput for parameters of a load that would override parts of the model."""
    for name in names:
        if name == "config" or name.startswith("file:"):
            raise InvalidInput(
                f"parameter {shown(name)}: a model's files and configuration come from its snapshot and cannot be "
                "overridden"
            )


def check_whole(store: Any, name: str) -> None:
    """Raise InvalidInput for a head, which comes and goes with its model, and NotFound for what is no model."""
    model, _, head = name.partition(".")
    if head and model in store.models():
        versions = store.status(model)["models"][model]["versions"]
        if any(head in version.get("heads", ()) for version in versions):
            raise InvalidInput(
                f"{name!r} is a head of model {model!r}, and is loaded and unloaded with it: name {model!r}"
            )
    store.model(name)


def load(store: Any, name: str) -> None:
    """Make a model ready: activate the most recent kept version that nobody has rejected, unless the model is ready.
    NotReady without one.
    """
    model = store.model(name)
    if model.ready:
        return
    versions = store.status(name)["models"][name]["versions"]
    kept = {version["version"]: version.get("left") for version in versions if version["state"] == "kept"}
    wanted = [number for number, why in kept.items() if why not in REJECTED]
    if not wanted:
        others = f"; {', '.join(map(str, kept))} was left by a rollback or withdrawn" if kept else ""
        raise NotReady(
            f"model {name!r} has no version that could be activated{others}; load a snapshot (POST "
            f"/admin/models/{name}/snapshots)"
        )
    store.activate(name, max(wanted))
