"""A bucket of an object storage, S3's, Google's or Azure's: lists, ranges of objects, uploads, removals.

The library is obstore (extras `s3`, `gs`, `az`). Credentials, region and endpoint come from the environment, or from
where the machine has them (instance role, workload identity); of S3 also from the profiles that boto3 knows. A request
is tried once: how often, and for how long, is said in `patience.py` alone.

Any thread may use a `Bucket`. Its calls release the interpreter.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tierstore.errors import MissingExtra, SnapshotError, StorageError

EXTRAS = {"s3": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}  # of each scheme
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://([^/]*)/*(.*)", re.DOTALL)  # scheme, bucket, name

_CONNECT_S, _SILENT_S = 5.0, 30.0  # until a connection is there, and without a byte of an answer
_READ_S = 300.0  # a list or a range, to its end
_SEND_S = 120.0  # a part of an upload, from its first byte to the answer
_PROFILE_S = 300.0  # credentials of a profile are asked for again; boto3 renews them ten minutes before their end
_PART_BYTES = 8 << 20
_AT_ONCE = 4  # parts of one file
_TRIES = 5  # of one part: a file is begun again where they all fail


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """`revision` differs between two contents of one name: the ETag, or when it was written."""

    size: int
    revision: str


class Bucket:
    """What holds the objects below `url`; `key` is the name of that place in it.

    Names of objects are those in the bucket.

    Errors: FileNotFoundError and PermissionError where the storage says so, SnapshotError for what the library cannot
    name or reach with this configuration, and OSError for what is worth another try.
    """

    def __init__(self, url: str, *, sends: bool = False) -> None:
        """MissingExtra where the library is not installed.

        With `sends` for uploads: a request takes the time of a large part.
        """
        match = URL.match(url)
        assert match is not None
        self._url = url
        scheme, bucket, self.key = match[1].lower(), match[2], match[3].rstrip("/")
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            extra = EXTRAS[scheme]
            raise MissingExtra(
                f"{url}: the extra `{extra}` is not installed: pip install 'tierstore[{extra}]'"
            ) from error
        self._library = obstore
        with self._translated():
            self._store = from_url(
                f"{'gs' if scheme == 'gcs' else scheme}://{bucket}",
                client_options={
                    "allow_http": True,  # where the endpoint that somebody named says so
                    "connect_timeout": timedelta(seconds=_CONNECT_S),
                    **(
                        {"timeout": timedelta(seconds=_SEND_S)}
                        if sends
                        else {"timeout": timedelta(seconds=_READ_S), "read_timeout": timedelta(seconds=_SILENT_S)}
                    ),
                },
                retry_config={"max_retries": _TRIES - 1 if sends else 0},
                **(_of_s3() if scheme == "s3" else {}),
            )

    def key_of(self, name: str) -> str:
        """The name in the bucket of what is called `name` below `url`."""
        return f"{self.key}/{name}" if self.key else name

    def find(self) -> dict[str, ObjectInfo]:
        """All objects below `url`, listed now, by their names relative to it."""
        with self._translated():
            found = {one["path"]: one for page in self._library.list(self._store, self.key or None) for one in page}
        return _files(found, self.key)

    def entries(self) -> tuple[list[str], dict[str, ObjectInfo]]:
        """(names of folders, objects by name) right below `url`, listed now."""
        with self._translated():
            found = self._library.list_with_delimiter(self._store, self.key or None)
        folders = [name.rstrip("/").rpartition("/")[2] for name in found["common_prefixes"]]
        files = _files({one["path"]: one for one in found["objects"]}, self.key)
        return folders, {name: info for name, info in files.items() if name not in folders}

    def size(self, name: str) -> int:
        """Bytes of an object. FileNotFoundError."""
        with self._translated():
            return int(self._library.head(self._store, name)["size"])

    def exists(self, name: str) -> bool:
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str, begin: int, end: int) -> Any:
        """Bytes [begin, end) of an object, as a buffer. Fewer where it ends before."""
        with self._translated():
            return self._library.get_range(self._store, name, start=begin, end=end)

    def written(self, begins: str) -> dict[str, datetime]:
        """When objects right below `url` whose names begin so were written, by the storage's clock, listed now."""
        with self._translated():
            found = self._library.list_with_delimiter(self._store, self.key or None)["objects"]
        names = ((one["path"].rpartition("/")[2], one["last_modified"]) for one in found)
        return {name: written for name, written in names if name.startswith(begins)}

    def send(self, name: str, file: Path | bytes) -> None:
        """Upload a file, or what it is to have, in parts where it is large: 32 MiB of memory.

        The object is there whole or not at all.
        """
        with self._translated():
            self._library.put(self._store, name, file, chunk_size=_PART_BYTES, max_concurrency=_AT_ONCE)

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError), self._translated():
            self._library.delete(self._store, name)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Errors of the library as those of `Bucket`. Of their texts only what is meant for people."""
        try:
            yield
        except (SnapshotError, StorageError, MissingExtra):
            raise
        except Exception as error:
            import obstore.exceptions as of

            text = str(error).partition("\n\nDebug source")[0].strip() or type(error).__name__
            if isinstance(error, FileNotFoundError) or " 404 Not Found" in text:
                raise FileNotFoundError(2, text) from error
            if isinstance(error, (of.PermissionDeniedError, of.UnauthenticatedError)) or " 403 Forbidden" in text:
                raise PermissionError(13, text) from error
            if isinstance(error, (of.InvalidPathError, of.NotSupportedError, of.UnknownConfigurationKeyError)):
                raise SnapshotError(f"{self._url} cannot be read: {text}") from error
            raise OSError(text) from error


def _files(found: Mapping[str, Any], key: str) -> dict[str, ObjectInfo]:
    """The objects by their names below `key`, without the empty ones that some programs leave to stand for a folder."""
    folders = {parent for path in found for parent in _parents(path)}
    return {
        path[len(key) :].lstrip("/"): ObjectInfo(one["size"], str(one["e_tag"] or one["last_modified"]))
        for path, one in found.items()
        if path != key and (one["size"] or path not in folders)
    }


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _of_s3() -> dict[str, Any]:
    """What S3's store is made with; credentials, region and endpoint of a profile where that is asked for."""
    config: dict[str, Any] = {"disable_bulk_delete": True}  # not all who speak the protocol have it
    session = _profile()
    if session is None:
        return {"config": config}
    from obstore.auth.boto3 import Boto3CredentialProvider

    of = session.client("s3").meta
    return {
        "credential_provider": Boto3CredentialProvider(session, ttl=timedelta(seconds=_PROFILE_S)),
        "config": {**config, "endpoint": of.endpoint_url, "region": of.region_name},
    }


def _profile() -> Any:
    """boto3's session, where a profile of AWS is named, or there, and the environment has no
    credentials; None otherwise.
    """
    environment = os.environ
    if environment.get("AWS_ACCESS_KEY_ID") or environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return None
    files = (
        environment.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        environment.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    if "AWS_PROFILE" not in environment and not any(Path(file).expanduser().is_file() for file in files):
        return None
    try:
        import boto3
    except ImportError as error:
        raise MissingExtra("a profile of AWS takes boto3: pip install 'tierstore[s3]'") from error
    session = boto3.Session()
    return session if session.get_credentials() else None
