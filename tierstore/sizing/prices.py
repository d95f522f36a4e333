"""Prices by which designs are compared, from a file: of memory, disk and cores, or of whole nodes of some kinds.

Immutable values; any thread.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from tierstore.errors import InvalidInput

_SIZE = TypeAdapter(ByteSize)


def _bytes_of(value: object) -> float:
    """`64GiB`, or a number of bytes."""
    return float(_SIZE.validate_python(value))


Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[float, BeforeValidator(_bytes_of), Field(gt=0)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Kind(_Entry):
    """Nodes of one kind, that are paid for whole.

    `reads`: random reads of 4 KiB a second; `network`: Gbit a second, each way.
    """

    memory: Size
    disk: Size
    cores: Annotated[int, Field(ge=1)]
    price: Price
    reads: Positive = 200_000.0
    network: Positive = 25.0


class Prices(_Entry):
    """The prices of a month, in one currency. `memory` and `disk`: of a GiB, `core`: of a core, of what a design uses.

    With `nodes` whole nodes are paid instead.

    By default figures of the size that clouds ask: only their ratio decides.
    """

    currency: str = ""
    memory: Price = 3.0
    disk: Price = 0.1
    core: Price = 15.0
    nodes: dict[str, Kind] = Field(default_factory=dict)


ASSUMED = Prices(currency="USD")  # where none are given


def read_prices(path: str | Path) -> Prices:
    """Prices in a file of TOML, or of JSON where its name ends so. InvalidInput, naming what is wrong in it."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        document: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return Prices.model_validate(document)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from error
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg']}" for fault in error.errors()[:5]
        )
        raise InvalidInput(f"{path}: {faults}") from error
    except ValueError as error:  # of a text that is neither, or no UTF-8
        raise InvalidInput(f"{path} is neither TOML nor JSON: {error}") from error
