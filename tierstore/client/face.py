"""The verbs, as callers see them: one text for `Client` and `AsyncClient`, which differ in how steps are carried out.

A `RemoteModel` holds nothing but a name. A face may be used wherever its client may.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack
from urllib.parse import quote

from tierstore import __version__
from tierstore.client import steps
from tierstore.client.address import Address
from tierstore.client.flights import Policy, RetryBudget
from tierstore.client.remote import LookupOptions, RemoteModel
from tierstore.client.settings import Settings
from tierstore.client.shared import Choice, Shared
from tierstore.client.sources import delta_model, snapshot_model
from tierstore.client.steps import ModelFacts, Steps, Until, Version
from tierstore.errors import InvalidInput, SnapshotError
from tierstore.types import DeltaResult, ProgressFn

SPLIT_KEYS = 1 << 15  # of one request; larger look-ups go out as several, side by side
SPLIT_ITEMS = 2048  # of one `predict`
SWITCH_TIMEOUT_S = 600.0  # a version is caught up and warmed before it serves, however long that takes


class Face(ABC):
    """A running service.

    Args:
        url: where it listens, such as `http://127.0.0.1:8000`.
        token: sent as a bearer token, if the service asks for one.
        timeout_s: of a verb from its beginning to its end, retries included, unless the call names its own.
            It is told to the service too, which gives up what nobody waits for any more.
        retries: how often a request is repeated whose connection failed or that the service was too busy for. Look-ups,
            `predict`, reads and deltas are repeated (a delta's seq makes it count once); other changes never.
        backoff_s: the longest wait before the first repeat; it doubles with each. The wait is drawn at random.
        hedge_after_s: send a look-up or `predict` a second time when no answer came for so long, and take the first.
        split_keys: keys of one request; a larger look-up goes out as several, side by side. None: never.
        split_items: the same for the items of one `predict`. None: never.
        parallel: requests of one call under way at once.
        max_connections: to the service, of all calls together.
        shared_memory: `auto` lets large look-ups go through memory shared with a service on the same host that allows
            it; True all that fit; False none. Answers are the same.

    Every verb raises Unreachable when nothing answers, DeadlineExceeded when the time is over, Overloaded when the
    service is too busy, Forbidden when it does not let this caller, and otherwise the errors of the embedded store.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 3,
        backoff_s: float = 0.05,
        hedge_after_s: float | None = None,
        split_keys: int | None = SPLIT_KEYS,
        split_items: int | None = SPLIT_ITEMS,
        parallel: int = 4,
        max_connections: int = 32,
        shared_memory: Choice = "auto",
    ) -> None:
        self._address = Address.of(url)
        for name, value in (("parallel", parallel), ("max_connections", max_connections), ("retries", retries + 1)):
            if value < 1:
                raise InvalidInput(f"{name}: expected a number of at least {0 if name == 'retries' else 1}")
        for name, most in (("split_keys", split_keys), ("split_items", split_items)):
            if most is not None and most < 1:
                raise InvalidInput(f"{name}: expected at least 1, or None, came {most}")
        Until(timeout_s)
        policy = Policy(retries=retries, backoff_s=backoff_s, parallel=parallel)
        self._settings = Settings(timeout_s, hedge_after_s, split_keys, split_items, max_connections, policy)
        self._budget = RetryBudget(policy.retry_burst, policy.retry_share)
        self._facts = ModelFacts()
        self._shared = Shared(self._address, shared_memory)
        self._fields = _fields(self._address, token)
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Make the pool of connections; called once, before the first verb."""

    @abstractmethod
    def _run(self, verb: Steps) -> Any:
        """Carry out the steps and give their result: at once, or to be awaited."""

    @abstractmethod
    def _connections(self) -> dict[str, int]:
        """`busy`, `idle`, `limit`."""

    def figures(self) -> dict[str, Any]:
        """How full the client's pools are: connections, the budget of repeats, and how often it was taken or empty."""
        budget = self._budget
        return {
            "connections": self._connections(),
            "shared_memory": self._shared.figures(),
            "repeats": {"left": budget.left, "limit": budget.most, "taken": budget.taken, "refused": budget.refused},
        }

    # --- look-ups and predictions

    def model(self, name: str) -> RemoteModel:
        """The model of that name. Nothing is sent: a name that the service does not know fails at the first look-up."""
        return RemoteModel(self, name)

    def lookup(
        self, model: str, feature: str, keys: Any, *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any:
        """Rows of `keys` [n], in their order: vectors [n, dim], or with `return_found` (vectors, found bool[n]).

        Args:
            keys: an integer array or list, strings for a string table, an Arrow array, a column of a frame, a tensor.
            return_found: also tell which keys the table holds; a key that it does not hold has the table's default.
            options: `dtype` of the answer, `float32` or `float16`; `version`, a number or a label, by default what the
                service chooses; `timeout_s` of the whole; `request_id`, equal ones of which go to the same version.
        """
        return self.model(model).lookup(feature, keys, return_found=return_found, **options)

    def lookup_bags(
        self,
        model: str,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: bool = False,
        **options: Unpack[LookupOptions],
    ) -> Any:
        """Embedding bags, pooled: vectors [bags, dim], or with `return_found` (vectors, found bool[n]).

        Args:
            keys: n keys, as in `lookup`.
            offsets: int64[bags], the start of each bag in `keys`: the first 0, never descending, no end entry.
            weights: float32[n], 1 each if not given.
            combiner: `sum`, `mean` or `sqrtn`; None for the feature's own.
            options: as for `lookup`.
        """
        remote = self.model(model)
        return remote.lookup_bags(
            feature, keys, offsets, weights=weights, combiner=combiner, return_found=return_found, **options
        )

    def lookup_many(
        self, model: str, keys: Mapping[str, Any], *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any:
        """Several features at once, in one request and so of one moment: {feature: what `lookup` or `lookup_bags` gives}.

        Args:
            keys: by feature: keys, or for bags a tuple `(keys, offsets)` or `(keys, offsets, weights)`.
            options: as for `lookup`.
        """
        return self.model(model).lookup_many(keys, return_found=return_found, **options)

    def predict(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        version: Version = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        split_items: int | Literal["client"] | None = "client",
    ) -> Any:
        """Outputs of the model's dense part for a batch of items; see `RemoteModel.predict`.

        Args:
            inputs: by name: keys of features and the dense part's own inputs.
            outputs: names; by default those of the dense part.
            split_items: in place of the client's. None sends one request.

        Returns {name: array}, or the array itself where no outputs are named and the model answers one.
        """
        return self.model(model).predict(
            inputs,
            outputs=outputs,
            version=version,
            timeout_s=timeout_s,
            request_id=request_id,
            split_items=split_items,
        )

    # --- state

    def ready(self) -> Any:
        """Whether the service takes requests."""
        return self._run(steps.succeeds("/v2/health/ready", self._until()))

    def models(self) -> Any:
        """Names of the models that the service knows, sorted."""
        return self._run(self._models())

    def status(self, model: str | None = None) -> Any:
        """`{"models": {name: …}, …}`, the document of the embedded store's `status`. NotFound for an unknown `model`.

        Without `model` the store's own bounds stand beside the models, and under `service` those of the service.
        """
        return self._run(self._status(model))

    # --- versions and deltas

    def load_snapshot(
        self,
        source: str | Path,
        *,
        model: str | None = None,
        activate: bool = True,
        progress: ProgressFn | None = None,
    ) -> Any:
        """Have the service load a snapshot and wait until that is done.

        Args:
            source: as the service sees it: under one of its source roots.
            model: whose snapshot it is; read from `snapshot.json` (or `built.json`) in `source` if that can be read here.
            activate: serve it once it is loaded, caught up and warm.
            progress: called now and then, where the caller's code runs.

        Returns the version. Raises SnapshotError when it is refused; nothing that served before changes then.
        """
        return self._run(self._load(source, model, activate, progress))

    def start_load(self, source: str | Path, *, model: str, activate: bool = True) -> Any:
        """Begin what `load_snapshot` does and return the job's id for `job`."""
        return self._run(self._start_load(source, model, activate))

    def job(self, job: str) -> Any:
        """A load's `state` (`running`, `done`, `failed`), `phase`, `done`, `total`, `rate`, `eta_s`, `error`."""
        return self._run(_json(steps.exchange("GET", f"/admin/jobs/{quote(job, safe='')}", self._until())))

    def apply_delta(
        self,
        source: bytes | bytearray | memoryview | str | Path,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Send a delta: the Arrow stream itself, or the path of a file that holds it. Returns a DeltaResult.

        On return it is durable and every look-up that starts sees it whole. SequenceGap names the next seq.
        `model` defaults to the one in the stream's metadata. `applied` is False also where an earlier copy of this
        very call had arrived and only its answer was lost.
        """
        data = Path(source).read_bytes() if isinstance(source, (str, Path)) else bytes(source)
        return self._run(self._apply_delta(data, model or delta_model(data), timeout_s))

    def activate(self, model: str, version: int, *, force: bool = False) -> Any:
        """Serve a kept version. Conflict for a stale one, unless `force`."""
        return self._run(self._switch(model, "/activate", {"version": version, **_forced(force)}))

    def rollback(self, model: str, *, force: bool = False) -> Any:
        """Serve the version before the active one, and return it. Conflict if there is none, or it is stale and not `force`."""
        return self._run(self._switch(model, "/rollback", _forced(force), result="active_version"))

    def drop(self, model: str, version: int) -> Any:
        """Remove a version from disk. Conflict for the active one."""
        return self._run(_nothing(steps.exchange("DELETE", f"{_admin(model)}/versions/{version}", self._until())))

    def canary(self, model: str, version: int, share: float = 0.05, *, force: bool = False) -> Any:
        """Serve a kept version to `share` (0 to 1) of the requests that name none; for the canary, change its share alone."""
        body = {"version": version, "share": share, **_forced(force)}
        return self._run(self._switch(model, "/canary", body))

    def promote(self, model: str) -> Any:
        """Make the canary the active version, and return it. Conflict where there is none."""
        return self._run(self._switch(model, "/promote", None, result="active_version"))

    def withdraw(self, model: str) -> Any:
        """Stop serving the canary, and return its version, which is kept. Conflict where there is none."""
        return self._run(self._switch(model, "/withdraw", None, result="withdrawn"))

    def label(self, model: str, name: str, version: int) -> Any:
        """Let a label stand for a version that is served, until that is served no more."""
        path = f"{_admin(model)}/labels/{quote(name, safe='')}"
        return self._run(_nothing(_json(steps.exchange("PUT", path, self._until(), {"version": version}))))

    def unlabel(self, model: str, name: str) -> Any:
        """Remove a label."""
        path = f"{_admin(model)}/labels/{quote(name, safe='')}"
        return self._run(_nothing(_json(steps.exchange("DELETE", path, self._until()))))

    # --- steps

    def _until(self, timeout_s: float | None = None) -> Until:
        return Until(self._settings.timeout_s if timeout_s is None else timeout_s)

    def _models(self) -> Steps:
        document = yield from self._status(None)
        return sorted(document["models"])

    def _status(self, model: str | None) -> Steps:
        if model is not None:
            document = yield from _json(steps.exchange("GET", _admin(model), self._until()))
            return {"models": {model: document}}
        listed = yield from _json(steps.exchange("GET", "/admin/models", self._until()))
        return {**listed, "models": {document["model"]: document for document in listed["models"]}}

    def _load(self, source: str | Path, model: str | None, activate: bool, progress: ProgressFn | None) -> Steps:
        job = yield from self._start_load(source, model or snapshot_model(source), activate)
        document = yield from steps.job_done(job, self._settings.timeout_s, progress)
        if document["state"] == "failed":
            raise SnapshotError(str(document.get("error") or "the load failed"))
        return int(document["version"])

    def _start_load(self, source: str | Path, model: str, activate: bool) -> Steps:
        body = {"source": str(source), "activate": activate}
        started = yield from _json(steps.exchange("POST", f"{_admin(model)}/snapshots", self._until(), body))
        return str(started["job"])

    def _apply_delta(self, data: bytes, model: str, timeout_s: float | None) -> Steps:
        kind = "application/vnd.apache.arrow.stream"
        until = self._until(timeout_s)
        sent = steps.exchange("POST", f"{_admin(model)}/deltas", until, content=data, kind=kind, repeat=True)
        answer = yield from _json(sent)
        return DeltaResult(model, int(answer["seq"]), bool(answer["applied"]))

    def _switch(self, model: str, path: str, body: Any, *, result: str | None = None) -> Steps:
        until = Until(max(SWITCH_TIMEOUT_S, self._settings.timeout_s))
        answer = yield from _json(steps.exchange("POST", _admin(model) + path, until, body))
        return None if result is None else int(answer[result])


def _fields(address: Address, token: str | None) -> str:
    """Header lines of every request."""
    fields = f"Host: {address.authority}\r\nUser-Agent: tierstore/{__version__}\r\nAccept-Encoding: identity\r\n"
    if token is None:
        return fields
    if not (token.isascii() and token.isprintable()):
        raise InvalidInput("token: expected printable ASCII")
    return f"{fields}Authorization: Bearer {token}\r\n"


def _admin(model: str) -> str:
    return f"/admin/models/{quote(model, safe='')}"


def _forced(force: bool) -> dict[str, bool]:
    return {"force": True} if force else {}


def _json(sent: Steps) -> Steps:
    reply = yield from sent
    return reply.json()


def _nothing(sent: Steps) -> Steps:
    yield from sent
