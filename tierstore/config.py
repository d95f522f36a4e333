"""Settings: defaults, then `tierstore.toml`, then `TIERSTORE_…` environment variables, then keywords or flags.

Constant once made; any thread may read them. An unknown name, from whichever source, is an error.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from tierstore.errors import ConfigError
from tierstore.logs import LogFormat, LogLevel
from tierstore.types import BaseKind

CONFIG_FILE = "tierstore.toml"
ENV_PREFIX = "TIERSTORE_"
CLIENT_ENV = frozenset({"token", "url"})  # what the command line reads for itself when it talks to a service
# What Kubernetes puts into the environment of every container for a service named `tierstore` or `tierstore-…`
_SERVICE_LINK = re.compile(
    r"(?:.+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_.+)?|PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_LINKED_PORT = re.compile(r"(?:tcp|udp|sctp)://", re.IGNORECASE)


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


def _default_host_budget() -> ByteSize:
    half_of_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return ByteSize(min(4 << 30, half_of_memory))


def environment() -> dict[str, str]:
    """What the environment sets: `TIERSTORE_NAME` by its name in lower case. Kubernetes' service links set nothing."""
    given = {n[len(ENV_PREFIX) :]: value for n, value in os.environ.items() if n.upper().startswith(ENV_PREFIX)}
    return {
        name.lower(): value
        for name, value in given.items()
        if not (_SERVICE_LINK.fullmatch(name) or (name.endswith("PORT") and _LINKED_PORT.match(value)))
    }


def _split_paths(value: object) -> object:
    return [part for part in value.split(os.pathsep) if part] if isinstance(value, str) else value


Size = Annotated[ByteSize, Field(gt=0)]


class Settings(BaseSettings):
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

    data: Path = Field(Path("data"), description="the data directory")
    # memory
    host_budget: Size = Field(
        default_factory=_default_host_budget,
        description="bytes of CPU memory for cached rows, keys and bookkeeping, all models together",
    )
    device_budget: ByteSize = Field(
        ByteSize(0),
        ge=0,
        description="bytes of memory of each GPU for cached rows, keys, bookkeeping and staging, all models together; 0 for no device tier (extra `gpu`)",
    )
    device_layout: Literal["replica", "shard"] = Field(
        "replica", description="with several GPUs: the hottest rows on each (`replica`), or each key on one (`shard`)"
    )
    overlay_budget: Size = Field(
        ByteSize(256 << 20),
        description="bytes of deltas that are visible but not folded yet; beyond it producers get 429",
    )
    block_cache: Size = Field(
        ByteSize(32 << 20), description="RocksDB's block cache an open version (index blocks, mostly)"
    )
    base: BaseKind = Field(
        "sealed",
        description="what holds the rows of versions that are loaded from now on: files of our own (`sealed`), or RocksDB alone (`rocksdb`)",
    )
    load_memory: Size = Field(
        ByteSize(512 << 20), description="bytes a bulk load may hold before it spills to disk, all its helpers together"
    )
    load_retention_s: float = Field(
        86400.0,
        ge=0,
        description="seconds that what a broken-off load has finished is kept, for one of the same snapshot to go on from; 0: not at all",
    )
    load_p99_ratio: float = Field(
        1.3,
        ge=0,
        description="beside a load, verification or warming, how many times their quiet p99 look-ups may take: such work slows down until they do not; 0: never",
    )
    # after a start
    warm_rate: int = Field(
        200_000,
        gt=0,
        description="rows a second, at most, that are read into memory after a start, beside requests, all models together",
    )
    ready_warm_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of those rows that must be in memory before the service reports ready; it answers from the start",
    )
    hot_keys_every_s: float = Field(
        600.0, ge=0, description="seconds between two savings of the keys that are hot; 0: only at a clean end"
    )
    # threads and processes
    threads: int = Field(
        default_factory=cores,
        ge=1,
        description="reactor threads, which answer look-ups over HTTP whose rows are in memory",
    )
    lookup_threads: int = Field(
        default_factory=lambda: max(2, cores()), ge=1, description="threads that run look-ups of the service"
    )
    lookup_queue: int = Field(1024, ge=1, description="look-ups that may wait for a thread; beyond it clients get 503")
    max_queue_s: float = Field(
        2.0, gt=0, description="seconds that a look-up may wait for a thread; one that has waited longer gets 503"
    )
    max_connections: int = Field(
        2048,
        ge=1,
        description="HTTP connections; requests on further ones get 503. At most half of the files that the service may open",
    )
    idle_timeout_s: float = Field(
        75.0,
        gt=0,
        description="seconds that an HTTP connection without a request is kept; more than a load balancer's own",
    )
    arrival_timeout_s: float = Field(
        60.0, gt=0, description="seconds that a small HTTP request may take to arrive, from its first byte to its last"
    )
    batch_max_items: int = Field(
        0,
        ge=0,
        description="items (rows of the batch dimension) that concurrent small predict requests over HTTP are joined to; 0 joins none",
    )
    batch_delay_us: int = Field(
        0,
        ge=0,
        description="microseconds that a predict request waits for others to join; 0: while it waits for a thread",
    )
    disk_threads: int = Field(8, ge=1, description="threads that read misses from disk, all models together")
    load_workers: int = Field(
        default_factory=lambda: min(4, cores()), ge=1, description="helper processes of a bulk load"
    )
    # the dense part (extra `dense`)
    dense_intra_threads: int = Field(
        1, ge=1, description="threads of one run of a dense part; look-up threads run several at once anyway"
    )
    dense_inter_threads: int = Field(1, ge=1, description="branches of a dense part's graph that run at once")
    dense_affinity: str | None = Field(
        None,
        description="processors that the threads of a run are bound to, but for its first: ONNX Runtime's form, such as `2;3` (it counts from 1)",
    )
    dense_spinning: bool = Field(False, description="let the threads of a run spin while they wait for work")
    dense_graph_optimization: Literal["off", "basic", "extended", "all"] = Field(
        "all", description="how far ONNX Runtime rewrites a dense part when it is loaded"
    )
    dense_arena: bool = Field(True, description="let ONNX Runtime keep memory between runs")
    dense_buffers: Size = Field(
        ByteSize(64 << 20), description="bytes of row buffers that a dense part keeps for reuse"
    )
    dense_provider: Literal["cpu", "cuda"] = Field(
        "cpu", description="what dense parts run on; `cuda` needs the extra `dense-gpu` in place of `dense`"
    )
    dense_device: int = Field(0, ge=0, description="with dense_provider `cuda`: the number of the GPU")
    dense_device_memory: Size = Field(
        ByteSize(2 << 30), description="bytes of a GPU's memory that each dense part's session may keep for its tensors"
    )
    dense_provider_options: dict[str, str] = Field(
        default_factory=dict, description="further options of ONNX Runtime's CUDA provider"
    )
    dense_options: dict[str, str] = Field(
        default_factory=dict, description="further entries of ONNX Runtime's session configuration"
    )
    # versions and deltas
    keep_versions: int = Field(1, ge=0, description="versions kept beside the active one for rollback")
    fold_grace_s: float = Field(
        0.05, ge=0, description="seconds a delta stays in its overlay at least, so that small ones fold together"
    )
    log_retention_s: float = Field(
        3 * 86400.0,
        ge=0,
        description="seconds a folded delta stays in the log at least, for snapshots that begin before it",
    )
    # service
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 picks a free one")
    grpc_port: Annotated[int, Field(ge=0, le=65535)] | Literal["off"] | None = Field(
        None,
        description="gRPC port (extra `grpc`); 0 picks a free one, `off` serves none; default: 8001 where the extra is installed, a free one if port is 0",
    )
    source_root: Annotated[list[Path], NoDecode, BeforeValidator(_split_paths)] = Field(
        default_factory=lambda: [Path.cwd()],
        description="snapshots are read only from under these; separated by ':' in the environment",
    )
    allow_client_shm: bool = Field(
        False, description="serve OIP's shared memory extensions: system, and CUDA where there is a GPU"
    )
    allow_open_network: bool = Field(
        False, description="listen beyond loopback without tokens: anyone who reaches the port may change models"
    )
    max_request: Size = Field(ByteSize(64 << 20), description="largest body of a look-up")
    max_response: Size = Field(
        ByteSize(256 << 20), description="largest answer of a look-up, the rows before they are pooled included"
    )
    max_inflight: Size = Field(
        ByteSize(1 << 30), description="bytes that look-ups in progress may hold together; beyond it clients get 503"
    )
    max_delta: Size = Field(ByteSize(256 << 20), description="largest body of a delta")
    watch: Path | None = Field(None, description="directory of <model>/<seq>.arrow files to apply as they appear")
    log_format: LogFormat = Field(
        "text", description="the log on standard error: lines of `text`, or `json`, an object a line"
    )
    log_level: LogLevel = Field(
        "info", description="what is logged: `debug`, `info`, `warning` or `error`, and what is worse"
    )
    access_log: bool = Field(
        False, description="log each request that Python answers; look-ups that reactors answer are not among them"
    )
    slow_request_ms: float = Field(
        0.0, ge=0, description="log requests that take so many milliseconds, but for those of reactors; 0: none"
    )
    drain_s: float = Field(5.0, ge=0, description="seconds to go on serving after a stop signal, reported as not ready")


_SHOWN_DEFAULTS = {  # of those that depend on the machine
    "host_budget": "4GiB, at most half of the memory",
    "threads": "as many as processors",
    "lookup_threads": "as many as processors, at least 2",
    "load_workers": "as many as processors, at most 4",
    "source_root": "the working directory",
    "dense_provider_options": "none",
    "dense_options": "none",
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
    """Read the settings. `overrides` that are None count as not given.

    Source order, the last wins: defaults, `config` (default `./tierstore.toml` if it is there), the
    environment, `overrides`. Raises ConfigError naming the setting.
    """
    known = Settings.model_fields.keys()
    path = Path(config) if config is not None else Path(CONFIG_FILE)
    values: dict[str, Any] = {}
    if config is not None or path.is_file():
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read settings from {path}: {error}") from error
        _refuse_unknown(values.keys() - known, str(path))
    env = environment()
    _refuse_unknown(env.keys() - known - CLIENT_ENV, "the environment", ENV_PREFIX)
    given = {name: value for name, value in overrides.items() if value is not None}
    _refuse_unknown(given.keys() - known, "the arguments")
    set_in_env = {name for name, value in env.items() if value}
    try:
        return Settings(**{**{k: v for k, v in values.items() if k not in set_in_env}, **given})
    except ValidationError as error:
        raise ConfigError(f"bad setting: {'; '.join(map(_shown, error.errors()))}") from error


def _shown(problem: ErrorDetails) -> str:
    name = ".".join(map(str, problem["loc"])) or "settings"
    if problem["type"] in ("byte_size", "byte_size_unit"):
        return f"{name}: expected a size such as 512MiB, 4GiB, 10GB or a number of bytes, came {problem['input']!r}"
    return f"{name}: {problem['msg']}"


def _refuse_unknown(names: set[str], where: str, prefix: str = "") -> None:
    if names:
        shown = ", ".join(sorted(prefix + name.upper() if prefix else name for name in names))
        raise ConfigError(f"unknown setting in {where}: {shown}; `tierstore serve --help` lists the known ones")
