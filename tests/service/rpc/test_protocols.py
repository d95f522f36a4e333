"""The gRPC protocols as they are shipped: made of their sources, and those that the world's clients speak."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf", reason="grpcio is not installed")
from google.protobuf import descriptor_pb2

from tierstore.service.rpc.protobuf import FILE, POOL, message_class, service_descriptor

ROOT = Path(__file__).parents[3]


def test_what_is_shipped_is_made_of_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("make_protocols")
    monkeypatch.delitem(sys.modules, "make_protocols")
    shipped = (ROOT / "tierstore/service/rpc" / FILE).read_bytes()
    parse = descriptor_pb2.FileDescriptorSet.FromString
    assert parse(tool.compiled()) == parse(shipped), "run tools/make_protocols.py"


def fields_of(descriptor: Any) -> dict[str, tuple[Any, ...]]:
    def kind(field: Any) -> str:
        named = field.message_type or field.enum_type
        return named.full_name if named else str(field.type)

    return {field.name: (field.number, kind(field), field.is_repeated) for field in descriptor.fields}


def messages_below(descriptors: Any) -> dict[str, Any]:
    found = {}
    for descriptor in descriptors:
        found[descriptor.full_name] = descriptor
        found |= messages_below(descriptor.nested_types)
    return found


def test_open_inference_is_field_for_field_that_of_tritonclient() -> None:
    theirs = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    files = (theirs.service_pb2.DESCRIPTOR, theirs.model_config_pb2.DESCRIPTOR)
    expected = messages_below([each for file in files for each in file.message_types_by_name.values()])
    for name, descriptor in expected.items():
        try:
            ours = fields_of(POOL.FindMessageTypeByName(name))
        except KeyError:
            assert descriptor.file is files[1], f"{name}: only of the configuration are messages left out"
            continue
        theirs_of = fields_of(descriptor)
        if descriptor.file is files[0]:
            assert ours == theirs_of
        else:
            assert ours.items() <= theirs_of.items()
    (expected_service,) = files[0].services_by_name.values()
    rpcs = {
        method.name: (method.input_type.full_name, method.output_type.full_name, method.client_streaming)
        for method in expected_service.methods
    }
    assert rpcs == {
        method.name: (method.input_type.full_name, method.output_type.full_name, method.client_streaming)
        for method in service_descriptor("inference.GRPCInferenceService").methods
    }


def test_messages_of_two_pools_live_in_one_process() -> None:
    theirs = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    request = theirs.service_pb2.ModelInferRequest(model_name="ctr", raw_input_contents=[b"12345678"])
    ours = message_class("inference.ModelInferRequest").FromString(request.SerializeToString())
    assert ours.model_name == "ctr"
    assert list(ours.raw_input_contents) == [b"12345678"]


def test_a_signature_travels_in_a_metadata_answer() -> None:
    signatures = message_class("tensorflow.serving.SignatureDefMap")()
    signatures.signature_def["serving_default"].inputs["item_id"].dtype = 9
    answer = message_class("tensorflow.serving.GetModelMetadataResponse")()
    answer.metadata["signature_def"].Pack(signatures)
    again = message_class("tensorflow.serving.GetModelMetadataResponse").FromString(answer.SerializeToString())
    packed = again.metadata["signature_def"]
    assert packed.type_url == "type.googleapis.com/tensorflow.serving.SignatureDefMap"
    unpacked = message_class("tensorflow.serving.SignatureDefMap")()
    assert packed.Unpack(unpacked)
    assert unpacked.signature_def["serving_default"].inputs["item_id"].dtype == 9


def test_a_version_may_be_a_number_or_a_label() -> None:
    spec = message_class("tensorflow.serving.ModelSpec")(name="ctr", version_label="stable")
    spec.version.value = 7
    assert spec.WhichOneof("version_choice") == "version"
