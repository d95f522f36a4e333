"""Reading an ONNX file as one piece: weights that lie in files beside it (as PyTorch saves them) are taken in.

Pure reading; any thread may call it. The `onnx` package (extra `dense`) is needed only where there are such weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierstore.errors import InvalidInput, MissingExtra
from tierstore.formats.regular import open_regular, read_regular

# An entry of `TensorProto.external_data` with the key `location`, as Protocol Buffers write it: without it there is none.
_LOCATION = b"\x0a\x08location\x12"
_MAX_BYTES = (1 << 31) - 1  # Protocol Buffers' own


def read_onnx(path: Path, within: Path) -> bytes:
    """The ONNX model at `path` with all of its weights, which lie in `path` or in other files `within` a directory.

    Raises InvalidInput for weights that cannot be taken in, MissingExtra where that needs the extra `dense`, OSError
    where `path` cannot be read. Whether it is a model at all is not looked at.
    """
    content = read_regular(path, _MAX_BYTES)
    if _LOCATION not in content:
        return content
    try:
        import onnx
    except ImportError as error:
        raise MissingExtra(
            "the model's weights lie in files beside it; to take them in install tierstore[dense], or save the "
            "model as one file: torch.onnx.export(…, external_data=False)"
        ) from error
    try:
        model = onnx.ModelProto.FromString(content)
    except Exception:  # noqa: BLE001 - of protobuf, which is no import of ours; who runs the model says what it is not
        return content
    total = len(content)
    for tensor in tensors_of(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            tensor.raw_data = _weights(tensor, path, within.resolve())
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT
            total += len(tensor.raw_data)
            if total > _MAX_BYTES:
                raise InvalidInput("with its weights the model has more than 2 GiB, which no ONNX file can hold")
    return bytes(model.SerializeToString())


def _weights(tensor: Any, path: Path, within: Path) -> bytes:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    try:
        file = (path.parent / location).resolve()
        if not location or not file.is_relative_to(within):
            raise InvalidInput(f"the weights {tensor.name!r} lie outside of {within.name}: {location!r}")
        offset = int(entries.get("offset", 0))
        length = int(entries["length"]) if "length" in entries else -1
        with open_regular(file) as source:
            source.seek(offset)
            data = source.read(length if 0 <= length <= _MAX_BYTES else _MAX_BYTES + 1)
    except FileNotFoundError:
        raise InvalidInput(f"the file of its weights {tensor.name!r} is missing: {location!r}") from None
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"the weights {tensor.name!r} cannot be read: {error}") from error
    if 0 <= length != len(data):
        raise InvalidInput(f"the weights {tensor.name!r} end early: {location!r} was cut")
    return data


def tensors_of(model: Any) -> Iterator[Any]:
    """Every constant of a ModelProto, those within attributes and subgraphs included."""
    graphs = [model.graph]
    nodes = [node for function in model.functions for node in function.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
            nodes += graph.node
            continue
        for attribute in nodes.pop().attribute:
            yield attribute.t
            yield from attribute.tensors
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            graphs += [attribute.g, *attribute.graphs] if attribute.HasField("g") else attribute.graphs
