"""What ``instrument`` is asked for and cannot be: said at once, in one line, and never raised into the host."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stagetrace
from stagetrace import live, runtime, session
from stagetrace.asked import checked
from stagetrace.collect import sinks
from stagetrace.exporting import Options
from stagetrace.recorder import Recorder
from stagetrace.store import StoreError, StoreWriter
from tests.unit.test_cli import store

EXPORTED = "nothing will be exported"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"store": "nodir/x.db"}, "store='nodir/x.db': no such directory; make it first; nothing will be stored"),
    ({"store": "."}, "store='.': not a regular file"),
    ({"store": "letter"}, "store='letter': not a stagetrace store"),
    ({"store": 7.5}, "store=7.5: not a file's name"),
    (
        {"otlp": "foo"},
        f"otlp='foo': not a URL such as http://localhost:4318 or http://localhost:4317 (gRPC); {EXPORTED}",
    ),
    ({"otlp": "http://user:secret@a..b"}, "otlp='http://a..b': not a URL"),
    ({"otlp": 4318}, "otlp=4318: not a URL"),
    ({"prometheus": "x"}, f"prometheus='x': not an address such as 127.0.0.1:9464; {EXPORTED}"),
    ({"prometheus": "127.0.0.1:99999"}, "prometheus='127.0.0.1:99999'"),
    ({"prometheus": "::1:9464"}, "prometheus='::1:9464'"),
    ({"sample": 7}, f"sample=7: give a number from 0 to 1; {EXPORTED}"),
    ({"sample": "x"}, "sample='x'"),
    ({"sample": True}, "sample=True"),
    ({"store_max": "x"}, "store_max='x': give bytes, at least 1048576; 1 GiB holds"),
    ({"store_max": 5}, "store_max=5"),
]
GOOD: list[dict[str, Any]] = [
    {"store": "s.db", "store_max": 1 << 20, "sample": 0},
    {"store": "new.db", "sample": 0.5, "otlp": "http://h:4318", "prometheus": "9464"},
    {"store": Path("new.db"), "otlp": "https://h/v1/traces", "prometheus": ":9464"},
    {"store": None, "prometheus": "[::1]:9464", "sample": 1},
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in ("STAGETRACE", session.ENV):
        monkeypatch.delenv(name, raising=False)
    Path("letter").write_text("Dear reader")
    store(Path("s.db"))
    yield
    stagetrace.uninstrument()


@pytest.mark.parametrize(("options", "says"), BAD, ids=str)
def test_what_cannot_be_is_logged_and_shown_and_not_raised(
    options: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    stagetrace.instrument(**options)
    (said,) = stagetrace.status()["faults"]
    assert said.startswith(says) and said.isprintable() and "secret" not in said
    assert [record.getMessage() for record in caplog.records] == [f"stagetrace: {said}"]
    assert caplog.records[0].levelno == logging.WARNING
    stagetrace.instrument(**options)
    assert len(caplog.records) == 1, "idempotent"
    stagetrace.uninstrument()
    assert stagetrace.status()["faults"] == []


@pytest.mark.parametrize("options", GOOD, ids=str)
def test_what_can_be_is_not_spoken_of(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    stagetrace.instrument(**options)
    assert stagetrace.status()["faults"] == [] and not caplog.records
    assert sorted(path.name for path in Path().iterdir()) == ["letter", "s.db"], "and nothing is made yet"


@pytest.mark.parametrize(
    "options", [options for options, _ in BAD if not isinstance(options.get("store"), float)], ids=str
)
def test_those_that_have_the_last_word_agree(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    if "store" in options or "store_max" in options:
        if not isinstance(options.get("store_max"), str):
            with pytest.raises(StoreError):
                StoreWriter(options.get("store", "s.db"), options.get("store_max", 1 << 30))
        return
    given, _ = checked(options)
    with pytest.raises(sinks.ExportError):
        otlp = given.get("otlp", "http://h" if "sample" in given else None)
        sinks.build(Options(str(otlp) if otlp else None, given.get("prometheus"), given.get("sample")), {}, print)


def test_what_would_end_the_collector_does_not_reach_it() -> None:
    options, faults = checked({"store": None, "store_max": "x", "sample": "x", "otlp": None})
    assert len(faults) == 2 and options["store_max"] is None and math.isnan(options["sample"])


def test_in_somebody_else_s_session_it_was_somebody_else_who_was_asked(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(session.ENV, str(directory))
    monkeypatch.setattr(runtime, "recorder", Recorder(None))
    stagetrace.instrument(store="nodir/x.db")
    assert stagetrace.status()["faults"] == [] and not caplog.records


# ---------------------------------------------------------------- whose a session is


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/usr/bin/stagetrace", "run", "--otlp", "http://u:p@h", "--", "vllm", "serve", "M", "--api-key", "x"],
         "vllm serve M …"),
        (["python", "-m", "stagetrace", "run", "--", "/v/bin/python", "-m", "engine.server", "--model", "M"],
         "python -m engine.server …"),
        (["stagetrace", "run", "--", "server", "--api-key", "x"], "server …"),
        (["stagetrace", "run", "--", "env", "KEY=x", "server"], "env KEY=… server"),
        (["stagetrace", "run", "--", "true"], "true"),
    ],
)  # fmt: skip
def test_a_session_is_its_command_s(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_words", lambda pid: words)
    monkeypatch.setattr(session, "owner", lambda directory: 42)
    assert live.whose(Path("session")) == f"pid 42: {said}"
