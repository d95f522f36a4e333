"""The server's side of HTTP/2 (RFC 9113), without a socket: `core.py` reads a frame."""
