"""Kernels that read and write what clients and other servers send: HTTP/1, HTTP/2, JSON, protobuf, RESP."""
