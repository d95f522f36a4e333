"""tritonclient's two transports behind one set of words, so that a test of what is answered runs over both."""

from __future__ import annotations

from typing import Any

import numpy as np
import tritonclient.http as triton_http

from tierstore.service.server import ServerThread


class HttpWire:
    """tritonclient.http; `binary` says whether a tensor travels behind the JSON or in it."""

    def __init__(self, server: ServerThread) -> None:
        self.client = triton_http.InferenceServerClient(server.url.removeprefix("http://"))

    @staticmethod
    def tensor(name: str, array: np.ndarray, datatype: str, *, binary: bool = True) -> Any:
        given = triton_http.InferInput(name, list(array.shape), datatype)
        given.set_data_from_numpy(array, binary_data=binary)
        return given

    @staticmethod
    def wanted(name: str, *, binary: bool = True, **parameters: Any) -> Any:
        output = triton_http.InferRequestedOutput(name, binary_data=binary)
        output._parameters.update(parameters)  # the client has no argument for parameters of its own
        return output

    @staticmethod
    def answered(answer: Any) -> tuple[str, str, list[str]]:
        """(version, id, names of the outputs)."""
        document = answer.get_response()
        return document["model_version"], document.get("id", ""), [each["name"] for each in document["outputs"]]


class GrpcWire:
    """tritonclient.grpc, which knows but one way for a tensor."""

    def __init__(self, server: ServerThread) -> None:
        import tritonclient.grpc as triton_grpc

        assert server.grpc_target is not None
        self.client = triton_grpc.InferenceServerClient(server.grpc_target)

    @staticmethod
    def tensor(name: str, array: np.ndarray, datatype: str, *, binary: bool = True) -> Any:
        import tritonclient.grpc as triton_grpc

        given = triton_grpc.InferInput(name, list(array.shape), datatype)
        given.set_data_from_numpy(array)
        return given

    @staticmethod
    def wanted(name: str, *, binary: bool = True, **parameters: Any) -> Any:
        import tritonclient.grpc as triton_grpc

        output = triton_grpc.InferRequestedOutput(name)
        for key, value in parameters.items():
            kind = "string_param" if isinstance(value, str) else "int64_param"
            setattr(output._output.parameters[key], kind, value)
        return output

    @staticmethod
    def answered(answer: Any) -> tuple[str, str, list[str]]:
        response = answer.get_response()
        return response.model_version, response.id, [output.name for output in response.outputs]


Wire = HttpWire | GrpcWire
