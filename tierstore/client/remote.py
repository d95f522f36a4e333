"""`RemoteModel`: the verbs of one model. Holds nothing but a name; it may be used wherever its client may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypedDict, Unpack

from tierstore.client import inputs as given_inputs
from tierstore.client import steps, wire
from tierstore.client.batches import Batch
from tierstore.client.settings import Settings
from tierstore.client.shards import cut_items, cut_lookup
from tierstore.client.shared import Shared
from tierstore.client.steps import Asked, ModelFacts, Steps, Until, Version
from tierstore.errors import InvalidInput

_ANSWERS: dict[str, dict[str, str]] = {"float32": {}, "float16": {"dtype": "FP16"}}


class LookupOptions(TypedDict, total=False):
    """What all look-ups take beside `return_found`; see `RemoteModel`."""

    dtype: Literal["float32", "float16"]
    version: Version
    timeout_s: float | None
    request_id: str | None


class Carrier(Protocol):
    """What carries verbs out: a client."""

    _settings: Settings
    _facts: ModelFacts
    _shared: Shared

    def _run(self, verb: Steps) -> Any: ...
    def _until(self, timeout_s: float | None = None) -> Until: ...


class RemoteModel:
    """A model of a service. Holds nothing but its name, so it stays good across version switches.

    Options that all look-ups take: `dtype` of the answer, `float32` or `float16`; `version`, a number or a label, by
    default what the service chooses; `timeout_s` of the whole; `request_id`, by which a service that splits traffic over
    versions chooses one: the same for the same id.

    A request beyond `split_keys` goes out as several, side by side. All are answered by one version, but a delta may
    become visible between them.
    """

    def __init__(self, client: Carrier, name: str) -> None:
        self._client, self.name = client, name

    @property
    def ready(self) -> Any:
        """Whether a version of the model is served."""
        return self._client._run(steps.succeeds(f"{steps.model_path(self.name)}/ready", self._client._until()))

    def metadata(self, *, version: Version = None) -> Any:
        """The protocol's model metadata: `inputs` and `outputs` with their datatypes and shapes."""
        client = self._client
        return client._run(steps.metadata(client._facts, self.name, version, client._until(), renew=True))

    def lookup(self, feature: str, keys: Any, *, return_found: bool = False, **options: Unpack[LookupOptions]) -> Any:
        """Rows of `keys`, in their order.

        Args:
            feature: a feature of the model.
            keys: n keys: an integer array or list, strings for a string table, or an Arrow array.
            return_found: also tell which keys the table holds.
            options: see the class.

        Returns vectors [n, dim], or (vectors [n, dim], found bool[n]).
        """
        return self._client._run(self._one(Batch.of(feature, keys), return_found, None, _checked(options)))

    def lookup_bags(
        self,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: bool = False,
        **options: Unpack[LookupOptions],
    ) -> Any:
        """Embedding bags, pooled.

        Args:
            keys: n keys, as in `lookup`.
            offsets: int64[bags], the start of each bag in `keys`: the first 0, never descending, no end entry.
            weights: float32[n], 1 each if not given.
            combiner: `sum`, `mean` or `sqrtn`; None for the feature's own.
            options: see the class.

        Returns vectors [bags, dim], zeros for an empty bag; with `return_found` also found bool[n].
        """
        batch = Batch.of(feature, keys, offsets, weights)
        return self._client._run(self._one(batch, return_found, combiner, _checked(options)))

    def lookup_many(
        self, keys: Mapping[str, Any], *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any:
        """Several features at once, in one request and so of one moment.

        Args:
            keys: by feature: keys as `lookup` takes them, or for bags a tuple `(keys, offsets)` or
                `(keys, offsets, weights)` as `lookup_bags` takes them.
            options: see the class.

        Returns {feature: what `lookup` or `lookup_bags` returns}.
        """
        batches = [Batch.given(feature, value) for feature, value in keys.items()]
        return self._client._run(self._many(batches, return_found, None, _checked(options)))

    def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        version: Version = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        split_items: int | Literal["client"] | None = "client",
    ) -> Any:
        """Outputs of the model's dense part for a batch of items.

        Args:
            inputs: by name: keys of features and the dense part's own inputs, an array each, converted to the datatype
                that the model declares; for ragged features `(keys, offsets)` or `(keys, offsets, weights)`. Axis 0, or
                the bag, is the item; what has one entry (the user) goes with all items.
            outputs: names; by default those of the dense part.
            version, timeout_s, request_id: as for look-ups.
            split_items: in place of the client's. None sends one request: for a model whose answer for an item depends
                on the others in the batch.

        Returns {name: array}, or the array itself where no outputs are named and the model answers one.
        """
        asked = self._asked(version, timeout_s, request_id)
        most = self._client._settings.split_items if split_items == "client" else split_items
        return self._client._run(self._predict(asked, inputs, outputs, most))

    # --- steps

    def _asked(self, version: Version, timeout_s: float | None, request_id: str | None) -> Asked:
        if request_id is not None and not (request_id and request_id.isascii() and request_id.isprintable()):
            raise InvalidInput(f"request_id: expected printable ASCII, came {request_id!r}")
        client = self._client
        return Asked(self.name, version, client._until(timeout_s), request_id, client._settings.hedge_after_s)

    def _one(self, batch: Batch, return_found: bool, combiner: str | None, options: LookupOptions) -> Steps:
        answers = yield from self._many([batch], return_found, combiner, options)
        return answers[batch.feature]

    def _many(self, batches: list[Batch], return_found: bool, combiner: str | None, options: LookupOptions) -> Steps:
        dtype, version = options.get("dtype", "float32"), options.get("version")
        asked = self._asked(version, options.get("timeout_s"), options.get("request_id"))
        outputs = {batch.feature: _outputs(batch.feature, dtype, return_found, combiner) for batch in batches}
        client, facts = self._client, self._client._facts
        whole = partial(cut_lookup, batches, outputs, None)
        arrays = None
        nbytes = facts.answer_bytes(self.name, version, batches, dtype, return_found)
        if nbytes is not None:
            (shard,) = whole().shards
            arrays = yield from client._shared.infer(asked, shard.inputs, shard.outputs, nbytes)
        if arrays is None:
            cut = cut_lookup(batches, outputs, client._settings.split_keys)
            arrays = yield from steps.infer(asked, cut, whole, facts)
            facts.learn_dims(self.name, version, {batch.feature: arrays.get(batch.feature) for batch in batches})
        answers: dict[str, Any] = {}
        for batch in batches:
            rows = steps.named(arrays, batch.feature)
            found = steps.named(arrays, f"{batch.feature}.found") if return_found else None
            answers[batch.feature] = rows if found is None else (rows, found)
        return answers

    def _predict(
        self, asked: Asked, inputs: Mapping[str, Any], outputs: Sequence[str] | None, most: int | None
    ) -> Steps:
        facts = self._client._facts
        document = yield from steps.metadata(facts, self.name, asked.version, asked.until)
        wanted = steps.wanted_outputs(outputs)
        while True:
            try:
                given = given_inputs.given(inputs, document)
                cut = cut_items(given, wanted, None if self.name in facts.whole else most)
                arrays = yield from steps.infer(asked, cut, partial(cut_items, given, wanted, None), facts)
                break
            except InvalidInput:  # was it refused for what an earlier version declared?
                newer = yield from steps.metadata(facts, self.name, asked.version, asked.until, renew=True)
                if newer == document:
                    raise
                document = newer
        for name in outputs or ():
            steps.named(arrays, name)
        if outputs is None and len(arrays) == 1:
            return next(iter(arrays.values()))
        return arrays


def _checked(options: LookupOptions) -> LookupOptions:
    unknown = options.keys() - LookupOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unknown option {', '.join(sorted(unknown))}: look-ups take return_found, {', '.join(LookupOptions.__annotations__)}"
        )
    return options


def _outputs(feature: str, dtype: str, return_found: bool, combiner: str | None) -> list[wire.Output]:
    parameters = _ANSWERS.get(dtype)
    if parameters is None:
        raise InvalidInput(f"dtype {dtype!r} is not known: answers are 'float32' or 'float16'")
    if combiner is not None:
        parameters = {**parameters, "combiner": combiner}
    rows = [wire.Output(feature, dict(parameters))]
    return [*rows, wire.Output(f"{feature}.found", {})] if return_found else rows
