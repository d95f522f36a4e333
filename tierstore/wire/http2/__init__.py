"""HTTP/2 (RFC 9113) of a server, without a socket: `core.py` reads a frame."""
