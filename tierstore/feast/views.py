"""Maps Feast's feature views to what the service can hold. Pure functions; any thread.

A view is a model of its own with two tables, `<field>` with the vectors and `<field>-event_time` with the event times,
and a feature of the same name for each. A row without a vector is a null. So a delta changes a vector and its time in
one step, and one look-up reads both of one moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import ceil
from typing import Any

from feast.feature_view import DUMMY_ENTITY_ID, FeatureView
from feast.value_type import ValueType

from tierstore.arguments import check_name
from tierstore.errors import Conflict, InvalidInput
from tierstore.formats.columns import MAX_DIM
from tierstore.types import KeyType

TIME_SUFFIX = "-event_time"
TIME_DIM = 3  # numbers of a time, see `rows.py`
_KEYS = {ValueType.INT64: KeyType.INT64, ValueType.INT32: KeyType.INT64, ValueType.STRING: KeyType.STRING}
_VECTORS = (ValueType.FLOAT_LIST, ValueType.DOUBLE_LIST)


@dataclass(frozen=True, slots=True)
class HeldView:
    """A feature view as the service holds it. `ttl` None: values never become too old."""

    name: str
    model: str
    field: str
    dim: int
    key: KeyType
    is_double: bool  # Array(Float64)
    ttl: timedelta | None

    @property
    def times(self) -> str:
        return self.field + TIME_SUFFIX

    @property
    def ttl_s(self) -> int | None:
        """After so many seconds the service may remove a row; never before it is too old."""
        return None if self.ttl is None else max(1, ceil(self.ttl.total_seconds()))

    @property
    def dims(self) -> dict[str, int]:
        """By table."""
        return {self.field: self.dim, self.times: TIME_DIM}


def model_name(project: str, view: str) -> str:
    """The name of a view's model. A project's name has no `-`, so no two views share one."""
    return f"{project}-{view}"


def held_view(project: str, view: Any) -> HeldView:
    """How a view is held. InvalidInput, which names the view and all that is in the way, for one that cannot be."""
    reasons = _reasons(project, view)
    if reasons:
        raise InvalidInput(f"feature view {view.name!r} cannot be held by tierstore: {'; '.join(reasons)}")
    entity, field = view.entity_columns[0], view.features[0]
    return HeldView(
        name=view.name,
        model=model_name(project, view.name),
        field=field.name,
        dim=field.vector_length,
        key=_KEYS[entity.dtype.to_value_type()],
        is_double=field.dtype.to_value_type() is ValueType.DOUBLE_LIST,
        ttl=view.ttl if view.ttl else None,
    )


def held_views(project: str, views: Sequence[Any]) -> list[HeldView]:
    """`held_view` of each. One InvalidInput says what is in the way of any of them."""
    held, errors = [], []
    for view in views:
        try:
            held.append(held_view(project, view))
        except InvalidInput as error:
            errors.append(str(error))
    if errors:
        raise InvalidInput("\n".join(errors))
    return held


def check_unchanged(view: HeldView, status: Mapping[str, Any]) -> None:
    """Conflict if the model that serves is not that of the view as it is now."""
    there = {name: (table["key"], table["dim"], table["dtype"]) for name, table in status["tables"].items()}
    wanted = {name: (view.key.value, dim, "float32") for name, dim in view.dims.items()}
    if there != wanted:
        raise Conflict(
            f"feature view {view.name!r}: expected the model {view.model!r} with the tables {_tables(wanted)}, it has "
            f"{_tables(there)}; give the view another name, or remove it, apply, and add it again, which begins empty"
        )
    ttl = min((table["ttl"]["ttl_s"] for table in status["tables"].values() if table["ttl"]), default=None)
    if ttl is not None and (view.ttl_s is None or view.ttl_s > ttl):
        raise Conflict(
            f"feature view {view.name!r}: its ttl is now {view.ttl or 'none'}, and rows are removed after "
            f"{timedelta(seconds=ttl)}, the ttl with which it was applied first; a longer one takes another name, or "
            "remove the view, apply, and add it again, which begins empty"
        )


def is_of_feast(status: Mapping[str, Any]) -> bool:
    """Whether a model that serves was made for a feature view."""
    tables = status["tables"]
    return len(tables) == 2 and any(name + TIME_SUFFIX in tables for name in tables)


def _reasons(project: str, view: Any) -> list[str]:
    if not isinstance(view, FeatureView):
        return [f"it is of the kind {type(view).__name__}, expected a FeatureView"]
    reasons = []
    try:
        check_name("model", model_name(project, view.name))
    except InvalidInput as error:
        reasons.append(str(error))
    reasons += _entity_reasons(view.entity_columns)
    fields = view.features
    if len(fields) != 1:
        names = ", ".join(field.name for field in fields) or "none"
        reasons.append(f"expected one field, the embedding, got {len(fields)} ({names})")
    else:
        reasons += _field_reasons(fields[0])
    return reasons


def _entity_reasons(columns: Sequence[Any]) -> list[str]:
    names = [column.name for column in columns]
    if not names or names == [DUMMY_ENTITY_ID]:
        return ["expected one entity, got none"]
    if len(names) > 1:
        return [f"expected one join key, got {len(names)} ({', '.join(names)})"]
    kind = columns[0].dtype.to_value_type()
    return [] if kind in _KEYS else [f"join key {names[0]!r}: expected Int64, Int32 or String, got {kind.name}"]


def _field_reasons(field: Any) -> list[str]:
    reasons = []
    kind = field.dtype.to_value_type()
    if kind not in _VECTORS:
        reasons.append(f"field {field.name!r}: expected Array(Float32) or Array(Float64), got {field.dtype}")
    elif not 1 <= field.vector_length <= MAX_DIM:
        reasons.append(
            f"field {field.name!r}: expected how many numbers a vector has, 1 to {MAX_DIM}, as Field(..., "
            f"vector_length=64), got {field.vector_length or 'none'}"
        )
    try:
        check_name("table", field.name + TIME_SUFFIX)
    except InvalidInput as error:
        reasons.append(f"field {field.name!r}: {error}")
    return reasons


def _tables(tables: Mapping[str, tuple[str, int, str]]) -> str:
    return ", ".join(f"{name} ({key} keys, {dim} x {dtype})" for name, (key, dim, dtype) in sorted(tables.items()))
