"""Reading an ONNX file as one piece, including weights in other files next to it (as PyTorch saves them).

Pure reading; any thread may call it. The `onnx` package (extra `dense`) is needed only where there are such weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierstore.errors import DeltaError, InvalidInput, MissingExtra, SnapshotError, StorageError
from tierstore.formats.objects import Location, is_inside
from tierstore.formats.regular import open_regular, read_regular

# An entry of `TensorProto.external_data` with the key `location`, as Protocol Buffers write
# it: without it there is none.
_LOCATION = b"\x0a\x08location\x12"
_MAX_BYTES = (1 << 31) - 1  # Protocol Buffers' own


def read_onnx(path: Location, within: Location) -> bytes:
    """The ONNX model at `path` with all of its weights, which lie in `path` or in other files `within` a directory.

    Raises InvalidInput for weights that cannot be included, MissingExtra where that needs the extra `dense`, OSError
    where `path` cannot be read. Whether it is a valid model is not checked.
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
    for tensor in constants_of(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            tensor.raw_data = _weights(tensor, path, within.resolve())
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT
            total += len(tensor.raw_data)
            if total > _MAX_BYTES:
                raise InvalidInput("with its weights the model has more than 2 GiB, which no ONNX file can hold")
    return bytes(model.SerializeToString())


def read_dense(
    model: str | Path | bytes | bytearray | memoryview, error: type[SnapshotError] | type[DeltaError]
) -> bytes:
    """The bytes of an ONNX model, given as such or as the path of its file, with its weights.

    Raises `error`, and MissingExtra as `read_onnx` does.
    """
    if isinstance(model, (bytes, bytearray, memoryview)):
        return bytes(model)
    if not isinstance(model, (str, Path)):
        raise error(f"dense: expected the path of an ONNX file, or its bytes, got {type(model).__name__}")
    path = model
    try:
        return read_onnx(Path(path), Path(path).parent)
    except InvalidInput as problem:
        raise error(f"dense: {path}: {problem}") from problem
    except OSError as problem:
        raise error(f"dense: cannot read {path}: {problem.strerror or problem}") from problem


def graph_ports(content: bytes) -> tuple[dict[str, int], list[str]]:
    """The inputs of a model, each with its number of dimensions, and its outputs. SnapshotError, MissingExtra."""
    try:
        import onnx
    except ImportError as error:
        raise MissingExtra(
            "golden examples of a dense part need its inputs and outputs: install tierstore[dense]"
        ) from error
    try:
        graph = onnx.ModelProto.FromString(content).graph
    except Exception as error:  # of protobuf, which is no import of ours
        raise SnapshotError("the dense part is not an ONNX model: its bytes are not a ModelProto") from error
    constants = {tensor.name for tensor in graph.initializer}
    inputs = {of.name: len(of.type.tensor_type.shape.dim) for of in graph.input if of.name not in constants}
    return inputs, [of.name for of in graph.output]


def _weights(tensor: Any, path: Location, within: Location) -> bytes:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if not isinstance(location, str):  # bytes, where they are not UTF-8
        raise InvalidInput(f"the weights {tensor.name!r} name a file whose name is not UTF-8: {location!r}")
    try:
        file = (path.parent / location).resolve()
        if not location or not is_inside(file, within):
            raise InvalidInput(f"the weights {tensor.name!r} lie outside of {within.name}: {location!r}")
        offset = int(entries.get("offset", 0))
        length = int(entries["length"]) if "length" in entries else -1
        with open_regular(file) as source:
            source.seek(offset)
            data = source.read(length if 0 <= length <= _MAX_BYTES else _MAX_BYTES + 1)
    except FileNotFoundError:
        raise InvalidInput(f"the file of its weights {tensor.name!r} is missing: {location!r}") from None
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, (InvalidInput, StorageError)):
            raise
        raise InvalidInput(f"the weights {tensor.name!r} cannot be read: {error}") from error
    if 0 <= length != len(data):
        raise InvalidInput(f"the weights {tensor.name!r} end early: {location!r} was cut")
    return data


def constants_of(model: Any) -> Iterator[Any]:
    """Every constant of a ModelProto, including those in attributes and subgraphs."""
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
