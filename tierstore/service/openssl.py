"""TLS by the OpenSSL library itself, so that compiled code can continue a connection after Python's handshake.

Python's module `ssl` does not give its sessions away. Here they are addresses, and so are the functions that reactors
call: those of the library that the module uses if it is a shared one, else of the system's. Only public functions of
OpenSSL 1.1.1 and 3 are called.

A `Context` may be used by any thread; a `TlsSession` by one at a time.
"""

from __future__ import annotations

import _ssl
import calendar
import contextlib
import ctypes
import os
import ssl
import threading
import time
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_long, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import ConfigError
from tierstore.reactor import sockets as kernel
from tierstore.reactor.layout import OPENSSL
from tierstore.wire import tls_messages

WANTS_READ, WANTS_WRITE = kernel.WANT_READ, kernel.WANT_WRITE
_NAMES = ("libssl.so.3", "libssl.so.1.1")
_MESSAGE_ARGUMENT, _MODE, _READ_AHEAD, _LEAST_VERSION = 16, 33, 41, 123  # of SSL_CTX_ctrl
# bits of _MODE: a write may end after a record; its bytes may have moved when it is tried again; idle sessions hold no
# buffers
_MODES = 0x1 | 0x2 | 0x4 | 0x10
_TLS_1_2, _PEM = 0x0303, 1
_OPTIONS = ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
_OPTIONS |= getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0x80)
_REQUIRE_CERTIFICATE = 0x1 | 0x2  # SSL_VERIFY_PEER, SSL_VERIFY_FAIL_IF_NO_PEER_CERT
HTTP1 = b"\x08http/1.1"  # protocols, in ALPN's form
HTTP2_OR_1 = b"\x02h2" + HTTP1
_AGREED, _NO_ANSWER = 1, 3  # OPENSSL_NPN_NEGOTIATED; SSL_TLSEXT_ERR_NOACK
_ALTERNATIVE_NAMES, _COMMON_NAME = 85, 13  # NIDs
_DNS, _URI = 2, 6  # kinds of general names
_ABSENT = -1
_READ_BYTES = 1 << 18

_Choose = CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), POINTER(c_ubyte), c_void_p, c_uint, c_void_p)
_Password = CFUNCTYPE(c_int, c_void_p, c_int, c_int, c_void_p)


class _Tm(ctypes.Structure):
    """`struct tm`, with room for additions of C libraries."""

    _fields_ = [
        *((name, c_int) for name in ("second", "minute", "hour", "day", "month", "year", "weekday", "yearday", "dst")),
        ("more", ctypes.c_char * 64),
    ]


# functions: result and argument types
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "TLS_server_method": (c_void_p, []),
    "SSL_CTX_new": (c_void_p, [c_void_p]),
    "SSL_CTX_free": (None, [c_void_p]),
    "SSL_CTX_ctrl": (c_long, [c_void_p, c_int, c_long, c_void_p]),
    "SSL_CTX_set_options": (c_uint64, [c_void_p, c_uint64]),
    "SSL_CTX_set_cipher_list": (c_int, [c_void_p, c_char_p]),
    "SSL_CTX_set_alpn_select_cb": (None, [c_void_p, _Choose, c_void_p]),
    "SSL_get_ex_data": (c_void_p, [c_void_p, c_int]),
    "SSL_set_ex_data": (c_int, [c_void_p, c_int, c_void_p]),
    "SSL_set_shutdown": (None, [c_void_p, c_int]),
    "SSL_CTX_set_msg_callback": (None, [c_void_p, c_void_p]),
    "SSL_CTX_set_default_passwd_cb": (None, [c_void_p, _Password]),
    "SSL_CTX_set_session_id_context": (c_int, [c_void_p, c_char_p, c_uint]),
    "SSL_CTX_set_verify": (None, [c_void_p, c_int, c_void_p]),
    "SSL_CTX_load_verify_locations": (c_int, [c_void_p, c_char_p, c_char_p]),
    "SSL_CTX_use_certificate_chain_file": (c_int, [c_void_p, c_char_p]),
    "SSL_CTX_use_PrivateKey_file": (c_int, [c_void_p, c_char_p, c_int]),
    "SSL_CTX_check_private_key": (c_int, [c_void_p]),
    "SSL_CTX_get0_certificate": (c_void_p, [c_void_p]),
    "SSL_select_next_proto": (c_int, [POINTER(c_void_p), POINTER(c_ubyte), c_char_p, c_uint, c_void_p, c_uint]),
    "SSL_new": (c_void_p, [c_void_p]),
    "SSL_free": (None, [c_void_p]),
    "SSL_set_fd": (c_int, [c_void_p, c_int]),
    "SSL_accept": (c_int, [c_void_p]),
    "SSL_read": (c_int, [c_void_p, c_void_p, c_int]),
    "SSL_write": (c_int, [c_void_p, c_void_p, c_int]),
    "SSL_shutdown": (c_int, [c_void_p]),
    "SSL_get_error": (c_int, [c_void_p, c_int]),
    "ERR_clear_error": (None, []),
    "ERR_get_error": (ctypes.c_ulong, []),
    "ERR_error_string_n": (None, [ctypes.c_ulong, c_char_p, c_size_t]),
    "X509_free": (None, [c_void_p]),
    "X509_get0_notAfter": (c_void_p, [c_void_p]),
    "ASN1_TIME_to_tm": (c_int, [c_void_p, POINTER(_Tm)]),
    "X509_get_ext_d2i": (c_void_p, [c_void_p, c_int, POINTER(c_int), c_void_p]),
    "GENERAL_NAMES_free": (None, [c_void_p]),
    "GENERAL_NAME_get0_value": (c_void_p, [c_void_p, POINTER(c_int)]),
    "OPENSSL_sk_num": (c_int, [c_void_p]),
    "OPENSSL_sk_value": (c_void_p, [c_void_p, c_int]),
    "ASN1_STRING_get0_data": (c_void_p, [c_void_p]),
    "ASN1_STRING_length": (c_int, [c_void_p]),
    "ASN1_STRING_to_UTF8": (c_int, [POINTER(c_void_p), c_void_p]),
    "CRYPTO_free": (None, [c_void_p, c_char_p, c_int]),
    "X509_get_subject_name": (c_void_p, [c_void_p]),
    "X509_NAME_get_index_by_NID": (c_int, [c_void_p, c_int, c_int]),
    "X509_NAME_get_entry": (c_void_p, [c_void_p, c_int]),
    "X509_NAME_ENTRY_get_data": (c_void_p, [c_void_p]),
}
_OF_MESSAGES = ("SSL_get_ex_data", "SSL_set_ex_data", "SSL_set_shutdown")
_OF_REACTORS = ("SSL_read", "SSL_write", "SSL_get_error", "ERR_clear_error", "SSL_shutdown", "SSL_free")


@cache
def library() -> Any:
    """The library, with the types of its functions set. ConfigError if there is none."""
    own = getattr(_ssl, "__file__", None)  # finds everything that it was linked to
    for name in (own, *_NAMES) if own else _NAMES:
        with contextlib.suppress(OSError, AttributeError):
            # its own functions first: Python may have another OpenSSL built in
            found = ctypes.CDLL(name, mode=os.RTLD_NOW | getattr(os, "RTLD_DEEPBIND", 0))
            for function, (answers, arguments) in _FUNCTIONS.items():
                getattr(found, function).restype, getattr(found, function).argtypes = answers, arguments
            return found
    raise ConfigError(
        f"tls_cert: TLS needs OpenSSL as a shared library, and none of {', '.join(_NAMES)} can be loaded; "
        "install it (Debian: libssl3)"
    )


@cache
def _peer_certificate() -> Any:
    """The function, by its name since OpenSSL 3, or before."""
    names = ("SSL_get1_peer_certificate", "SSL_get_peer_certificate")
    function = next(getattr(library(), name) for name in names if hasattr(library(), name))
    function.restype, function.argtypes = c_void_p, [c_void_p]
    return function


@cache
def functions() -> npt.NDArray[Any]:
    """The addresses of the functions that reactors call."""
    return OPENSSL.make(**dict(zip(OPENSSL.fields, _addresses(_OF_REACTORS).tolist(), strict=True)))


@cache
def _bound_functions() -> npt.NDArray[np.int64]:
    """The addresses of the functions that `wire/tls_messages.py` calls."""
    return _addresses(_OF_MESSAGES)


def _addresses(names: tuple[str, ...]) -> npt.NDArray[np.int64]:
    return np.array([ctypes.cast(getattr(library(), name), c_void_p).value for name in names], np.int64)


@cache
def _choose_of(protocols: bytes) -> Any:
    """A callback that chooses one of these protocols from those that the client offers (ALPN)."""

    @_Choose
    def choose(_: Any, out: Any, size: Any, offered: Any, count: int, __: Any) -> int:
        agreed = library().SSL_select_next_proto(out, size, protocols, len(protocols), offered, count)
        return 0 if agreed == _AGREED else _NO_ANSWER

    return choose


class Context:
    """Shared by connections: a certificate, its key, and the authorities for clients' certificates. Immutable."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None, protocols: bytes = HTTP2_OR_1) -> None:
        """ConfigError for files that cannot be used."""
        self._lib = lib = library()
        self._at = lib.SSL_CTX_new(lib.TLS_server_method())
        if not self._at:
            raise MemoryError("no memory for TLS")
        lib.SSL_CTX_set_options(self._at, int(_OPTIONS))
        lib.SSL_CTX_ctrl(self._at, _LEAST_VERSION, _TLS_1_2, None)
        lib.SSL_CTX_ctrl(self._at, _MODE, _MODES, None)
        lib.SSL_CTX_ctrl(self._at, _READ_AHEAD, 1, None)
        if lib.SSL_CTX_set_cipher_list(self._at, _ciphers()) != 1:
            raise ConfigError(f"tls_cert: OpenSSL has none of Python's ciphers: {_error()}")
        lib.SSL_CTX_ctrl(self._at, _MESSAGE_ARGUMENT, 0, _bound_functions().ctypes.data)
        lib.SSL_CTX_set_msg_callback(self._at, tls_messages.bound.address)
        lib.SSL_CTX_set_alpn_select_cb(self._at, _choose_of(protocols), None)
        calls: list[int] = []

        @_Password
        def refuse(*_: Any) -> int:
            calls.append(1)
            return -1

        lib.SSL_CTX_set_default_passwd_cb(self._at, refuse)  # OpenSSL's own would ask at the terminal
        lib.SSL_CTX_set_session_id_context(self._at, b"tierstore", 9)
        lib.ERR_clear_error()
        loaded = (
            lib.SSL_CTX_use_certificate_chain_file(self._at, os.fsencode(certificate)) == 1
            and lib.SSL_CTX_use_PrivateKey_file(self._at, os.fsencode(key), _PEM) == 1
            and lib.SSL_CTX_check_private_key(self._at) == 1
        )
        lib.SSL_CTX_set_default_passwd_cb(self._at, _Password())
        if not loaded:
            why = "the key is encrypted; expected one without a password" if calls else _error()
            raise ConfigError(
                f"tls_cert {certificate} and tls_key {key}: expected a certificate and its key, in PEM: {why}"
            )
        if client_ca is not None:
            if lib.SSL_CTX_load_verify_locations(self._at, os.fsencode(client_ca), None) != 1:
                raise ConfigError(f"tls_client_ca {client_ca}: expected certificates in PEM: {_error()}")
            lib.SSL_CTX_set_verify(self._at, _REQUIRE_CERTIFICATE, None)

    def __del__(self) -> None:
        if at := getattr(self, "_at", None):
            self._lib.SSL_CTX_free(at)  # sessions keep it alive

    def ends_s(self) -> float:
        """When its certificate expires, on the wall clock."""
        return _end_of(self._lib.SSL_CTX_get0_certificate(self._at))

    def session(self, fd: int) -> TlsSession:
        """A session for a connection whose client begins with its handshake."""
        at = self._lib.SSL_new(self._at)
        if not at or self._lib.SSL_set_fd(at, fd) != 1:
            self._lib.SSL_free(at)
            raise MemoryError("no memory for a connection")
        return TlsSession(at)


class TlsSession:
    """TLS on a non-blocking connection: an `SSL *` by its address. Its owner frees it (`close`), or gives it away
    (`detach`).

    `names` are those of the client's certificate.
    """

    def __init__(self, address: int, names: tuple[str, ...] = ()) -> None:
        self._lib, self._at, self.names = library(), address, names

    def accept(self) -> int | None:
        """Go on with the handshake. None once it is complete, else what it waits for. ConnectionError if it has
        failed.
        """
        self._lib.ERR_clear_error()
        if (came := self._lib.SSL_accept(self._at)) == 1:
            return None
        return self._wanted(came)

    def read(self) -> bytes | None:
        """Received bytes, empty at the end; None: wait for more. ConnectionError if the connection is broken."""
        buffer = _buffer()
        self._lib.ERR_clear_error()
        if (got := self._lib.SSL_read(self._at, buffer, _READ_BYTES)) > 0:
            return ctypes.string_at(buffer, got)
        if self._lib.SSL_get_error(self._at, got) == kernel.ZERO_RETURN:
            return b""
        self._wanted(got)
        return None

    def write(self, address: int, size: int) -> int:
        """Send from `size` bytes; returns how many were sent. 0: wait, and then begin with the same bytes."""
        self._lib.ERR_clear_error()
        if (sent := self._lib.SSL_write(self._at, address, min(size, 1 << 30))) > 0:
            return int(sent)
        self._wanted(sent)
        return 0

    def _wanted(self, came: int) -> int:
        error = int(self._lib.SSL_get_error(self._at, came))
        if error not in (WANTS_READ, WANTS_WRITE):
            raise ConnectionError(f"TLS: {_error()}")
        return error

    def certificate(self) -> tuple[tuple[str, ...], float | None]:
        """The names of the client's certificate, and when it expires, on the wall clock; empty without one."""
        found = _peer_certificate()(self._at)
        if not found:
            return (), None
        try:
            return _names_of(found), _end_of(found)
        finally:
            self._lib.X509_free(found)
            self._lib.ERR_clear_error()

    def moved(self, fd: int) -> TlsSession:
        """The same session, after the connection has become the descriptor `fd`."""
        if self._lib.SSL_set_fd(self._at, fd) != 1:
            raise MemoryError("no memory for a connection")
        return self

    def detach(self) -> int:
        """The address, for a new owner, who frees it."""
        at, self._at = self._at, 0
        return at

    def close(self, *, abort: bool = False) -> None:
        """Free it, after a message of the end to the other side unless `abort` is set."""
        at, self._at = self._at, 0
        if at:
            self._lib.ERR_clear_error()
            if not abort:
                self._lib.SSL_shutdown(at)
            self._lib.SSL_free(at)
            self._lib.ERR_clear_error()


_local = threading.local()


def _buffer() -> Any:
    """This thread's read buffer."""
    if not hasattr(_local, "buffer"):
        _local.buffer = ctypes.create_string_buffer(_READ_BYTES)
    return _local.buffer


@cache
def _ciphers() -> bytes:
    """The default ciphers of Python's module for TLS 1.2, and its level of security."""
    usual = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    return ":".join([f"@SECLEVEL={usual.security_level}", *(cipher["name"] for cipher in usual.get_ciphers())]).encode()


def _error() -> str:
    """The first error of this thread."""
    text = ctypes.create_string_buffer(256)
    number = library().ERR_get_error()
    library().ERR_error_string_n(number, text, len(text))
    library().ERR_clear_error()
    return text.value.decode(errors="replace") if number else "the connection has ended"


def _names_of(certificate: int) -> tuple[str, ...]:
    """The names of a client's certificate: URIs, then DNS names, ignoring unprintable ones.

    The common name if it has no alternative names of any kind: authorities check its content less, and it may spell a
    URI.
    """
    lib, why = library(), c_int()
    others = lib.X509_get_ext_d2i(certificate, _ALTERNATIVE_NAMES, byref(why), None)
    if not others:
        return _common_names(certificate) if why.value == _ABSENT else ()
    try:
        found = [_general_name(lib.OPENSSL_sk_value(others, i)) for i in range(lib.OPENSSL_sk_num(others))]
    finally:
        lib.GENERAL_NAMES_free(others)
    return tuple(
        name for wanted in (_URI, _DNS) for kind, name in found if kind == wanted and name.isprintable() and name
    )


def _general_name(at: int) -> tuple[int, str]:
    lib, kind = library(), c_int()
    value = lib.GENERAL_NAME_get0_value(at, byref(kind))
    if kind.value not in (_DNS, _URI):
        return kind.value, ""
    data = ctypes.string_at(lib.ASN1_STRING_get0_data(value), lib.ASN1_STRING_length(value))
    return kind.value, data.decode("ascii", "backslashreplace")


def _common_names(certificate: int) -> tuple[str, ...]:
    lib, names = library(), []
    subject, at = lib.X509_get_subject_name(certificate), -1
    while (at := lib.X509_NAME_get_index_by_NID(subject, _COMMON_NAME, at)) >= 0:
        text = c_void_p()
        size = lib.ASN1_STRING_to_UTF8(byref(text), lib.X509_NAME_ENTRY_get_data(lib.X509_NAME_get_entry(subject, at)))
        if size >= 0:
            names.append(ctypes.string_at(text.value or 0, size).decode("utf-8", "backslashreplace"))
            lib.CRYPTO_free(text, None, 0)
    return tuple(name for name in names if name.isprintable())


def _end_of(certificate: int) -> float:
    lib, parts = library(), _Tm()
    if lib.ASN1_TIME_to_tm(lib.X509_get0_notAfter(certificate), byref(parts)) != 1:
        return 0.0
    fields = time.struct_time(
        (parts.year + 1900, parts.month + 1, parts.day, parts.hour, parts.minute, parts.second, 0, 0, 0)
    )
    return float(calendar.timegm(fields))
