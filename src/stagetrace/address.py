"""Addresses as people give them: whether a request can be sent there, and what of them may be shown."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


def parse(url: str) -> SplitResult | None:
    """The parts of an ``http://`` or ``https://`` address; None for what no request can be sent to."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")  # UnicodeError, as a socket would raise it: a label is empty or too long
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return None
    return parts if usable and url.isprintable() and " " not in url else None


def shown(url: str) -> str:
    """``url`` in one line and without a name and password, even where it is no address at all."""
    before, at, after = "".join(c if c.isprintable() else "?" for c in url).rpartition("@")
    scheme, slashes, _ = before.partition("//")
    return f"{scheme}{slashes}{after}" if at and slashes else after
