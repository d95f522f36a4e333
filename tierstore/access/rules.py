"""The access rules: the action that each request needs, one table for HTTP and one for gRPC. Pure functions; any
thread.

Whatever is not in a table takes the role admin, so that a new path or method is closed until somebody has decided.
"""

from __future__ import annotations

from functools import lru_cache

from tierstore.access.roles import Action

# (methods, path) → what it takes. `{model}` is the model that it concerns; `{…}` any one part; `a|b` one of
# these; `{…:path}`, at the end, any number of parts. HEAD goes by GET. The first that fits counts. The data plane
# serves no path that is not here.
HTTP: tuple[tuple[str, str, Action], ...] = (
    ("GET", "/", Action.OPEN),
    ("GET", "/docs", Action.OPEN),
    ("GET", "/openapi.json", Action.OPEN),
    ("GET", "/metrics", Action.METRICS),
    # Open Inference Protocol
    ("GET", "/v2/health/live|ready", Action.OPEN),
    ("GET", "/v2", Action.ANY),
    ("GET", "/v2/models/stats", Action.READ),
    ("GET", "/v2/models/{model}", Action.READ),
    ("GET", "/v2/models/{model}/ready|stats|config", Action.READ),
    ("GET", "/v2/models/{model}/versions/{version}", Action.READ),
    ("GET", "/v2/models/{model}/versions/{version}/ready|stats|config", Action.READ),
    ("POST", "/v2/models/{model}/infer", Action.READ),
    ("POST", "/v2/models/{model}/versions/{version}/infer", Action.READ),
    ("POST", "/v2/repository/index", Action.READ),
    ("POST", "/v2/repository/models/{model}/load|unload", Action.ADMIN),
    ("GET", "/v2/systemsharedmemory|cudasharedmemory/status", Action.ANY),
    ("GET", "/v2/systemsharedmemory|cudasharedmemory/region/{region}/status", Action.ANY),
    ("POST", "/v2/systemsharedmemory|cudasharedmemory/unregister", Action.ANY),
    ("POST", "/v2/systemsharedmemory|cudasharedmemory/region/{region}/register|unregister", Action.ANY),
    ("GET POST", "/v2/logging", Action.ADMIN),
    ("GET POST", "/v2/trace/setting", Action.ADMIN),
    ("GET POST", "/v2/models/{model}/trace/setting", Action.ADMIN),
    # TensorFlow Serving
    ("GET", "/v1/models", Action.ADMIN),
    ("GET POST", "/v1/models/{model}", Action.READ),
    ("GET POST", "/v1/models/{model}/metadata|predict|classify|regress", Action.READ),
    ("GET POST", "/v1/models/{model}/versions|labels/{version}", Action.READ),
    ("GET POST", "/v1/models/{model}/versions|labels/{version}/metadata|predict|classify|regress", Action.READ),
    # nodes in front
    ("GET", "/upstream/models", Action.FRONT),
    ("GET", "/upstream/models/{model}/deltas", Action.FRONT),
    ("GET", "/upstream/models/{model}/versions/{version}", Action.FRONT),
    ("GET", "/upstream/models/{model}/versions/{version}/files/{file:path}", Action.FRONT),
    ("POST", "/upstream/models/{model}/versions/{version}/tables/{table}/rows|explain", Action.FRONT),
    # peers
    ("GET", "/upstream/logs", Action.FRONT),
    ("GET", "/upstream/models/{model}/log", Action.FRONT),
    ("POST", "/upstream/models/{model}/image", Action.FRONT),
    ("GET", "/upstream/models/{model}/image/files/{file}", Action.FRONT),
    # admin
    ("GET", "/admin/models", Action.READ),
    ("GET", "/admin/models/{model}", Action.READ),
    ("GET", "/admin/models/{model}/history", Action.READ),
    ("POST", "/admin/models/{model}/explain", Action.READ),
    ("GET", "/admin/models/{model}/tables/{table}/cache", Action.ADMIN),  # it lists keys
    ("POST", "/admin/models/{model}/deltas", Action.WRITE),
    ("POST", "/admin/models/{model}/snapshots|exports|backups|sample|digests", Action.ADMIN),
    ("GET", "/admin/models/{model}/uploads", Action.ADMIN),
    ("PUT GET DELETE", "/admin/models/{model}/uploads/{upload}", Action.ADMIN),
    ("PUT", "/admin/models/{model}/uploads/{upload}/files/{number}", Action.ADMIN),
    ("POST", "/admin/models/{model}/activate|rollback|canary|promote|withdraw", Action.ADMIN),
    ("DELETE", "/admin/models/{model}/versions/{version}", Action.ADMIN),
    ("PUT DELETE", "/admin/models/{model}/labels/{label}", Action.ADMIN),
    ("GET", "/admin/jobs", Action.ADMIN),
    ("GET DELETE", "/admin/jobs/{job}", Action.ADMIN),  # of which model it is says the job: service/admin/routes.py
    ("POST", "/admin/jobs/{job}/acknowledge", Action.ADMIN),
    ("POST", "/admin/log-level", Action.ADMIN),
    ("GET", "/admin/parked", Action.ADMIN),
    ("GET", "/admin/parked/{name}", Action.ADMIN),
    ("GET", "/admin/parked/{name}/payload", Action.ADMIN),
    ("POST", "/admin/parked/{name}/retry|skip", Action.ADMIN),
)

# the full name of a method → what it takes
GRPC: dict[str, Action] = {
    **{
        f"/inference.GRPCInferenceService/{name}": action
        for action, names in {
            Action.OPEN: ("ServerLive", "ServerReady"),
            Action.ANY: (
                "ServerMetadata",
                "SystemSharedMemoryStatus",
                "SystemSharedMemoryRegister",
                "SystemSharedMemoryUnregister",
                "CudaSharedMemoryStatus",
                "CudaSharedMemoryRegister",
                "CudaSharedMemoryUnregister",
            ),
            Action.READ: (
                "ModelReady",
                "ModelMetadata",
                "ModelInfer",
                "ModelStreamInfer",
                "ModelConfig",
                "ModelStatistics",
                "RepositoryIndex",
            ),
            Action.ADMIN: ("RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"),
        }.items()
        for name in names
    },
    **{
        f"/tensorflow.serving.PredictionService/{name}": Action.READ
        for name in ("Predict", "GetModelMetadata", "Classify", "Regress", "MultiInference")
    },
    "/tensorflow.serving.ModelService/GetModelStatus": Action.READ,
    "/tensorflow.serving.ModelService/HandleReloadConfigRequest": Action.ADMIN,
    "/grpc.health.v1.Health/Check": Action.OPEN,
    "/grpc.health.v1.Health/Watch": Action.OPEN,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Action.ANY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Action.ANY,
}

_REMAINDER = ":path}"
_LONGEST_CACHED = 512  # characters of a path: what is asked for before a token is checked must not take memory for good
_PATTERNS = tuple(
    (frozenset(methods.split()), tuple(tuple(part.split("|")) for part in path.split("/") if part), action)
    for methods, path, action in HTTP
)


def of_http(method: str, path: str) -> tuple[Action, str | None]:
    """(what a request takes, the model that it concerns); `path` is decoded, without the query."""
    return _of_http(method, path) if len(path) <= _LONGEST_CACHED else _of_http.__wrapped__(method, path)


@lru_cache(1024)
def _of_http(method: str, path: str) -> tuple[Action, str | None]:
    method, parts = "GET" if method == "HEAD" else method, _parts(path)
    for methods, pattern, action in _PATTERNS:
        if method in methods and (found := _match(pattern, parts)) is not None:
            return action, found or None
    return Action.ADMIN, None


def is_listed(path: str) -> bool:
    """Whether the table has `path`, by whichever method."""
    return _is_listed(path) if len(path) <= _LONGEST_CACHED else _is_listed.__wrapped__(path)


@lru_cache(1024)
def _is_listed(path: str) -> bool:
    parts = _parts(path)
    return any(_match(pattern, parts) is not None for _, pattern, _ in _PATTERNS)


def of_grpc(method: str) -> Action:
    """What a method takes; the model that it concerns is in its message."""
    return GRPC.get(method, Action.ADMIN)


def _parts(path: str) -> list[str]:
    if path[:4].lower() == "/v1/":
        path = path.replace(":", "/")  # TensorFlow Serving's verbs stand behind a colon
    return [part for part in path.split("/") if part]


def _match(pattern: tuple[tuple[str, ...], ...], parts: list[str]) -> str | None:
    """The model that parts of a path name, empty where the pattern names none; None where they do not fit it."""
    open_ended = bool(pattern) and pattern[-1][0].endswith(_REMAINDER)
    if len(parts) < len(pattern) or (len(parts) > len(pattern) and not open_ended):
        return None
    model = ""
    for wanted, part in zip(pattern, parts, strict=False):
        if wanted == ("{model}",):
            model = part
        elif not wanted[0].startswith("{") and part.lower() not in wanted:
            return None
    return model
