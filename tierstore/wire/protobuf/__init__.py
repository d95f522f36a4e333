"""Protobuf of inference requests."""
