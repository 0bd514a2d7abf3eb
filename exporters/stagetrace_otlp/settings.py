"""What is exported where, from ``--otlp`` and ``OTEL_*``. Nothing heavy is imported here: most runs export nothing.

Endpoints, headers, timeouts, compression and certificates that come from the environment are read by the official
exporters themselves; they are not repeated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult

from stagetrace.exporting import Options, Say, parse_address, shown_address

from .policy import Policy

PROTOCOLS = ("grpc", "http/protobuf")
_GRPC_PORT = 4317


@dataclass(frozen=True)
class Signal:
    """Where traces or metrics go. ``endpoint`` None: the official exporter finds it in the environment."""

    protocol: str
    endpoint: str | None
    #: What names it, and what of it may be shown.
    origin: str = field(default="", compare=False)
    shown: str = field(default="", compare=False)


@dataclass(frozen=True)
class Settings:
    """Everything the sink needs; at least one of ``traces`` and ``metrics`` is there."""

    policy: Policy
    traces: Signal | None
    metrics: Signal | None
    queue_spans: int
    batch_spans: int
    delay_s: float


def read(options: Options, environment: Mapping[str, str], say: Say) -> Settings | None:
    """None where nothing is to be exported; ValueError with one line for what cannot be used."""
    env = {name: value.strip() for name, value in environment.items() if value.strip()}
    url = None if options.otlp is None else _url(options.otlp)
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        if url:
            say("OTEL_SDK_DISABLED=true: nothing is exported, --otlp or not")
        return None
    traces, metrics = (_signal(name, url, env, say) for name in ("TRACES", "METRICS"))
    if options.tracer_provider is not None:
        if url:
            say("traces go to tracer_provider only; otlp gets the metrics")
        traces = None
    if traces is None and metrics is None:
        return None
    return Settings(
        Policy(env, options.sample),
        traces,
        metrics,
        queue_spans=_whole(env, "OTEL_BSP_MAX_QUEUE_SIZE", 16_384),
        batch_spans=_whole(env, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512),
        delay_s=_whole(env, "OTEL_BSP_SCHEDULE_DELAY", 1000) / 1e3,
    )


def _signal(name: str, url: SplitResult | None, env: Mapping[str, str], say: Say) -> Signal | None:
    """Where ``name`` (TRACES, METRICS) goes, if anywhere."""
    chosen = env.get(f"OTEL_{name}_EXPORTER", "").lower()
    if chosen and "otlp" not in chosen.split(","):
        if url:
            say(f"OTEL_{name}_EXPORTER={chosen}: no {name.lower()} are exported, --otlp or not")
        return None
    places = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
    if url is None and not chosen and not any(place in env for place in places):
        return None
    protocol = _protocol(name, url, env)
    if url is not None:
        endpoint = _endpoint(url, protocol, name.lower())
        return Signal(protocol, endpoint, "--otlp", shown_address(endpoint))
    origin = next((place for place in reversed(places) if place in env), places[0])
    return Signal(protocol, None, origin, _named(origin, env.get(origin, ""), protocol, name.lower()))


def _named(variable: str, value: str, protocol: str, signal: str) -> str:
    """What to show of the place a variable names; ValueError if nothing can be sent there."""
    shown = shown_address(value)
    # Over gRPC, HOST:PORT and whatever else gRPC resolves will do.
    if value and not parse_address(value) and (protocol != "grpc" or "://" in value or not value.isprintable()):
        raise ValueError(f"{variable}={shown}: not a URL such as http://localhost:4318; correct or unset it")
    if protocol == "grpc":
        return shown or f"http://localhost:{_GRPC_PORT}"
    base = shown or "http://localhost:4318"
    return base if variable.endswith(f"_{signal.upper()}_ENDPOINT") else f"{base.rstrip('/')}/v1/{signal}"


def _protocol(name: str, url: SplitResult | None, env: Mapping[str, str]) -> str:
    for variable in (f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if variable in env:
            if env[variable] not in PROTOCOLS:
                raise ValueError(f"{variable}={env[variable]} cannot be used: give grpc or http/protobuf")
            return env[variable]
    plain = url is not None and url.port == _GRPC_PORT and url.path in ("", "/")
    return "grpc" if plain else "http/protobuf"


def _url(text: str) -> SplitResult:
    """The parts of ``--otlp``; ValueError for what no request can be sent to."""
    url = parse_address(text)
    if url is None or url.query or url.fragment:
        place = shown_address(text)
        raise ValueError(f"--otlp {place}: not a URL such as http://localhost:4318 or http://localhost:4317 (gRPC)")
    return url


def _endpoint(url: SplitResult, protocol: str, signal: str) -> str:
    """A base URL gets the signal's path, as ``OTEL_EXPORTER_OTLP_ENDPOINT`` does; a whole one is taken as it is."""
    if protocol == "grpc":
        return f"{url.scheme}://{url.netloc}"
    path = url.path.rstrip("/")
    for known in ("traces", "metrics"):
        path = path.removesuffix(f"/v1/{known}")
    return f"{url.scheme}://{url.netloc}{path}/v1/{signal}"


def _whole(env: Mapping[str, str], name: str, otherwise: int) -> int:
    text = env.get(name)
    if text is None:
        return otherwise
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise ValueError(f"{name}={text} is not a whole number above 0")
    return int(text)
