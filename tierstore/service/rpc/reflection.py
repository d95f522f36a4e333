"""Reflection: gRPC's own tools get the services' messages from the server (`grpc.reflection.v1`, and `v1alpha`).

It knows the descriptors of `protobuf.POOL`. An answer takes microseconds, so the event loop makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tierstore.service.rpc.messages import CODES, WireMessage
from tierstore.service.rpc.methods import STANDARD, MessageStream, Servicer, Streamed, parse_message
from tierstore.service.rpc.protobuf import POOL, message_class

METHOD = "ServerReflectionInfo"
RELEASES = ("grpc.reflection.v1", "grpc.reflection.v1alpha")  # with the same messages


def reflection_of(services: Sequence[str]) -> list[Servicer]:
    """Reflection of `services` and itself."""
    names = sorted([*services, *(f"{release}.ServerReflection" for release in RELEASES)])
    return [
        Servicer(f"{release}.ServerReflection", STANDARD, streams={METHOD: _method(_answers_of(release, names))})
        for release in RELEASES
    ]


def _method(answer_to: Callable[[bytes], bytes]) -> Streamed:
    def serve(message: WireMessage, flow: MessageStream) -> None:
        flow.send(answer_to(message.short()))
        flow.done()

    return serve


def _answers_of(release: str, names: Sequence[str]) -> Callable[[bytes], bytes]:
    """The function that answers requests about the services `names`, in the messages of a release."""
    request_kind, answer_kind = (message_class(f"{release}.ServerReflection{kind}") for kind in ("Request", "Response"))

    def answer_to(message: bytes) -> bytes:
        request = parse_message(request_kind, message)
        answer = answer_kind(valid_host=request.host, original_request=request)
        try:
            _fill(answer, request, names)
        except KeyError as error:
            answer.error_response.error_code = CODES["NOT_FOUND"]
            answer.error_response.error_message = str(error.args[0])[:200]
        serialized: bytes = answer.SerializeToString()
        return serialized

    return answer_to


def _fill(answer: Any, request: Any, names: Sequence[str]) -> None:
    """Fill in an answer. KeyError for unknown names."""
    match request.WhichOneof("message_request"):
        case "list_services":
            for name in names:
                answer.list_services_response.service.add(name=name)
        case "file_by_filename":
            _add_files(answer, POOL.FindFileByName(request.file_by_filename))
        case "file_containing_symbol":
            _add_files(answer, POOL.FindFileContainingSymbol(request.file_containing_symbol))
        case "file_containing_extension":
            _add_files(answer, _extension(request.file_containing_extension).file)
        case "all_extension_numbers_of_type":
            kind = POOL.FindMessageTypeByName(request.all_extension_numbers_of_type)
            found = answer.all_extension_numbers_response
            found.base_type_name = kind.full_name
            found.extension_number.extend(extension.number for extension in POOL.FindAllExtensions(kind))
        case _:
            answer.error_response.error_code = CODES["INVALID_ARGUMENT"]
            answer.error_response.error_message = "expected a message_request"


def _extension(wanted: Any) -> Any:
    return POOL.FindExtensionByNumber(POOL.FindMessageTypeByName(wanted.containing_type), wanted.extension_number)


def _add_files(answer: Any, file: Any) -> None:
    """Add a file, and the files that it imports."""
    files: dict[str, bytes] = {}
    ahead = [file]
    while ahead:
        each = ahead.pop()
        if each.name not in files:
            files[each.name] = each.serialized_pb
            ahead += each.dependencies
    answer.file_descriptor_response.file_descriptor_proto.extend(files.values())
