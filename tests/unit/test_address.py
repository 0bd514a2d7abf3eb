"""Addresses: what no request can be sent to is known beforehand, and no password is shown."""

from __future__ import annotations

import pytest

from stagetrace import address

#: What is refused; anything that takes an address refuses all of it in one line.
UNUSABLE = [
    "", "nonsense", "localhost:4318", "ftp://x", "http://", "http://a..b:1", "http://.:80", f"http://{'x' * 80}:1",
    "http://ho st:1", "http://\udcff", "http://h:port", "http://h:0", "http://h:99999", "http://[::1", "http://h/\n",
]  # fmt: skip


@pytest.mark.parametrize("url", UNUSABLE)
def test_what_is_no_address(url: str) -> None:
    assert address.parse(url) is None
    assert address.shown(url).isprintable()


@pytest.mark.parametrize(
    "url", ["http://h", "https://h.example.:8000/a", "http://[::1]:1", "http://b\u00fccher.example", "http://a_b:1/"]
)
def test_what_is_one(url: str) -> None:
    parts = address.parse(url)
    assert parts is not None and parts.hostname and address.shown(url) == url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:secret@h:1/p", "http://h:1/p"),
        ("https://secret@h", "https://h"),
        ("http://user:se/cret@h", "http://h"),
        ("http://user:se@cret@h", "http://h"),
        ("user:secret@h:4318", "h:4318"),
    ],
)
def test_nobody_is_shown_a_password(url: str, shown: str) -> None:
    assert address.shown(url) == shown
