"""Certificates for the tests, made by the program openssl. Test code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]


class Pair(NamedTuple):
    """Files in PEM."""

    cert: Path
    key: Path


class Authority:
    """An authority, its certificate in `ca`. Skips the test where there is no openssl."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._key = folder, folder / f"{name}.key"
        self.ca = folder / f"{name}.pem"
        use = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]  # Python 3.13 takes no authority without it
        _openssl("req", "-x509", *_KEY, *use, "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.ca)

    def issue(self, name: str, others: str = "IP:127.0.0.1", into: str | None = None) -> Pair:
        """A certificate with the common name `name` and `others`, if any, as its alternative names."""
        pair = Pair(self._folder / f"{into or name}.pem", self._folder / f"{into or name}.key")
        subject = "/CN=" + name.replace("/", r"\/")
        names = ["-subj", subject, "-addext", "basicConstraints=CA:FALSE"]
        names += ["-addext", f"subjectAltName={others}"] if others else []
        signed = ["-CA", self.ca, "-CAkey", self._key, "-keyout", pair.key, "-out", pair.cert]
        _openssl("req", "-x509", *_KEY, *names, *signed)
        return pair


def _openssl(*arguments: str | Path) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs the program openssl to make certificates")
    subprocess.run([program, *map(str, arguments)], check=True, capture_output=True)
