"""HTTP/1 (RFC 9112): heads, framing and dates."""
