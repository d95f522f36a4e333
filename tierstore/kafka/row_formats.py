"""Encodings of a row or a key in a message: JSON, Avro or Protobuf, in Confluent's wire format or without it.

Confluent's wire format is a zero byte, the schema's id (4 bytes, big-endian), for Protobuf the place of the message
type in its file, and then the content (docs.confluent.io, "Wire format"). One thread.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from tierstore.errors import ConfigError, DeltaError, MissingExtra
from tierstore.kafka.client import MISSING
from tierstore.kafka.envelopes import MARKS
from tierstore.kafka.registry import PROPERTIES, Registry

Decode = Callable[[bytes], Any]  # the content of a message → an object or a single value; DeltaError

_MAGIC = b"\0"
_HEAD = 5  # bytes: the magic one and the id
_OF_GOOGLE = "google/protobuf/"
_MOST_PARTS, _DEEPEST = 10_000, 64  # of an Avro schema, each as often as it is named
_LEAST_BYTES = {"null": 0, "float": 4, "double": 8}  # of Avro's types that take other than at least one


def json_decoder(data: bytes) -> Any:
    """A JSON document, with or without the wire format before it: no document begins with a zero byte."""
    try:
        return orjson.loads(data[_HEAD:] if data[:1] == _MAGIC else data)
    except orjson.JSONDecodeError as error:
        raise DeltaError(f"expected JSON: {error}") from error


def text_decoder(data: bytes) -> str:
    """UTF-8 text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DeltaError("expected UTF-8 text") from None


def int64_decoder(data: bytes) -> int:
    """8 bytes, big-endian, as Kafka's LongSerializer writes them."""
    if len(data) != 8:
        raise DeltaError(f"expected a number of 8 bytes, got {len(data)} bytes")
    return int.from_bytes(data, "big", signed=True)


class Framed:
    """Contents in Confluent's wire format, each by the decoder of its schema's id, which `make` makes once."""

    def __init__(self, make: Callable[[int], Decode]) -> None:
        self._make = make
        self._decoders: dict[int, Decode] = {}

    def __call__(self, data: bytes) -> Any:
        if len(data) < _HEAD or data[:1] != _MAGIC:
            raise DeltaError(f"expected Confluent's wire format, a zero byte and a schema id, got {data[:8].hex()}")
        number = int.from_bytes(data[1:_HEAD], "big")
        decode = self._decoders.get(number)
        if decode is None:
            decode = self._decoders[number] = self._make(number)
        return decode(data[_HEAD:])


def avro_decoder(schema: str, references: Iterable[str] = ()) -> Decode:
    """Avro's binary encoding by a schema in JSON. DeltaError for a schema that is none."""
    try:
        import fastavro
    except ImportError as error:
        raise MissingExtra(f"fastavro: {MISSING}") from error
    try:
        named: dict[str, Any] = {}
        for text in references:
            fastavro.parse_schema(json.loads(text), named)
        parsed = fastavro.parse_schema(json.loads(schema), named)
        _Sizes(named).least(parsed)
    except Exception as error:
        raise DeltaError(f"the Avro schema cannot be used: {error}") from error

    def decode(data: bytes) -> Any:
        stream = io.BytesIO(data)
        try:
            found = fastavro.schemaless_reader(stream, parsed, None)
        except Exception as error:
            raise DeltaError(f"expected Avro: {type(error).__name__}: {error}") from error
        if stream.tell() != len(data):
            raise DeltaError(f"expected Avro of its schema, got {len(data) - stream.tell()} bytes more")
        return found

    return decode


class _Sizes:
    """Checks that what an Avro schema reads is no deeper than the stack, and no larger than memory, however few the
    bytes are: no type contains itself, and what is repeated takes bytes. ValueError.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named, self._parts = named, 0

    def least(self, kind: Any, *, repeated: bool = False, depth: int = 0) -> int:
        """The fewest bytes that a value of a type may have. `repeated`: it may come any number of times."""
        self._parts += 1
        if self._parts > _MOST_PARTS or depth > _DEEPEST:
            raise ValueError(
                f"it contains itself, or it has more than {_MOST_PARTS} parts, or one in more than {_DEEPEST} others"
            )
        if isinstance(kind, str) and kind in self._named:
            kind = self._named[kind]
        name, of = (kind["type"], kind) if isinstance(kind, dict) else (kind, {})
        size = _LEAST_BYTES.get(name, 1) if isinstance(name, str) else 0
        if isinstance(name, dict):
            size = self.least(name, repeated=repeated, depth=depth + 1)
        elif isinstance(name, list):  # a union, which says in a byte which of its types follows
            for inner in name:
                self._beside_a_byte(inner, repeated, depth)
            size = 1
        elif name in ("record", "error"):
            fields = [self.least(field["type"], repeated=repeated, depth=depth + 1) for field in of["fields"]]
            size = sum(fields)
        elif name == "array":
            self.least(of["items"], repeated=True, depth=depth + 1)
        elif name == "map":
            self._beside_a_byte(of["values"], True, depth)
        elif name == "fixed":
            size = of["size"]
        if repeated and size <= 0:
            raise ValueError("an element of a list takes no bytes, so a few bytes could be an endless list")
        return size

    def _beside_a_byte(self, kind: Any, repeated: bool, depth: int) -> None:
        if kind not in ("null", {"type": "null"}):
            self.least(kind, repeated=repeated, depth=depth + 1)


class ProtobufFiles:
    """Message types of a `.proto` file, from descriptors: its dependencies come first, the file itself last."""

    def __init__(self, files: Sequence[descriptor_pb2.FileDescriptorProto]) -> None:
        self._pool, self._file = descriptor_pool.DescriptorPool(), files[-1]
        given = {file.name for file in files}
        try:
            for name in sorted({name for file in files for name in file.dependency} - given):
                self._add_of_google(name)
            for file in files:
                self._pool.Add(file)
        except (TypeError, ImportError) as error:
            raise DeltaError(f"the Protobuf schema cannot be used: {error}") from error

    def _add_of_google(self, name: str) -> None:
        if not name.startswith(_OF_GOOGLE):
            raise DeltaError(f"the Protobuf schema needs {name}, which is not in it (protoc: --include_imports)")
        module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
        self._pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)

    def decoder(self, names: Sequence[str], *, message: str | None = None, path: Sequence[int] = (0,)) -> Decode:
        """A decoder of the message type of that full name, or at that place in the file.

        It gives the fields of these names that it has, and those that mark a row as deleted.
        """
        kind = self._class_of(self._name_at(path) if message is None else message)
        fields = [field for name in names if (field := kind.DESCRIPTOR.fields_by_name.get(name)) is not None]
        if not fields:
            raise DeltaError(f"Protobuf message {kind.DESCRIPTOR.full_name}: it has none of {', '.join(names)}")
        marks = [kind.DESCRIPTOR.fields_by_name.get(name) for name in MARKS if name not in names]
        fields += [field for field in marks if field is not None and field.type in (field.TYPE_STRING, field.TYPE_BOOL)]

        def decode(data: bytes) -> Any:
            try:
                found = kind.FromString(data)
            except DecodeError as error:
                raise DeltaError(f"expected Protobuf: {error}") from error
            given = {}
            for field in fields:
                if not field.has_presence or found.HasField(field.name):
                    value = getattr(found, field.name)
                    given[field.name] = value if isinstance(value, (int, float, str, bytes)) else _plain(value)
            return given

        return decode

    def _name_at(self, path: Sequence[int]) -> str:
        kind, name = self._file.message_type, str(self._file.package)
        try:
            for place in path:
                name = f"{name}.{kind[place].name}" if name else kind[place].name
                kind = kind[place].nested_type
        except IndexError:
            raise DeltaError(f"the Protobuf schema has no message type at {list(path)}") from None
        return name

    def _class_of(self, name: str) -> Any:
        try:
            return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))
        except KeyError:
            raise DeltaError(f"the Protobuf schema has no message type {name!r}") from None


def _plain(value: Any) -> Any:
    """A repeated field as a list, a Timestamp as seconds since 1970."""
    return value.seconds + value.nanos / 1e9 if hasattr(value, "nanos") else list(value)


def _registered_protobuf(registry: Registry, number: int, names: Sequence[str]) -> Decode:
    found = registry.schema(number, "serialized")
    _check_kind(found.kind, "PROTOBUF", number)
    texts = [*found.references.items(), ("", found.text)]
    try:
        files = [descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(text)) for _, text in texts]
    except (ValueError, DecodeError) as error:
        raise DeltaError(f"schema {number}: expected a serialized descriptor: {error}") from error
    for file, (name, _) in zip(files, texts, strict=True):
        file.name = name or file.name or "rows.proto"  # a reference is imported by this name
    of, decoders = ProtobufFiles(files), dict[tuple[int, ...], Decode]()

    def decode(data: bytes) -> Any:
        path, begin = _path(data)
        if path not in decoders:
            decoders[path] = of.decoder(names, path=path)
        return decoders[path](data[begin:])

    return decode


def _path(data: bytes) -> tuple[tuple[int, ...], int]:
    """(the place of a message type in its file, the bytes that say it): a count and numbers,
    zigzag; (0,) is a single zero byte.
    """
    count, at = _varint(data, 0)
    path = []
    for _ in range(min(count, 1 + len(data))):
        place, at = _varint(data, at)
        path.append(place)
    return (tuple(path) or (0,)), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(data) and shift < 63:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            if number & 1:
                break  # negative
            return number >> 1, at
    raise DeltaError("expected the place of a Protobuf message type in its file")


def _check_kind(kind: str, expected: str, number: int) -> None:
    if kind != expected:
        raise DeltaError(f"schema {number}: expected {expected}, as the format of the rows says, got {kind}")


def _registered_avro(registry: Registry, number: int) -> Decode:
    found = registry.schema(number)
    _check_kind(found.kind, "AVRO", number)
    return avro_decoder(found.text, found.references.values())


def _file_decoder(kind: str, path: str, names: Sequence[str]) -> Decode:
    """By a schema in a file: JSON of Avro, or a descriptor set of Protobuf, `FILE#package.Message` for other
    than its first message type.
    """
    file, _, message = path.partition("#")
    try:
        data = Path(file).read_bytes()
        if kind == "avro":
            return avro_decoder(data.decode())
        files = descriptor_pb2.FileDescriptorSet.FromString(data).file
        if not files:
            raise DeltaError("it holds no file")
        return ProtobufFiles(files).decoder(names, message=message or None)
    except (OSError, UnicodeDecodeError, DecodeError, DeltaError) as error:
        raise ConfigError(f"kafka_rows_schema: {file}: {error}") from error


def decoder(kind: str, names: Sequence[str], *, registry: Registry | None, schema: str | None) -> Decode:
    """The decoder of a format: json, text, int64, avro, protobuf, or avro-raw, protobuf-raw without the wire format.

    names: of the fields that are wanted. ConfigError where the format needs a schema and there is none.
    """
    plain: Mapping[str, Decode] = {"json": json_decoder, "text": text_decoder, "int64": int64_decoder}
    if kind in plain:
        return plain[kind]
    base, _, raw = kind.partition("-")
    if schema is not None:
        decode = _file_decoder(base, schema, names)
        if raw:
            return decode
        return Framed(lambda _: decode if base == "avro" else lambda data: decode(data[_path(data)[1] :]))
    if raw or registry is None:
        needed = "kafka_rows_schema" if raw else "schema.registry.url in kafka_config, or kafka_rows_schema"
        raise ConfigError(f"kafka_rows: {kind} needs its schema: set {needed}")
    if base == "avro":
        avro_decoder('"long"')  # MissingExtra now rather than at the first message
        return Framed(lambda number: _registered_avro(registry, number))
    return Framed(lambda number: _registered_protobuf(registry, number, names))


def registry_of(options: Mapping[str, str]) -> Registry | None:
    """The registry that the property `schema.registry.url` names; None where it is not given."""
    given = {name: value for name, value in options.items() if name.startswith(PROPERTIES)}
    address = given.pop(f"{PROPERTIES}url", None)
    return None if address is None else Registry(address, given)
