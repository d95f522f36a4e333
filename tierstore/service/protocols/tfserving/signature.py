"""The interface of a version in TensorFlow Serving's words: signatures.

    signature          outputs when the request picks none
    serving_default    those of `/v2`: the dense part's if there is one, else a vector for every feature given
    lookup             a vector for every feature given
    lookup_float16     the same in DT_HALF

All signatures have the same inputs. A request that picks outputs by name may have any output of the model in any
signature. Values are not changed once made; any thread may use them, and `Signatures`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.engine.reads.view import View
from tierstore.errors import InvalidInput, shown
from tierstore.predict.binding import Bindings
from tierstore.service.dataplane.tensors import listed
from tierstore.service.dataplane.view import TensorInfo, inputs_of, outputs_of
from tierstore.types import FeatureSpec

DEFAULT = "serving_default"
LOOKUP = "lookup"
LOOKUP_HALF = "lookup_float16"
SIGNATURES = (DEFAULT, LOOKUP, LOOKUP_HALF)
METHOD = "tensorflow/serving/predict"  # the method name that every signature states

MAX_SIGNATURES = 256


@dataclass(frozen=True, slots=True)
class ServedSignatures:
    """The signatures of one version and dense part; `fits` compares the identity of `features` and `bindings`."""

    features: dict[str, FeatureSpec]
    bindings: Bindings | None
    inputs: dict[str, TensorInfo]
    outputs: dict[str, tuple[TensorInfo, ...]]

    def fits(self, view: View) -> bool:
        """Whether it was made for the view's version and dense part."""
        session = view.session
        bindings = None if session is None else session.bindings
        return self.features is view.features and self.bindings is bindings

    @property
    def only_input(self) -> str:
        """The input for a value without a name: the only required one."""
        parts = {name for feature in self.features for name in (f"{feature}.offsets", f"{feature}.weights")}
        names = [name for name in self.inputs if name not in parts]
        if len(names) == 1:
            return names[0]
        raise InvalidInput(
            f"values without a name need a model with one input; this one has {listed(sorted(names))}: send an object "
            "of input name to value"
        )

    def input(self, name: str) -> TensorInfo:
        """The input of that name. InvalidInput lists the inputs."""
        if (tensor := self.inputs.get(name)) is not None:
            return tensor
        raise InvalidInput(f"unknown input {shown(name)}; the inputs are {listed(sorted(self.inputs))}")


def check_signature(name: object) -> str:
    """`name` if there is such a signature; the default one for None."""
    if name is None or name == "":
        return DEFAULT
    if isinstance(name, str) and name in SIGNATURES:
        return name
    raise InvalidInput(f"unknown signature {shown(name)}; expected one of {', '.join(SIGNATURES)}")


def signature_of(view: View) -> ServedSignatures:
    """The signatures of a view's version."""
    session = view.session
    inputs = {tensor.name: tensor for tensor in inputs_of(view)}
    every = {tensor.name: tensor for tensor in outputs_of(view)}
    vectors = tuple(every[name] for name in view.features)
    halves = tuple(TensorInfo(tensor.name, "FP16", tensor.shape) for tensor in vectors)
    default = vectors if session is None else tuple(every[name] for name in session.bindings.outputs)
    return ServedSignatures(
        view.features,
        None if session is None else session.bindings,
        inputs,
        {DEFAULT: default, LOOKUP: vectors, LOOKUP_HALF: halves},
    )


class Signatures:
    """The latest signature of each version that was requested; cleared when there are too many."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], ServedSignatures] = {}  # every use is one atomic step

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, model: str, view: View) -> ServedSignatures:
        key = model, view.version
        kept = self._kept.get(key)
        if kept is None or not kept.fits(view):
            if len(self._kept) >= MAX_SIGNATURES:
                self._kept.clear()
            kept = self._kept[key] = signature_of(view)
        return kept
