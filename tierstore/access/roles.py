"""Roles, what each may do, and principals: the callers that a token, or a certificate, stands for.

A role may do what those before it may: reader, writer, admin. Two stand aside: `metrics` reads metrics and nothing
else, `front` is a reader that may also be a node in front of this one. A principal may be limited to some models; then
it may not ask for what concerns all of them. Who may ask a model may ask its heads; a principal may be limited to a
head (`ctr.cvr`). Immutable; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tierstore.errors import Forbidden


class Role(StrEnum):
    """What a caller is, as `tierstore token create --role` takes it."""

    METRICS = "metrics"
    READER = "reader"
    FRONT = "front"
    WRITER = "writer"
    ADMIN = "admin"


class Action(StrEnum):
    """What a request does, as far as access goes."""

    OPEN = "open"  # for everybody, without a token: health, pages without data
    ANY = "any"  # for every token but one for metrics: what says nothing of a model
    METRICS = "metrics"
    READ = "read"  # look-ups, predictions, metadata, status
    FRONT = "front"  # what a node in front asks: what is served, rows as stored, deltas of the log, files of versions
    WRITE = "write"  # deltas
    ADMIN = "admin"  # loads, switches, drops


CHANGES = frozenset({Action.WRITE, Action.ADMIN})  # what the audit is about

_MAY: dict[Role | None, frozenset[Action]] = {
    None: frozenset({Action.OPEN}),
    Role.METRICS: frozenset({Action.OPEN, Action.METRICS}),
    Role.READER: frozenset({Action.OPEN, Action.ANY, Action.READ}),
    Role.FRONT: frozenset({Action.OPEN, Action.ANY, Action.READ, Action.FRONT}),
    Role.WRITER: frozenset({Action.OPEN, Action.ANY, Action.READ, Action.WRITE}),
    Role.ADMIN: frozenset(Action),
}


@dataclass(frozen=True, slots=True)
class Rates:
    """The most that a caller, or all callers of a model, may ask for in a second; None for no limit.

    `keys` are those of look-ups and predictions, `nbytes` those of request bodies.
    """

    requests: float | None = None
    keys: float | None = None
    nbytes: float | None = None

    def __bool__(self) -> bool:
        return any(rate is not None for rate in (self.requests, self.keys, self.nbytes))


NO_LIMITS = Rates()


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. `name` is for logs and the audit; `models` None stands for all of them, `role` None for none."""

    name: str
    role: Role | None
    models: frozenset[str] | None = None
    rates: Rates = NO_LIMITS

    def may(self, action: Action, model: str | None = None) -> bool:
        """Whether it may do `action` to `model`; None is for what concerns all models, or none."""
        if action not in _MAY[self.role]:
            return False
        return action in (Action.OPEN, Action.ANY) or self._is_for(model)

    def _is_for(self, model: str | None) -> bool:
        if self.models is None:
            return True
        # the second: a head of one of them; by hand, as `types` brings NumPy, which `tierstore --help` does without
        return model is not None and (model in self.models or model.partition(".")[0] in self.models)

    def may_at_all(self, action: Action) -> bool:
        """Whether the role may do that, whichever model it is."""
        return action in _MAY[self.role]

    def check_role(self, action: Action) -> None:
        """Raise Forbidden unless `may_at_all`."""
        if not self.may_at_all(action):
            roles = " or ".join(role for role in Role if action in _MAY[role])
            raise Forbidden(
                f"{self.name} has {f'the role {self.role}' if self.role else 'no role'}: this takes {roles}"
            )

    def check(self, action: Action, model: str | None = None) -> None:
        """Raise Forbidden, with what it would take, unless `may`."""
        self.check_role(action)
        if action not in (Action.OPEN, Action.ANY):
            self.check_model(model)

    def check_model(self, model: str | None) -> None:
        """Raise Forbidden where it is limited to other models."""
        if not self._is_for(model):
            assert self.models is not None
            names = ", ".join(sorted(self.models))
            what = f"not for {model!r}"
            if model is None:
                one = next(iter(sorted(self.models)), "MODEL")
                what = f"this concerns all models; name one of its own, as in `tierstore status {one}`"
            raise Forbidden(f"{self.name} is for {names} alone: {what}")


LOCAL = Principal("local", Role.ADMIN)  # everybody, where there are no tokens
NOBODY = Principal("nobody", None, frozenset())  # a caller of whom nothing is known
