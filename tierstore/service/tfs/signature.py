"""What a version takes and gives in TensorFlow Serving's words: signatures, and the datatypes of its tensors.

    signature          outputs when the request picks none
    serving_default    those of `/v2`: the dense part's if there is one, else a vector for every feature given
    lookup             a vector for every feature given
    lookup_float16     the same in DT_HALF

Inputs are the same in all of them. A request that picks outputs by name may have any output of the model in any
signature. Values that are not changed once made; any thread may use them. `Signatures` may be asked from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tierstore.engine.served import STABLE
from tierstore.errors import InvalidInput
from tierstore.predict.binding import Wiring
from tierstore.service.plane.interface import TensorInfo, inputs_of, outputs_of
from tierstore.service.plane.plan import View
from tierstore.service.plane.tensors import listed, shown
from tierstore.types import FeatureSpec

DEFAULT = "serving_default"
LOOKUP = "lookup"
LOOKUP_HALF = "lookup_float16"
SIGNATURES = (DEFAULT, LOOKUP, LOOKUP_HALF)
METHOD = "tensorflow/serving/predict"

# datatype → (number, name) of TensorFlow's DataType
DTYPES: dict[str, tuple[int, str]] = {
    "FP32": (1, "DT_FLOAT"),
    "FP64": (2, "DT_DOUBLE"),
    "INT32": (3, "DT_INT32"),
    "UINT8": (4, "DT_UINT8"),
    "INT16": (5, "DT_INT16"),
    "INT8": (6, "DT_INT8"),
    "BYTES": (7, "DT_STRING"),
    "INT64": (9, "DT_INT64"),
    "BOOL": (10, "DT_BOOL"),
    "UINT16": (17, "DT_UINT16"),
    "FP16": (19, "DT_HALF"),
    "UINT32": (22, "DT_UINT32"),
    "UINT64": (23, "DT_UINT64"),
}
MAX_SIGNATURES = 256


@dataclass(frozen=True, slots=True)
class Signature:
    """Of one version and dense part; `features` and `wiring` are their own, by which they are told from any others."""

    features: dict[str, FeatureSpec]
    wiring: Wiring | None
    inputs: dict[str, TensorInfo]
    outputs: dict[str, tuple[TensorInfo, ...]]

    def fits(self, view: View) -> bool:
        """Whether it is of the view's version and dense part."""
        session = view.predictor
        wiring = None if session is None else session.wiring
        return self.features is view.features and self.wiring is wiring

    @property
    def only_input(self) -> str:
        """The input that a value without a name is for: the only one that has to be there."""
        parts = {name for feature in self.features for name in (f"{feature}.offsets", f"{feature}.weights")}
        names = [name for name in self.inputs if name not in parts]
        if len(names) == 1:
            return names[0]
        raise InvalidInput(
            f"values without a name need a model with one input; this one has {listed(sorted(names))}: send an object of input name to value"
        )

    def input(self, name: str) -> TensorInfo:
        """The input of that name. InvalidInput names those there are."""
        if (tensor := self.inputs.get(name)) is not None:
            return tensor
        raise InvalidInput(f"unknown input {shown(name)}; the inputs are {listed(sorted(self.inputs))}")


def check_signature(name: object) -> str:
    """`name` if there is such a signature; the default one for none."""
    if name is None or name == "":
        return DEFAULT
    if isinstance(name, str) and name in SIGNATURES:
        return name
    raise InvalidInput(f"unknown signature {shown(name)}; expected one of {', '.join(SIGNATURES)}")


def signature_of(view: View) -> Signature:
    """The signatures of a view's version."""
    session = view.predictor
    inputs = {tensor.name: tensor for tensor in inputs_of(view)}
    every = {tensor.name: tensor for tensor in outputs_of(view)}
    vectors = tuple(every[name] for name in view.features)
    halves = tuple(TensorInfo(tensor.name, "FP16", tensor.shape) for tensor in vectors)
    default = vectors if session is None else tuple(every[name] for name in session.wiring.outputs)
    return Signature(
        view.features,
        None if session is None else session.wiring,
        inputs,
        {DEFAULT: default, LOOKUP: vectors, LOOKUP_HALF: halves},
    )


class Signatures:
    """The latest signature of each version that was asked for; all make room when there are too many."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Signature] = {}  # every use of it is one atomic step

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, model: str, view: View) -> Signature:
        key = model, view.version
        kept = self._kept.get(key)
        if kept is None or not kept.fits(view):
            if len(self._kept) >= MAX_SIGNATURES:
                self._kept.clear()
            kept = self._kept[key] = signature_of(view)
        return kept


def metadata(model: Any, version: int | str | None) -> dict[str, Any]:
    """The answer to GetModelMetadata in its JSON form. NotReady where nothing serves, NotFound for no such version."""
    with model.view(STABLE if version is None else version) as view:
        signature = signature_of(view)
        number = view.version
    inputs = {name: _tensor_document(tensor) for name, tensor in signature.inputs.items()}
    signatures = {
        name: {
            "inputs": inputs,
            "outputs": {tensor.name: _tensor_document(tensor) for tensor in outputs},
            "method_name": METHOD,
            "defaults": {},
        }
        for name, outputs in signature.outputs.items()
    }
    return {
        "model_spec": {"name": model.name, "signature_name": "", "version": str(number)},
        "metadata": {"signature_def": {"signature_def": signatures}},
    }


def _tensor_document(tensor: TensorInfo) -> dict[str, Any]:
    sizes = [{"size": str(size), "name": ""} for size in tensor.shape]
    return {
        "dtype": DTYPES[tensor.datatype][1],
        "tensor_shape": {"dim": sizes, "unknown_rank": False},
        "name": f"{tensor.name}:0",
    }
