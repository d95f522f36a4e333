"""The gRPC transport: the protocols of the data plane over it, health and reflection."""
