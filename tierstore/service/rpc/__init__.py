"""The gRPC front of the service (extra `grpc`): the Open Inference Protocol's service, health and reflection."""
