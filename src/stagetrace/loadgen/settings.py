"""What a load is made of, as asked for on the command line, checked."""

from __future__ import annotations

import base64
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from .. import address
from ..faults import Fault
from .mix import Mix, parse_mix

DEFAULT_REQUESTS = 50
API_KEY = "STAGETRACE_API_KEY"


@dataclass(frozen=True)
class Target:
    """Where the server is. ``base`` is the path before ``/v1``."""

    host: str
    port: int
    base: str
    tls: ssl.SSLContext | None
    #: The ``Authorization`` header that the address itself asks for.
    authorization: str | None = None

    @property
    def netloc(self) -> str:
        """The ``Host`` header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> Target:
    """Read ``http[s]://[USER:PASSWORD@]HOST[:PORT][/PATH][/v1]``; Fault if it is anything else."""
    parts = address.parse(url)
    if parts is None or not parts.path.isascii():
        raise Fault(f"--url {address.shown(url)}: not a server's address; write it as http://HOST:PORT")
    base = parts.path.rstrip("/").removesuffix("/v1")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    given = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        given = "Basic " + base64.b64encode(pair.encode()).decode()
    return Target(parts.hostname or "", parts.port or (443 if tls else 80), base, tls, given)


@dataclass(frozen=True)
class Settings:
    """One load. Either ``rate`` (open loop) or ``concurrency`` (closed loop); ``requests`` or ``duration_s``."""

    url: str
    model: str | None
    rate: float | None
    concurrency: int | None
    requests: int | None
    duration_s: float | None
    prompt_tokens: str
    output_tokens: str
    shared_prefix: int
    seed: int
    warmup: int
    stream: bool
    completions: bool
    sampled: bool
    timeout_s: float
    output: Path | None

    def checked(self) -> tuple[Target, Mix, Mix]:
        """The target and both mixes; Fault for what contradicts itself."""
        if self.rate is not None and self.concurrency is not None:
            raise Fault("--rate is an open loop and --concurrency a closed one; choose one of them")
        if self.requests is not None and self.duration_s is not None:
            raise Fault("--requests and --duration both say when to stop; choose one of them")
        if self.rate is not None and not 0 < self.rate <= 1e5:
            raise Fault(f"--rate {self.rate:g}: give requests per second, more than 0 and at most 100000")
        if self.duration_s is not None and not 0 < self.duration_s <= 1e6:
            raise Fault(f"--duration {self.duration_s:g}: give seconds, more than 0 and at most a million")
        prompts = parse_mix("--prompt-tokens", self.prompt_tokens)
        if self.shared_prefix >= prompts.shortest:
            least = f"a prompt of {prompts.shortest} tokens (--prompt-tokens {self.prompt_tokens})"
            raise Fault(f"--shared-prefix {self.shared_prefix}: {least} would be nothing else; give less than that")
        return parse_url(self.url), prompts, parse_mix("--output-tokens", self.output_tokens)

    @property
    def place(self) -> str:
        """The server's address as it may be shown."""
        return address.shown(self.url)

    @property
    def path(self) -> str:
        """The API's path below the server's base."""
        return "/v1/completions" if self.completions else "/v1/chat/completions"

    @property
    def count(self) -> int | None:
        """How many requests to send; None for a load that ends by the clock."""
        return None if self.duration_s is not None else self.requests or DEFAULT_REQUESTS
