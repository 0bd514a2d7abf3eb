"""HTTP/1.1 responses and their events out of bytes, stamped when the bytes came. No input or output in here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

MOST_HEAD = 65_536


class Broken(Exception):
    """The server's bytes are no HTTP/1.1 answer; says in what."""


@dataclass
class Response:
    """Feed it bytes; it calls nobody: look at ``status``, ``body``, ``take()`` and ``complete``."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    complete: bool = False
    _raw: bytearray = field(default_factory=bytearray)
    _body: bytearray = field(default_factory=bytearray)
    _left: int | None = None
    _chunked: bool = False
    _trailer: bool = False

    def feed(self, data: bytes) -> None:
        """Take in what came from the socket."""
        self._raw += data
        if not self.status and not self._head():
            return
        if self._chunked:
            self._chunks()
        else:
            self._plain()

    def eof(self) -> None:
        """The server closed: the end of a body without a length, a fault in any other."""
        if self.status and not self._chunked and self._left is None:
            self.complete = True

    def take(self) -> bytes:
        """Whole lines of the body that have not been taken yet."""
        end = self._body.rfind(b"\n") + 1
        lines = bytes(self._body[:end])
        del self._body[:end]
        return lines

    def body(self) -> bytes:
        """All of the body that has not been taken."""
        return bytes(self._body)

    def _head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > MOST_HEAD:
                raise Broken("headers without end")
            return False
        first, *lines = self._raw[:end].decode("latin-1").split("\r\n")
        del self._raw[: end + 4]
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise Broken("not HTTP/1.1")
        if rest.startswith("1"):  # 100 Continue and the like: the answer is still to come
            return self._head()
        self.status = int(rest[:3])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length", "")
        self._left = int(length) if length.isdecimal() and not self._chunked else None
        return True

    def _plain(self) -> None:
        take = len(self._raw) if self._left is None else min(self._left, len(self._raw))
        self._body += self._raw[:take]
        del self._raw[:take]
        if self._left is not None:
            self._left -= take
            self.complete = self._left == 0

    def _chunks(self) -> None:
        while not self.complete:
            if self._left is None and not self._size():
                return
            if self._trailer:
                # The last chunk: an empty line ends it, after trailers that nobody here wants.
                self.complete = self._raw.startswith(b"\r\n") or b"\r\n\r\n" in self._raw
                return
            assert self._left is not None
            if len(self._raw) < self._left + 2:
                return
            self._body += self._raw[: self._left]
            del self._raw[: self._left + 2]
            self._left = None

    def _size(self) -> bool:
        end = self._raw.find(b"\r\n")
        if end < 0:
            return False
        try:
            self._left = int(self._raw[:end].split(b";")[0], 16)
        except ValueError:
            raise Broken("a chunk without a size") from None
        self._trailer = self._left == 0
        del self._raw[: end + 2]
        return True


def events(lines: bytes) -> list[dict[str, Any] | None]:
    """Server-sent events; None is ``[DONE]``. Broken if one of them is no JSON object."""
    found: list[dict[str, Any] | None] = []
    for line in lines.splitlines():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            found.append(None)
            continue
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise Broken("an event that is no JSON object")
        found.append(event)
    return found
