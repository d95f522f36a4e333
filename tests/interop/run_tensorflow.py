"""Asks with TensorFlow Serving's own stubs (`tensorflow-serving-api`), unchanged. Run in an environment that has them."""

from __future__ import annotations

import exchange
import grpc
import tensorflow as tf
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)


def request_of(case: exchange.Case, *, values: bool) -> predict_pb2.PredictRequest:
    """`values`: tensors as typed values in place of content."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name = case.model
    if isinstance(case.version, int):
        request.model_spec.version.value = case.version
    elif case.version is not None:
        request.model_spec.version_label = case.version
    for name, array in case.inputs.items():
        tensor = tf.make_tensor_proto(array)
        if values and tensor.tensor_content:
            tensor.tensor_content = b""
            field = {"INT64": "int64_val", "UINT64": "uint64_val", "FP32": "float_val"}[case.datatypes[name]]
            getattr(tensor, field).extend(array.reshape(-1).tolist())
        request.inputs[name].CopyFrom(tensor)
    if case.outputs is not None:
        request.output_filter.extend(case.outputs)
        if "FP16" in case.outputs.values():
            request.model_spec.signature_name = "lookup_float16"
    return request


def answer_all(job: exchange.Job) -> dict[str, dict[str, exchange.Answer]]:
    answers: dict[str, dict[str, exchange.Answer]] = {"tensorflow": {}, "tensorflow_values": {}}
    with grpc.insecure_channel(job.grpc) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        for case in job.cases:
            for client, of in answers.items():
                try:
                    answer = stub.Predict(request_of(case, values=client == "tensorflow_values"), timeout=30)
                except grpc.RpcError as error:
                    of[case.name] = error.details()
                    continue
                of[case.name] = {name: tf.make_ndarray(tensor) for name, tensor in answer.outputs.items()}
        model = job.cases[0].model
        status = get_model_status_pb2.GetModelStatusRequest()
        status.model_spec.name = model
        versions = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus(status, timeout=30)
        states = {
            str(entry.version): tf.constant(entry.state).numpy().reshape(1) for entry in versions.model_version_status
        }
        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
        request.model_spec.name = model
        signatures = get_model_metadata_pb2.SignatureDefMap()
        assert stub.GetModelMetadata(request, timeout=30).metadata["signature_def"].Unpack(signatures)
        inputs = signatures.signature_def["serving_default"].inputs
        dtypes = {name: tf.constant(info.dtype).numpy().reshape(1) for name, info in inputs.items()}
    answers["tensorflow_about"] = {"status": states, "inputs": dtypes}
    return answers


if __name__ == "__main__":
    exchange.run(answer_all)
