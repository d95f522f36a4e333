"""Message classes of the gRPC protocols, in a pool of their own.

Loaded when this module is imported, constant after; any thread. The descriptors are `protocols.binpb`, which
`tools/make_protocols.py` makes of `schema/grpc/*.proto`. In a pool of our own they collide with no other copy in the
same process (a client's, TensorFlow's), and without generated code they depend on no particular release of protobuf.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2

FILE = "protocols.binpb"


def _load() -> Any:
    pool = descriptor_pool.DescriptorPool()
    for known in (any_pb2, wrappers_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    shipped = descriptor_pb2.FileDescriptorSet.FromString(files(__package__).joinpath(FILE).read_bytes())
    for file in shipped.file:  # each stands behind those that it imports
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _load()


def message(name: str) -> Any:
    """The class of a message, by its full name: `message("inference.ModelInferRequest")`."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


def service(name: str) -> Any:
    """The descriptor of a service, by its full name."""
    return POOL.FindServiceByName(name)
