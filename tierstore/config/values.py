"""The types of settings, their defaults that depend on the machine, and lists read from text."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field
from pydantic_core import PydanticCustomError

from tierstore.errors import shown
from tierstore.types import Partitions


def split_roots(value: object) -> object:
    """Paths and URLs of `source_root`: the colon of a URL separates nothing."""
    parts = re.split(rf"{re.escape(os.pathsep)}(?!//)", value) if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        return parts
    return [path_or_url(part) for part in parts if part]


def path_or_url(value: Any) -> Any:
    """A URL as it is, other text as a path."""
    return Path(value) if isinstance(value, str) and "://" not in value else value


def local_directory(value: Any) -> Any:
    """The data directory, which is on this machine: no URL, and nothing that no file system holds."""
    if isinstance(value, str) and ("://" in value or "\0" in value):
        raise PydanticCustomError("data", "expected a directory of this machine, got {got}", {"got": shown(value)})
    return value


def check_host(text: str) -> str:
    """An address or a name to listen on; an IPv6 address may be in brackets."""
    host = text[1:-1] if text[:1] == "[" and text[-1:] == "]" else text
    if not host or "/" in host or (":" in host and not is_address(host)):
        raise ValueError(
            f"expected an address such as 127.0.0.1 or ::1, with the port in its own setting, got {text!r}"
        )
    return host


def is_address(host: str) -> bool:
    """Whether `host`, without port or brackets, is an IP address and not a name, which somebody could resolve
    elsewhere.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_networks(texts: list[str]) -> list[str]:
    for text in texts:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            raise ValueError(
                f"expected addresses or networks such as 10.0.0.7 or 10.0.0.0/8, got {text!r}: {error}"
            ) from None
    return texts


def split_commas(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def split_names(value: object) -> object:
    return split_commas(value.lower() if isinstance(value, str) else value)


_UNITS_S = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


def seconds_of(value: object) -> object:
    """Seconds, also of a text such as `2h`, `30min` or `90s`."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|min|m|h|d)\s*", value) if isinstance(value, str) else None
    return value if match is None else float(match[1]) * _UNITS_S[match[2]]


Seconds = Annotated[float, BeforeValidator(seconds_of)]

LEAST_WITHOUT_UNIT = 1024


def size_with_unit(value: object) -> object:
    """A size as it is given. ValueError for a small number without a unit, which is a unit forgotten: 4 for 4GiB."""
    is_bare = isinstance(value, (int, float)) or (isinstance(value, str) and re.fullmatch(r"\s*[0-9.]+\s*", value))
    if is_bare and 0 < float(value) < LEAST_WITHOUT_UNIT:  # type: ignore[arg-type]
        raise PydanticCustomError(
            "size_without_unit", "expected a size with a unit, such as 4GiB, got {given}", {"given": value}
        )
    return value


SizeOrZero = Annotated[ByteSize, BeforeValidator(size_with_unit)]
Size = Annotated[SizeOrZero, Field(gt=0)]
PartitionsText = Annotated[str, AfterValidator(lambda text: str(Partitions.parse(text)))]
Rate = Annotated[float | None, Field(gt=0, allow_inf_nan=False)]


class ModelQuota(BaseModel):
    """The most of one model: what its callers may ask for in a second, all together, and what it may have on disk.

    None: no limit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_second: Rate = None
    keys_per_second: Rate = None
    bytes_per_second: Size | None = None
    log_bytes: Size | None = None  # of the delta log
    versions: Annotated[int, Field(ge=1)] | None = None  # on disk, those being loaded included
    loads: Annotated[int, Field(ge=1)] | None = None  # that run or wait in a service
    freshness_max_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # since the newest event; 0: no limit


ANY_MODEL = "*"

WhenLoaded = Literal["now", "hold", "canary"]


class SnapshotPolicy(BaseModel):
    """What becomes of the snapshots of one model that a watched location has.

    `canary_share`, `canary_minutes`: of the policy `canary`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    watch_activate: WhenLoaded = "now"
    canary_share: Annotated[float, Field(ge=0, le=1)] = 0.05  # of the requests
    canary_minutes: Annotated[float, Field(ge=0, le=10080)] = (
        15.0  # without more failed requests than the active version has
    )
