"""A client's settings from environment variables: token and certificates. Any thread."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tierstore.errors import ConfigError

TOKEN_VARIABLE = "TIERSTORE_TOKEN"  # no flag: other users of the machine can read flags
INSECURE_VARIABLE = "TIERSTORE_ALLOW_INSECURE_TOKEN"


def client_options(urls: Sequence[str]) -> dict[str, Any]:
    """The options of a client of these services that the environment names: the token and the certificates."""
    files: dict[str, Any] = {}
    if all(url.startswith("https:") for url in urls):
        files = {name: os.environ.get(f"TIERSTORE_{name.upper()}") or None for name in ("ca", "cert", "key")}
    insecure = os.environ.get(INSECURE_VARIABLE, "").lower()
    if insecure not in ("", "0", "1", "false", "true"):
        raise ConfigError(f"{INSECURE_VARIABLE}: expected 1 or 0, got {insecure!r}")
    token = os.environ.get(TOKEN_VARIABLE) or None
    return {"token": token, "allow_insecure_token": insecure in ("1", "true"), **files}
