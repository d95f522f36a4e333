"""A model's folder in a Triton model repository: `config.pbtxt`, and a `model.py` that imports the model.

Pure but for the writing.

The format is protocol buffers' text form of Triton's `ModelConfig` (https://github.com/triton-inference-server/common,
`protobuf/model_config.proto`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.errors import Conflict, NotReady
from tierstore.formats import files

_SCRIPT = 'from tierstore.triton import TritonPythonModel\n\n__all__ = ["TritonPythonModel"]\n'
_TYPES = {"BYTES": "TYPE_STRING"}


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output.

    `dims` without the batch where Triton batches; `plain`: a number an item, which clients send as [batch, 1].
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False
    plain: bool = False

    def text(self) -> str:
        words = [f'name: "{self.name}"', f"data_type: {_TYPES.get(self.datatype, f'TYPE_{self.datatype}')}"]
        words += [f"dims: {list(self.dims)}"]
        if self.plain:
            words.append("reshape { shape: [ ] }")
        if self.optional:
            words.append("optional: true")
        return f"  {{ {' '.join(words)} }}"


Ports = tuple[list[Port], list[Port]]


def hps_ports(*, batches: bool) -> Ports:
    """Inputs and outputs of HPS's Triton backend: `KEYS` of all tables, `NUMKEYS` of each, and all their rows."""
    dims = (-1,) if batches else (-1, -1)
    return [Port("KEYS", "INT64", dims), Port("NUMKEYS", "INT32", dims)], [Port("OUTPUT0", "FP32", (-1,))]


def ports_of(metadata: Mapping[str, Any], *, scores: bool, batches: bool) -> Ports:
    """Inputs and outputs by a model's metadata in the Open Inference Protocol. NotReady for scores that are not served.

    Of features rows and which keys were found; or, with `scores`, what the dense part gives. `batches`: the first
    dimension is Triton's to batch, so bags are rows of keys [batch, k].
    """
    features = {
        entry["name"] for entry in metadata["outputs"] if f"{entry['name']}.found" in _names(metadata["outputs"])
    }
    pooled = {name for name in features if f"{name}.offsets" in _names(metadata["inputs"])}
    inputs, outputs = [], []
    for entry in metadata["inputs"]:
        name, (feature, _, part) = entry["name"], entry["name"].partition(".")
        if feature not in features and not scores:
            continue  # the dense part's own
        if batches and part == "offsets":
            continue
        inputs.append(_port(entry, batches, optional=not scores or bool(part), bags=feature in pooled, lead=name))
    for entry in metadata["outputs"]:
        feature, _, part = entry["name"].partition(".")
        if scores is (feature not in features):
            outputs.append(_port(entry, batches, bags=bool(part) and feature in pooled, lead=entry["name"]))
    if not outputs:
        why = metadata.get("parameters", {}).get("dense", "there is none")
        raise NotReady(f"model {metadata['name']!r} gives no scores: the dense part is {why}")
    return inputs, outputs


def _names(entries: Iterable[Mapping[str, Any]]) -> set[str]:
    return {entry["name"] for entry in entries}


def _port(entry: Mapping[str, Any], batches: bool, *, bags: bool, lead: str, optional: bool = False) -> Port:
    shape = tuple(entry["shape"])
    if not batches:
        return Port(lead, entry["datatype"], shape, optional)
    if bags:
        return Port(lead, entry["datatype"], (-1,), optional)
    return Port(lead, entry["datatype"], shape[1:] or (1,), optional, plain=len(shape) == 1)


def config_text(
    ports: Ports, parameters: Mapping[str, str], *, max_batch_size: int, instances: int, joins: bool
) -> str:
    """`config.pbtxt`. `joins`: Triton may gather requests, which are then answered by one look-up."""
    inputs, outputs = (",\n".join(port.text() for port in of) for of in ports)
    lines = [
        'backend: "python"',
        f"max_batch_size: {max_batch_size}",
        f"input [\n{inputs}\n]",
        f"output [\n{outputs}\n]",
    ]
    for name, value in parameters.items():
        lines.append(f"parameters {{ key: {json.dumps(name)} value {{ string_value: {json.dumps(value)} }} }}")
    kind = "KIND_GPU gpus: [ 0 ]" if "device_budget" in parameters else "KIND_CPU"
    lines.append(f"instance_group [ {{ count: {instances} kind: {kind} }} ]")
    if joins:
        lines.append("dynamic_batching { }")
    return "\n".join(lines) + "\n"


def write_folder(folder: Path, config: str) -> None:
    """Write the model's folder, a new one or an empty one. Conflict for one that has something in it."""
    if folder.exists() and any(folder.iterdir()):
        raise Conflict(f"{folder} is there and not empty: expected a new folder, named as the model is to be in Triton")
    files.make_dir(folder / "1")
    (folder / "1" / "model.py").write_text(_SCRIPT, encoding="utf-8")
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
