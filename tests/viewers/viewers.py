"""Real trace viewers, each in an environment of its own below ~/.cache/stagetrace: what they pin is not for ours."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, ClassVar, Protocol

from stagetrace.serve import free_port
from tests.engine.serving import Server
from tests.viewers.spans import Span

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stagetrace"


class Viewer(Protocol):
    """A running viewer."""

    #: Its base URL for OTLP over HTTP, what else exporters are to be told, how far its times may be off, what it keeps.
    url: str
    variables: dict[str, str]
    within_ns: int
    links: bool

    def spans(self) -> list[Span]:
        """Everything it has, asked for through its own API."""


@dataclass
class Mlflow:
    """MLflow keeps times in ns, adds attributes of its own, and takes no metrics."""

    url: str
    python: Path
    variables: ClassVar = {"OTEL_EXPORTER_OTLP_HEADERS": "x-mlflow-experiment-id=0", "OTEL_METRICS_EXPORTER": "none"}
    within_ns = 0
    links = True

    def spans(self) -> list[Span]:
        return [_of_mlflow(json.loads(line)) for line in self.ask("read_mlflow.py", self.url).splitlines()]

    def ask(self, script: str, *arguments: str) -> str:
        """What a script beside this file prints when MLflow's own Python runs it."""
        command = [str(self.python), str(Path(__file__).with_name(script)), *arguments]
        done = subprocess.run(command, env=_quiet(), capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout


@dataclass
class Phoenix:
    """Phoenix keeps times in µs, which it gets from a float of seconds, and no links; it takes no metrics either."""

    url: str
    variables: ClassVar = {"OTEL_METRICS_EXPORTER": "none"}
    within_ns = 1250
    links = False

    def spans(self) -> list[Span]:
        found: list[Span] = []
        cursor: str | None = ""
        while cursor is not None:
            page = _get(f"{self.url}/v1/projects/default/spans?limit=500" + (cursor and f"&cursor={cursor}"))
            found += map(_of_phoenix, page["data"])
            cursor = page["next_cursor"]
        return found


@contextmanager
def mlflow(folder: Path) -> Iterator[Mlflow]:
    """An MLflow server with a database of its own."""
    programs, port = environment("mlflow"), free_port()
    command = [
        str(programs / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--default-artifact-root", str(folder / "artifacts"),
    ]  # fmt: skip
    with Server(command, port=port, log=folder / "mlflow.log", environment=_quiet()):
        yield Mlflow(f"http://127.0.0.1:{port}", programs / "python")


@contextmanager
def phoenix(folder: Path) -> Iterator[Phoenix]:
    """A Phoenix server with a database of its own."""
    programs, port = environment("phoenix"), free_port()
    variables: ClassVar = {
        "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(port), "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_WORKING_DIR": str(folder), "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }  # fmt: skip
    command = [str(programs / "phoenix"), "serve"]
    server = Server(
        command, port=port, log=folder / "phoenix.log", environment=_quiet() | variables, ready_path="/healthz"
    )
    with server:
        yield Phoenix(f"http://127.0.0.1:{port}")


def environment(name: str) -> Path:
    """The programs of an environment made from ``requirements/NAME.txt``, now or earlier."""
    wanted = (REQUIREMENTS / f"{name}.txt").read_text()
    home = CACHE / f"viewer-{name}"
    stamp = home / "made-from.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        uv = str(Path(sys.executable).with_name("uv"))
        python = str(home / "bin" / "python")
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(home)], check=True)
        install = [uv, "pip", "install", "--quiet", "--python", python, "-r", str(REQUIREMENTS / f"{name}.txt")]
        subprocess.run(install, check=True)
        stamp.write_text(wanted)
    return home / "bin"


def _quiet() -> dict[str, str]:
    """This environment without our exporters' settings, and with no word to the viewers' makers."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return plain | {
        "MLFLOW_DISABLE_TELEMETRY": "true", "PHOENIX_TELEMETRY_ENABLED": "false", "DO_NOT_TRACK": "true",
    }  # fmt: skip


def _of_mlflow(span: dict[str, Any]) -> Span:
    """Ids are in base64, values in JSON."""
    attributes = {key: json.loads(value) for key, value in span["attributes"].items()}
    events = [(e["name"], e["time_unix_nano"], e.get("attributes") or {}) for e in span["events"]]
    return Span(
        _hex(span["trace_id"]), _hex(span["span_id"]), span["parent_span_id"] and _hex(span["parent_span_id"]),
        span["name"], span["start_time_unix_nano"], span["end_time_unix_nano"],
        attributes, events, span["status"]["code"].removeprefix("STATUS_CODE_"),
        [(link["trace_id"].removeprefix("tr-"), link["span_id"], link["attributes"]) for link in span["links"]],
    )  # fmt: skip


def _hex(text: str) -> str:
    return base64.b64decode(text).hex()


def _of_phoenix(span: dict[str, Any]) -> Span:
    events = [(e["name"], _ns(e["timestamp"]), e["attributes"]) for e in span["events"]]
    return Span(
        span["context"]["trace_id"], span["context"]["span_id"], span["parent_id"], span["name"],
        _ns(span["start_time"]), _ns(span["end_time"]), span["attributes"], events, span["status_code"],
    )  # fmt: skip


def _ns(text: str) -> int:
    since = datetime.fromisoformat(text) - datetime(1970, 1, 1, tzinfo=timezone.utc)
    return since // timedelta(microseconds=1) * 1000


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)
