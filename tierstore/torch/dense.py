"""The dense part: what is not in tables, as ONNX, checked against the module. For the thread that trains."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from tierstore.arguments import check_name
from tierstore.errors import InvalidInput, MissingExtra, SnapshotError
from tierstore.torch.hashing import HashKeys
from tierstore.torch.runs import ModuleRun, UsedFeature, epsilon_of
from tierstore.torch.tables import Collection, collections_of, scoring

# Between scores of the module and of ONNX Runtime: of the range of an output, which is what a wrong row moves it in,
# and of its largest, which is what rounding goes by.
_OF_RANGE, _OF_LARGEST = 1e-3, 1e-4


class _Rows(nn.Module):  # type: ignore[misc]
    """Replaces a table: its input are rows already, float32 as they are served.

    Where `forward` takes the weight too (a softmax over all rows), the whole of it is in the graph.
    """

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.weight = table.weight

    def forward(self, input: Any, *_: Any, **__: Any) -> Any:
        return input.to(self.weight.dtype)


class _Pooled:
    """The rows by feature of one call of the dense part. An export does not let a module's own tensors change."""

    by_feature: Mapping[str, Any]


class _PooledRows(nn.Module):  # type: ignore[misc]
    """Replaces a collection: returns what that does, made of rows that are given."""

    def __init__(self, collection: Collection, features: Mapping[str, UsedFeature], given: _Pooled) -> None:
        super().__init__()
        self._given, self._features = given, [name for config, _ in collection.tables for name in config.feature_names]
        self._dims = [config.embedding_dim for config, _ in collection.tables for _ in config.feature_names]
        self._type, self._dtype = features[self._features[0]].pooled, features[self._features[0]].dtype

    def forward(self, *_: Any, **__: Any) -> Any:
        rows = torch.cat([self._given.by_feature[name] for name in self._features], 1)
        return self._type(keys=self._features, length_per_key=self._dims, values=rows.to(self._dtype))


class _Dense(nn.Module):  # type: ignore[misc]
    """The module, called with rows for features, with None for the arguments that features were made of, and with what
    is no tensor as it is.
    """

    def __init__(
        self,
        module: nn.Module,
        tables: Mapping[str, Any],
        features: Mapping[str, UsedFeature],
        inputs: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._given = _Pooled()
        self._replaced: list[tuple[Any, nn.Module]] = [  # what is in a list is no submodule
            *((one.module, _PooledRows(one, features, self._given)) for one in collections_of(module)),
            *((table, _Rows(table)) for table in tables.values()),
            *((one, nn.Identity()) for one in module.modules() if isinstance(one, HashKeys)),
        ]
        constants = {name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor)}
        self._constant = constants | {part: None for feature in features.values() for part in feature.parts}
        self._arguments = [name for name in inputs if name not in self._constant]
        self.names = [*self._arguments, *(name for name, feature in features.items() if feature.pooled is not None)]
        self.inner = module

    def example(self, run: ModuleRun) -> dict[str, torch.Tensor]:
        """What it is called with, by name, in place of a run of the module."""
        return {name: run.features[name].rows if name in run.features else run.inputs[name] for name in self.names}

    def forward(self, *values: Any) -> Any:
        given = dict(zip(self.names, values, strict=True))
        self._given.by_feature = given
        return self.inner(**{name: given[name] for name in self._arguments}, **self._constant)

    @contextmanager
    def without_tables(self) -> Iterator[None]:
        replaced = [
            (parent, name, part, new)
            for parent in self.inner.modules()
            for name, part in parent._modules.items()  # all names of a part that has several
            for old, new in self._replaced
            if part is old
        ]
        for parent, name, _, new in replaced:
            parent._modules[name] = new
        try:
            yield
        finally:
            for parent, name, part, _ in replaced:
                parent._modules[name] = part


def dense_part(
    module: nn.Module, runs: Sequence[ModuleRun], tables: Mapping[str, Any], output_names: Sequence[str] | None
) -> bytes:
    features, inputs = runs[0].features, runs[0].inputs
    if sequences := [name for name, feature in features.items() if feature.pooled is not None and not feature.combiner]:
        raise InvalidInput(
            f"features {', '.join(sequences)} are sequences of an EmbeddingCollection, whose lengths a dense part "
            "cannot be given: expected an EmbeddingBagCollection; or write the tables alone, dense=False"
        )
    with scoring(module):
        dense = _Dense(module, tables, features, inputs).eval()
        content = _exported(dense, dense.example(runs[0]), _output_names(runs[0].outputs, output_names))
    _check(content, [(dense.example(run), run.outputs) for run in runs], epsilon_of(module.parameters()))
    return content


def _output_names(expected: Sequence[Any], given: Sequence[str] | None) -> list[str] | None:
    """The names of the outputs, of which `expected` are examples; None for PyTorch's own."""
    if given is None:
        return None
    count = len(expected)
    names = [given] if isinstance(given, str) else list(given)
    if len(names) != count or len(set(names)) != count:
        raise InvalidInput(
            f"output_names: expected {count} different names, one for each output of forward; got {names}"
        )
    return [check_name("output", name) for name in names]


def _exported(dense: _Dense, example: Mapping[str, Any], output_names: list[str] | None) -> bytes:
    try:
        import onnxscript  # noqa: F401 - needed by PyTorch's exporter, whose own error is long
    except ImportError as error:
        raise MissingExtra("PyTorch exports ONNX with the package onnxscript: pip install onnxscript") from error
    batch = torch.export.Dim("batch", min=1)
    if any(value.ndim == 0 or len(value) < 2 for value in example.values()):
        raise InvalidInput("expected an example of two items or more; the first dimension of each input is the batch")
    with dense.without_tables(), _quiet():
        try:
            program = torch.onnx.export(
                dense,
                tuple(example.values()),
                input_names=list(example),
                output_names=output_names,
                dynamic_shapes=(tuple({0: batch} for _ in example),),
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # its own, and those of the user's code, which is run without tables
            raise SnapshotError(
                f"PyTorch cannot export what is not in tables: {_cause_of(error)}. The module is called with rows in "
                "the places of keys: what else is done with an argument that goes into a table (a comparison, a "
                "second look-up) needs an argument of its own. Or write the tables alone, dense=False"
            ) from error
    assert program is not None
    return bytes(program.model_proto.SerializeToString())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says of itself at each export: what is wrong with its model is found by `_check`."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _cause_of(error: BaseException) -> str:
    """The first line of what is at the root of an error, whose own text fills pages."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _check(content: bytes, runs: Sequence[tuple[Mapping[str, Any], Sequence[torch.Tensor]]], epsilon: float) -> None:
    """SnapshotError unless ONNX Runtime gives the scores of the module, for rows as they are served."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtra("scores are checked with ONNX Runtime: install tierstore[dense]") from error
    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        names = {port.name for port in session.get_inputs()}
        answers = [
            session.run(None, {name: value.numpy(force=True) for name, value in example.items() if name in names})
            for example, _ in runs
        ]
    except Exception as error:  # its classes are not one tree
        raise SnapshotError(
            f"ONNX Runtime does not run the exported model: {_cause_of(error)}. It has few operators for bfloat16: "
            "export a copy of the module in float32, copy.deepcopy(module).float()"
        ) from error
    for i, (wanted, got) in enumerate(zip(*map(_outputs, ([want for _, want in runs], answers)), strict=True)):
        off = _difference(wanted, got, epsilon)
        if off is not None:
            raise SnapshotError(
                "expected the module's scores from the exported model and the rows of its tables; its output "
                f"{i} differs by {off:g} for the example, or for keys drawn from the tables"
            )


def _outputs(runs: Sequence[Sequence[Any]]) -> list[np.ndarray[Any, Any]]:
    """By output the values of all runs, side by side."""
    arrays = ([one.numpy(force=True) if isinstance(one, torch.Tensor) else one for one in run] for run in runs)
    return [np.concatenate([np.ravel(one) for one in of]) for of in zip(*arrays, strict=True)]


def _difference(wanted: np.ndarray[Any, Any], got: np.ndarray[Any, Any], epsilon: float) -> float | None:
    """By how much an output is off at most; None where it is rounding."""
    if wanted.shape != got.shape:
        return math.inf
    if wanted.dtype.kind != "f":
        return None if np.array_equal(wanted, got) else math.nan
    wanted, got = wanted.astype(np.float64), got.astype(np.float64)
    finite = wanted[np.isfinite(wanted)]
    limit = 0.0
    if finite.size:
        limit = _OF_RANGE * np.ptp(finite) + max(_OF_LARGEST, 8 * epsilon) * np.abs(finite).max()
    if np.allclose(got, wanted, rtol=0, atol=limit, equal_nan=True):
        return None
    return float(np.abs(wanted - got).max())
