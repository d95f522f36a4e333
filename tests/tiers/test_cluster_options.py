"""The addresses of a cluster, as a person writes them."""

from __future__ import annotations

import pytest

from tierstore.errors import ConfigError
from tierstore.tiers.cluster.options import ServerAddress, hidden, parse_server_urls


def test_addresses() -> None:
    found = parse_server_urls("redis://a:1,b, redis://c:3,[::1]:4,a:1", {})
    assert found.addresses == (
        ServerAddress("a", 1),
        ServerAddress("b", 6379),
        ServerAddress("c", 3),
        ServerAddress("::1", 4),
    )
    assert str(found) == "a:1, b:6379, c:3, [::1]:4"
    assert not found.tls
    assert found.credentials == {}


def test_user_and_password_come_from_the_address_first() -> None:
    environment = {"TIERSTORE_REMOTE_USER": "u", "TIERSTORE_REMOTE_PASSWORD": "p"}
    assert parse_server_urls("redis://a", environment).credentials == {"username": "u", "password": "p"}
    assert parse_server_urls("redis://x:y%2F@a,b", environment).credentials == {"username": "x", "password": "y/"}
    assert parse_server_urls("redis://:y@a", {}).credentials == {"password": "y"}
    assert "y/" not in repr(parse_server_urls("redis://x:y%2F@a", {}))


def test_tls_options() -> None:
    found = parse_server_urls("rediss://a,b?ssl_ca_certs=/x.pem", {})
    assert found.tls
    assert found.credentials == {"ssl_ca_certs": "/x.pem"}
    assert len(found.addresses) == 2


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ("a:6379", "expected the address of a cluster, such as redis://host1:6379"),
        ("http://a", "expected the address of a cluster"),
        ("redis://", "expected addresses such as"),
        ("redis://a:x", "expected host:port"),
        ("redis://a:70000", "expected host:port"),
        ("redis://a,,b", "expected addresses such as"),
        ("redis://a/0", "expected addresses such as"),
        ("redis://a,rediss://b", "expected redis:// for all"),
        ("redis://a?ssl_ca_certs=x", "after rediss://"),
        ("rediss://a?password=x", "after rediss://"),
        ("redis://:pass word@a:x", "expected host:port"),
    ],
)
def test_what_is_no_address_is_refused_and_shows_no_password(urls: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        parse_server_urls(urls, {})
    assert "pass word" not in str(refused.value)


def test_what_is_hidden() -> None:
    assert hidden("redis://u:p@a:1,redis://q@b") == "redis://a:1,redis://b"
    assert hidden("u:p@a") == "a"
