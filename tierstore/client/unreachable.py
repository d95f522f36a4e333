"""Messages for connections that failed, with the setting that mends it. Pure functions; any thread."""

from __future__ import annotations

import ssl

from tierstore.client.settings import Address
from tierstore.errors import Unreachable

_OF_ANOTHER_NAME = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_OF_ANOTHER_TIME = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")


def not_connected(address: Address, error: Exception) -> Unreachable:
    """The error of a connection that could not be opened."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OF_ANOTHER_NAME:
            what = "use a name in the url that the certificate has"
        elif error.verify_code in _OF_ANOTHER_TIME:
            what = "the service needs another certificate, unless this machine's clock is wrong"
        else:
            what = (
                "name a file of the authorities that vouch for it: ca= of the client, TIERSTORE_CA on the command "
                "line, or SSL_CERT_FILE"
            )
        return Unreachable(f"the certificate of {address.url} is not trusted: {error.verify_message}; {what}")
    return Unreachable(f"no service answers at {address.url}: {_shown(address, error)}")


def connection_lost(address: Address, error: Exception | None, *, heard: bool) -> Unreachable:
    """The error of a connection that ended before the answer was there; `heard`: the service had sent something on it
    before.
    """
    hint = "" if heard or address.tls or address.socket else f": does it speak TLS, as https://{address.authority}?"
    if error is None:
        return Unreachable(f"{address.url} closed the connection before it answered{hint}")
    return Unreachable(f"the connection to {address.url} failed: {_shown(address, error)}{hint}")


def _shown(address: Address, error: Exception) -> str:
    text, reason = str(error) or "timed out", getattr(error, "reason", None) or ""
    if reason in _NO_TLS:
        return f"{text}; it does not speak TLS there: is it http://{address.authority}?"
    if "ALERT" in reason and any(word in reason for word in ("CERTIFICATE", "UNKNOWN_CA", "HANDSHAKE_FAILURE")):
        return (
            f"{text}; the service asks for a certificate that it trusts: cert= and key= of the client, TIERSTORE_CERT "
            "and TIERSTORE_KEY on the command line"
        )
    return text
