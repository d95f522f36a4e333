"""Sessions of ONNX Runtime, made from ONNX bytes under the store's settings.

A `Runtime` is constant once made; any thread may use it. Nothing here touches the disk: a model that refers to other
files is refused.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tierstore.config import Settings
from tierstore.errors import ConfigError, InvalidInput, MissingExtra, TierstoreError
from tierstore.predict.binding import wire
from tierstore.predict.graphs import inspect
from tierstore.predict.limits import RunLimits, SessionLimits
from tierstore.predict.making import SessionSettings, brief, make_session
from tierstore.predict.provider import CPU_PROVIDER, CUDA, DenseProvider, check_installed, check_made, provider_of
from tierstore.predict.sandbox import GraphSandbox
from tierstore.predict.session import KEPT_BYTES, DenseCounts, DenseSession
from tierstore.predict.signature import Signature, Tensor, datatype_of
from tierstore.predict.transforms import PostTransform, is_as_specified
from tierstore.types import FeatureSpec, TableSpec

INSTALL = "install tierstore[dense]"
_AFFINITY = "session.intra_op_thread_affinities"
_DENORMALS = "session.set_denormal_as_zero"
_SPINNING = ("session.intra_op.allow_spinning", "session.inter_op.allow_spinning")


def _threads(text: str) -> int:
    if (threads := int(text)) < 1:
        raise ValueError(text)
    return threads


_LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
_FIELDS: dict[str, tuple[Callable[[str], Any], str]] = {  # of SessionOptions: what reads a text, what is expected
    "intra_op_num_threads": (_threads, "a number of at least 1"),
    "inter_op_num_threads": (_threads, "a number of at least 1"),
    "graph_optimization_level": ({level: level for level in _LEVELS}.__getitem__, ", ".join(_LEVELS)),
    "enable_cpu_mem_arena": ({"0": False, "1": True}.__getitem__, "0 or 1"),
}


def missing_extra() -> str | None:
    """Why dense parts cannot be served here; None if they can."""
    # Since 1.29 ONNX Runtime sends telemetry over the network, from its import on, unless this is set.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        return f"{INSTALL} ({error})"
    return None


class Runtime:
    """Makes sessions. One for each store."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.provider = provider_of(settings)
        self._options = _session_options(settings.dense_options)
        self._session_settings = _session_settings(settings, self.provider, self._options)
        self.sandbox = GraphSandbox(self._session_settings, int(settings.dense_memory))
        self._lock = threading.Lock()
        self._missing: list[str | None] = []  # set at the first dense part; guarded by _lock
        self.limits = RunLimits(settings.dense_timeout_s, _run_options)
        self._as_specified: dict[PostTransform, bool] = {}  # of those that were tried; all sessions are made alike
        if self.provider.name != CPU_PROVIDER:
            self._check_provider()

    def _check_provider(self) -> None:
        """Raise MissingExtra, at the start, where dense parts cannot run as the settings say."""
        if (why := self.missing) is not None:
            raise MissingExtra(f"dense_provider is {self._settings.dense_provider}: {why}")
        import onnx
        import onnxruntime

        check_installed(onnxruntime, self.provider)
        helper, kind = onnx.helper, onnx.TensorProto.FLOAT
        ports = [helper.make_tensor_value_info(name, kind, [1]) for name in "xy"]
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "probe", ports[:1], ports[1:])
        opset = helper.make_opsetid("", 13)
        tiny = helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()
        check_made(self._session(onnxruntime, tiny), self.provider)

    @property
    def missing(self) -> str | None:
        """Why dense parts cannot be served here; None if they can."""
        with self._lock:
            if not self._missing:
                self._missing.append(missing_extra())
            return self._missing[0]

    @property
    def how(self) -> str:
        """Provider and threads of a run, for messages."""
        threads = self._options.get("intra_op_num_threads", 1)
        return f"{self.provider.name} with {threads} thread{'s' if threads != 1 else ''}"

    def load(
        self,
        model: bytes,
        features: Mapping[str, FeatureSpec],
        tables: Mapping[str, TableSpec],
        counts: DenseCounts,
        *,
        accepted: bool = False,
        waits: bool = True,
        may_go_on: Callable[[], None] = lambda: None,
    ) -> DenseSession:
        """A session of an ONNX model, bound to a model's features.

        One of a new structure is tried first, unless it was `accepted` before.

        `may_go_on` is called from time to time; what it raises ends the work. Raises InvalidInput for one that ONNX
        Runtime refuses or that does not fit the features, MissingExtra without the extra, Overloaded where others hold
        it up for too long, or at all unless it `waits`.
        """
        if (why := self.missing) is not None:
            raise MissingExtra(f"the dense part cannot be served: {why}")
        import onnxruntime

        graph = inspect(model)
        may_go_on = self.limits.going_on(may_go_on)
        may_go_on()
        if accepted:
            self.sandbox.add(graph.structure)
        else:
            self.sandbox.check(model, graph.structure, may_go_on, waits=waits)
        try:
            session = self._session(onnxruntime, model, may_go_on)
        except TierstoreError:
            raise
        except Exception as error:  # ONNX Runtime has a class a status, and some are none of its own
            raise InvalidInput(f"ONNX Runtime refuses the model: {brief(error)}") from error
        check_made(session, self.provider)
        bindings = wire(_signature(session, graph.scalars), features, tables)
        if graph.transforms:
            bindings = replace(bindings, misapplied=self._misapplied(onnxruntime, graph.transforms))
        return DenseSession(
            session,
            bindings,
            KEPT_BYTES,
            counts,
            SessionLimits(
                self.limits,
                int(self._settings.dense_memory),
                shrinks=not self._options.get("enable_cpu_mem_arena", True) and self.provider.name == CPU_PROVIDER,
            ),
            self.provider,
        )

    def _misapplied(self, onnxruntime: Any, transforms: frozenset[PostTransform]) -> tuple[PostTransform, ...]:
        """Post-transforms that the ONNX Runtime here applies otherwise than ONNX specifies."""

        def answer(model: bytes) -> Any:
            return self._session(onnxruntime, model).run(None, {"x": np.zeros((1, 1), np.float32)})[0]

        for one in transforms - self._as_specified.keys():
            self._as_specified[one] = is_as_specified(one, answer)
        return tuple(one for one in sorted(transforms) if not self._as_specified[one])

    def _session(self, onnxruntime: Any, model: bytes, may_go_on: Callable[[], None] = lambda: None) -> Any:
        session = make_session(onnxruntime, model, self._session_settings, may_go_on)
        session.disable_fallback()  # else ONNX Runtime would use the CPU for good after one failed run
        return session


def _session_options(given: Mapping[str, str]) -> dict[str, Any]:
    """The setting `dense_options`, each value of its type: fields of ONNX Runtime's SessionOptions, and
    entries of its configuration.

    ConfigError for what is neither, or of no such value.
    """
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name.startswith(CUDA):
            continue  # of the provider
        if name == _DENORMALS:
            # ONNX Runtime sets it once in a process, for the thread that makes the first session and for those that
            # this one starts (issue 17011 of its tracker): rows and the caller's own numbers would be cut, and whether
            # scores are would depend on the thread.
            raise ConfigError(
                f"dense_options: {name} is not taken: ONNX Runtime applies it to the thread that makes the first "
                "session, whatever else that thread computes, and not to those that run it; set tiny weights of the "
                "graph to zero instead"
            )
        if "." in name:
            options[name] = value
            continue
        if name not in _FIELDS:
            raise ConfigError(
                f"dense_options: {name!r} is unknown: expected {', '.join(_FIELDS)}, an entry of the session's "
                f"configuration, such as {_SPINNING[0]}, or an option of the CUDA provider, such as {CUDA}gpu_mem_limit"
            )
        read, expected = _FIELDS[name]
        try:
            options[name] = read(value)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"dense_options: {name}={value!r}: expected {expected}") from error
    threads, affinity = options.get("intra_op_num_threads", 1), options.get(_AFFINITY)
    groups = affinity.count(";") + 1 if affinity else 0
    if affinity and groups != threads - 1:
        raise ConfigError(
            f"dense_options: {_AFFINITY} {affinity!r} names {groups} threads; of intra_op_num_threads={threads} "
            f"ONNX Runtime makes {threads - 1}, the caller's own being the first"
        )
    return options


def _session_settings(settings: Settings, provider: DenseProvider, options: Mapping[str, Any]) -> SessionSettings:
    on_cpu = provider.name == CPU_PROVIDER
    fields = {name: value for name, value in options.items() if "." not in name}
    if on_cpu:  # with a limit there is an arena in any case; where it is to keep nothing each run gives its memory back
        fields["enable_cpu_mem_arena"] = True
    return SessionSettings(
        providers=provider.providers,
        memory_bytes=int(settings.dense_memory) if on_cpu else None,
        entries=dict.fromkeys(_SPINNING, "0") | {name: value for name, value in options.items() if "." in name},
        **fields,
    )


def _run_options() -> Any:
    import onnxruntime

    options = onnxruntime.RunOptions()
    # no graph of a GPU is captured; where nothing says so ONNX Runtime's Python part raises and
    # catches an error, 60 µs a run
    options.add_run_config_entry("gpu_graph_id", "-1")
    return options


def _signature(session: Any, scalars: frozenset[str]) -> Signature:
    inputs = []
    for node in session.get_inputs():
        datatype = datatype_of(node.type)
        if datatype is None:
            hint = "; begin the graph with a Cast from float32" if node.type.startswith("tensor(") else ""
            raise InvalidInput(
                f"input {node.name!r} is {node.type}; the dense part's inputs are tensors of numbers or strings of the "
                f"protocol's types{hint}"
            )
        inputs.append(Tensor(node.name, datatype, _shape(node, scalars)))
    outputs, unserved = [], []
    for node in session.get_outputs():
        datatype = datatype_of(node.type)
        if datatype is None:
            unserved.append((node.name, node.type))
        else:
            outputs.append(Tensor(node.name, datatype, _shape(node, frozenset())))
    if not outputs:
        listed = ", ".join(f"{name!r} is {kind}" for name, kind in unserved) or "it has none"
        if unserved and all(kind.startswith("tensor(") for _, kind in unserved):
            raise InvalidInput(f"no output has a type of the protocol: {listed}; end the graph with a Cast to float32")
        raise InvalidInput(
            f"no output is a tensor: {listed}; convert a classifier with the option zipmap=False, so that it gives "
            "arrays"
        )
    return Signature(tuple(inputs), tuple(outputs), tuple(unserved))


def _shape(node: Any, scalars: frozenset[str]) -> tuple[int | str | None, ...] | None:
    if not node.shape:  # of no dimensions, or of any number of them
        return () if node.name in scalars else None
    return tuple(dim if isinstance(dim, (int, str)) and dim not in ("", -1) else None for dim in node.shape)
