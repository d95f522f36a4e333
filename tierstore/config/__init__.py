"""Settings: defaults, then `tierstore.toml`, then `TIERSTORE_…` environment variables, then keywords or flags.

They never change after they are read; any thread may use them. An unknown name in the file or among the
arguments is an error. An unknown variable is a warning, as it may be meant for a newer release; with
`strict_environment` it is an error too.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ByteSize, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from tierstore.config.dense import DenseSettings
from tierstore.config.service import ServiceSettings
from tierstore.config.sources import SourceSettings
from tierstore.config.store import StoreSettings
from tierstore.config.values import ANY_MODEL, ModelQuota, SnapshotPolicy, WhenLoaded
from tierstore.errors import ConfigError

__all__ = [
    "ANY_MODEL",
    "CLIENT_ENV",
    "CONFIG_FILE",
    "ENV_PREFIX",
    "ModelQuota",
    "Settings",
    "SnapshotPolicy",
    "WhenLoaded",
    "described_settings",
    "environment",
    "load_settings",
]

log = logging.getLogger(__name__)
_warned: set[str] = set()  # unknown variables, each named once a process

CONFIG_FILE = "tierstore.toml"
ENV_PREFIX = "TIERSTORE_"
CLIENT_ENV = frozenset(
    {"token", "url", "ca", "cert", "key", "allow_insecure_token"}
)  # read by the command line when it talks to a service
# What Kubernetes puts into the environment of every container for a service named `tierstore` or `tierstore-…`
_SERVICE_LINK = re.compile(
    r"(?:.+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_.+)?|PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_LINKED_PORT = re.compile(r"(?:tcp|udp|sctp)://", re.IGNORECASE)


def environment() -> dict[str, str]:
    """Settings in the environment: the value of `TIERSTORE_NAME`, by name in lower case.

    Kubernetes' service links do not count.
    """
    arguments = {n[len(ENV_PREFIX) :]: value for n, value in os.environ.items() if n.upper().startswith(ENV_PREFIX)}
    return {
        name.lower(): value
        for name, value in arguments.items()
        if not (_SERVICE_LINK.fullmatch(name) or (name.endswith("PORT") and _LINKED_PORT.match(value)))
    }


class Settings(ServiceSettings, SourceSettings, DenseSettings, StoreSettings, BaseSettings):
    """Every setting of the store and of the service, with its default. Sizes take `512MiB`, `4GiB` or bytes."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        assert isinstance(env_settings, EnvSettingsSource)
        env_settings.env_vars = {ENV_PREFIX.lower() + name: value for name, value in environment().items() if value}
        return init_settings, env_settings


_SHOWN_DEFAULTS = {  # of those that depend on the machine
    "host_budget": "4GiB, at most half of what is left of the memory (of the control group) beside 350 MiB of the "
    "process and its load helpers",
    "overlay_budget": "256MiB, at most an eighth of what is left, as for `host_budget`",
    "load_memory": "512MiB, at most an eighth of what is left, as for `host_budget`",
    "threads": "as many as processors, at most 64",
    "lookup_threads": "as many as processors, at least 2",
    "load_workers": "as many as processors, at most 4, and at most one for each 900 MiB of memory",
    "source_root": "the working directory",
    "dense_options": "none",
    "quotas": "none",
    "watch_snapshots": "none",
    "peer": "none",
    "snapshot_policies": "none",
    "kafka_rows": "none",
    "log_retention_s": "259200.0, or 3600.0 beside `remote` and `upstream`",
    "kafka_rows_fields": "none",
}


_IN_OPTIONS = "name it in dense_options, as ONNX Runtime does"
_CONSTANT = "it is a constant now"
_REPLACED = {  # settings that were, and what there is in their place
    "dense_intra_threads": _IN_OPTIONS,
    "dense_inter_threads": _IN_OPTIONS,
    "dense_affinity": _IN_OPTIONS,
    "dense_spinning": _IN_OPTIONS,
    "dense_graph_optimization": _IN_OPTIONS,
    "dense_arena": _IN_OPTIONS,
    "dense_device_memory": "set cuda.gpu_mem_limit in dense_options",
    "dense_provider_options": "set them in dense_options, with `cuda.` before their names",
    "watch_activate": 'set it in snapshot_policies, for one model or for "*"',
    "canary_share": 'set it in snapshot_policies, for one model or for "*"',
    "canary_minutes": 'set it in snapshot_policies, for one model or for "*"',
    "freshness_max_s": 'set it in quotas, for one model or for "*"',
    "remote_log_retention_s": "set log_retention_s",
    "kafka_group": "set group.id in the file kafka_config",
    "kafka_rows_registry": "set schema.registry.url in the file kafka_config",
    "batch_delay_us": "set batch_max_items alone: predictions are joined while they wait for a thread, and no longer",
    "block_cache": _CONSTANT,
    "remote_prepare_s": _CONSTANT,
    "kafka_window": _CONSTANT,
    "hot_keys_every_s": _CONSTANT,
    "audit_size": _CONSTANT,
    "dense_buffers": _CONSTANT,
}


def described_settings() -> list[tuple[str, str, str]]:
    """(name, default, description) of every setting, in words."""
    return [(name, _default(name), field.description or "") for name, field in Settings.model_fields.items()]


def _default(name: str) -> str:
    default = Settings.model_fields[name].default
    if name in _SHOWN_DEFAULTS:
        return _SHOWN_DEFAULTS[name]
    if isinstance(default, ByteSize):
        return default.human_readable(separator="").replace(".0", "") if default else "0"
    if default is None:
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def load_settings(config: str | Path | None = None, **overrides: Any) -> Settings:
    """Read the settings. `overrides` that are None are ignored.

    Source order, the last wins: defaults, `config` (default `./tierstore.toml` if it is there), the
    environment, `overrides`. Raises ConfigError naming the setting.
    """
    names = Settings.model_fields.keys()
    path = Path(config) if config is not None else Path(CONFIG_FILE)
    values: dict[str, Any] = {}
    if config is not None or path.is_file():
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read settings from {path}: {error}") from error
        _refuse_unknown(values.keys() - names, str(path))
    env = environment()
    arguments = {name: value for name, value in overrides.items() if value is not None}
    _refuse_unknown(arguments.keys() - names, "the arguments")
    set_in_env = {name for name, value in env.items() if value}
    try:
        settings = Settings(**{**{k: v for k, v in values.items() if k not in set_in_env}, **arguments})
    except ValidationError as error:
        raise ConfigError(f"bad setting: {'; '.join(map(_shown, error.errors()))}") from error
    unknown = env.keys() - names - CLIENT_ENV
    if settings.strict_environment:
        _refuse_unknown(unknown, "the environment", ENV_PREFIX)
    for name in sorted(unknown - _warned):
        _warned.add(name)
        log.warning("%s sets nothing in this release", _with_nearest(name, ENV_PREFIX))
    return settings


def _shown(problem: ErrorDetails) -> str:
    name = ".".join(map(str, problem["loc"])) or "settings"
    if problem["type"] in ("byte_size", "byte_size_unit"):
        return f"{name}: expected a size such as 512MiB, 4GiB, 10GB or a number of bytes, got {problem['input']!r}"
    return f"{name}: {problem['msg']}"


def _with_nearest(name: str, prefix: str) -> str:
    """An unknown name, and what has replaced it, or the setting that it is most like, if there is one."""

    def shown(name: str) -> str:
        return prefix + name.upper() if prefix else name

    if name in _REPLACED:
        return f"{shown(name)} ({_REPLACED[name]})"
    near = difflib.get_close_matches(name, Settings.model_fields, n=1, cutoff=0.75)
    return shown(name) + (f" (did you mean {shown(near[0])}?)" if near else "")


def _refuse_unknown(names: set[str], where: str, prefix: str = "") -> None:
    if names:
        shown = ", ".join(_with_nearest(name, prefix) for name in sorted(names))
        raise ConfigError(f"unknown setting in {where}: {shown}; `tierstore serve --help` lists all settings")
