"""`stagetrace gate --ab`: two servers in turn, each gone before the next is started, and one verdict."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagetrace.faults import Fault
from stagetrace.gate.ab import Command, Plan, order, parse_command
from stagetrace.model import RunRecord
from stagetrace.serve import HOST
from stagetrace.store import StoreWriter
from tests.unit.fake_server import Fake, serving
from tests.unit.simulated import BASE_MS
from tests.unit.stored import request
from tests.unit.test_cli import Cli

# ---------------------------------------------------------------- commands


def test_a_command_as_it_is_written() -> None:
    parsed = parse_command(f"A=1 B='two words' {sys.executable} -m x --port {{port}}")
    assert parsed.environment == {"A": "1", "B": "two words"}
    words, port = parsed.with_port()
    assert words == [sys.executable, "-m", "x", "--port", str(port)] and port > 0
    assert Command(("x", "--port", "80")).with_port() == (["x", "--port", "80"], 80)
    assert Command(("x", "--port=81")).with_port() == (["x", "--port=81"], 81)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "a command is missing"),
        ("A=1", "a command is missing"),
        ("'open", "No closing quotation"),
        ("stagetrace run -- x", "the gate runs it under stagetrace itself"),
        ("no-such-program --port 1", "no program no-such-program"),
    ],
)
def test_commands_that_cannot_be_run(text: str, named: str) -> None:
    with pytest.raises(Fault, match=named):
        parse_command(text)
    for words in (("x", "--port"), ("x", "--port", "99999"), ("x", "--port=0")):
        with pytest.raises(Fault, match="say where it listens"):
            Command(words).with_port()


def test_each_side_is_as_early_as_the_other() -> None:
    assert order(5) == [0, 1, 1, 0, 0, 1, 1, 0, 0, 1]
    assert sum(n for n, side in enumerate(order(4)) if side) == sum(n for n, side in enumerate(order(4)) if not side)


# ---------------------------------------------------------------- all of it, with servers that only pretend


class Pretend:
    """Stands for a server: answers the load, and leaves the store that a recorded one would have left.

    ``slower`` is in the command's environment, as measure:share; 1 % is the runs' noise.
    """

    started: list[tuple[str, ...]]
    rng: np.random.Generator

    def __init__(
        self, command: list[str], port: int, store: Path, log: Path, environment: dict[str, str], tick: Any
    ) -> None:  # fmt: skip
        self.command, self.store, self.environment = command, store, environment
        self._stack = ExitStack()
        tick("starting")

    def __enter__(self) -> Pretend:
        Pretend.started.append(tuple(self.command))
        self.fake = self._stack.enter_context(
            serving(Fake(refused=frozenset({5}) if "BROKEN" in self.environment else frozenset()))
        )
        return self

    @property
    def url(self) -> str:
        return self.fake.url

    def left(self) -> None:
        """The server has ended."""

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        key, _, share = self.environment.get("SLOWER", "ttft_ms:0").partition(":")
        speed = np.exp(self.rng.normal(0, 0.01))
        records = []
        for number, (headers, body) in enumerate(self.fake.asked):
            ms = {name: base * speed * (1 + float(share) * (name == key)) for name, base in BASE_MS.items()}
            record = request(
                number, external_id=headers["x-request-id"], prompt_tokens=400, output_tokens=body["max_tokens"],
                start_unix_ns=time.time_ns(), e2e_ms=ms["e2e_ms"], ttft_ms=ms["ttft_ms"],
                unattributed_ms=ms["unattributed"], token_times_ms=[0.0, ms["itl_ms"]],
                status="error" if number - self.fake.ahead in self.fake.refused else "ok",
            )  # fmt: skip
            for stage in record.stages:
                stage.duration_ms = ms[stage.key]
            records.append(record)
        with StoreWriter(self.store) as writer:
            writer.write_run(
                RunRecord(
                    "session", "paper", "1", self.environment.get("MODEL", "tiny"), {"max_num_seqs": len(self.command)}
                )
            )
            writer.write_requests([] if "BLIND" in self.environment else records)
        self.left()


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Pretend]]:
    before = signal.getsignal(signal.SIGTERM)
    Pretend.started, Pretend.rng = [], np.random.default_rng(1)
    monkeypatch.setattr("stagetrace.gate.ab.Served", Pretend)
    yield Pretend
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def stagetrace(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return Cli(monkeypatch, capfd)


LOAD = ("--requests", "8", "--output-tokens", "2", "--prompt-tokens", "50")


def test_two_servers_in_turn(stagetrace: Cli, pretend: type[Pretend], tmp_path: Path) -> None:
    one, other = (f"{sys.executable} {name} --port {{port}}" for name in ("one", "other extra"))
    code, out, err = stagetrace("gate", "--ab", one, f"SLOWER=prefill:0.2 {other}", *LOAD, "--stores", "kept")
    assert code == 1, (out, err)
    assert out.splitlines()[-1].startswith("FAIL: prefill is 2")
    # Where nobody watches a bar, a line for each run.
    said = err.splitlines()
    assert said[:2] == ["stagetrace: run 1 of 10 (A)", "stagetrace: run 2 of 10 (B)"]
    assert len(said) == 11 and said[-1] == "stagetrace: the runs are in kept"
    assert "differs: max_num_seqs 4 → 5" in out, "two servers may differ on purpose"
    assert [words[1] for words in pretend.started] == ["one", "other", "other", "one"] * 2 + ["one", "other"]
    kept = sorted(path.name for path in (tmp_path / "kept").glob("*.db"))
    assert kept[:3] == ["01-a.db", "02-b.db", "03-b.db"] and len(kept) == 10

    # What was kept is judged again, and as it was.
    files = [[str(path) for path in sorted((tmp_path / "kept").glob(f"*-{side}.db"))] for side in "ab"]
    again = stagetrace("gate", "--baseline", *files[0], "--current", *files[1], "--allow", "max_num_seqs")
    assert (again[0], again[1].splitlines()[-1]) == (1, out.splitlines()[-1])
    said = stagetrace("gate", "--ab", one, other, "--stores", "kept")
    assert said[0] == 2 and "yet to be made" in said[2] and "the runs are in" not in said[2]


def test_the_same_server_twice(stagetrace: Cli, pretend: type[Pretend]) -> None:
    same = shlex.join([sys.executable, "--port", "{port}"])
    code, out, _ = stagetrace("gate", "--ab", same, same, *LOAD)
    assert code == 0 and out.splitlines()[-1].startswith("PASS")
    assert len(list(Path().glob("stagetrace-gate-*/*.db"))) == 10


def test_requests_that_fail_are_no_measurement(stagetrace: Cli, pretend: type[Pretend]) -> None:
    same = f"{sys.executable} --port {{port}}"
    code, out, err = stagetrace("gate", "--ab", same, f"BROKEN=1 {same}", *LOAD)
    *_, said = err.splitlines()
    assert (code, out) == (2, "")
    assert "run 2 of 10 (B): 1 of 8 requests failed (HTTP 400 BadRequestError: too long)" in said
    assert len(pretend.started) == 2


def test_what_is_not_comparable_is_said_after_the_first_run_of_each(stagetrace: Cli, pretend: type[Pretend]) -> None:
    same = f"{sys.executable} --port {{port}}"
    code, out, err = stagetrace("gate", "--ab", same, f"MODEL=large {same}", *LOAD, "--stores", "kept")
    *_, kept, said = err.splitlines()
    assert (code, out, len(pretend.started)) == (2, "", 2)
    assert "not comparable: model large against tiny" in said and kept.startswith("stagetrace: the runs are in kept")


def test_a_server_that_is_not_recorded_has_no_stagetrace(stagetrace: Cli, pretend: type[Pretend]) -> None:
    same = f"{sys.executable} --port {{port}}"
    code, _, err = stagetrace("gate", "--ab", f"BLIND=1 {same}", same, *LOAD)
    assert (code, len(pretend.started)) == (2, 1)
    assert f"nothing was recorded: is stagetrace installed where {sys.executable} is?" in err.splitlines()[-1]


def test_what_was_measured_before_an_interruption_can_be_judged(
    stagetrace: Cli, pretend: type[Pretend], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        if len(pretend.started) == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(pretend, "left", interrupted)
    one, other = (f"{sys.executable} {name} --port {{port}}" for name in ("one", "other extra"))
    code, _, err = stagetrace("gate", "--ab", one, other, *LOAD, "--stores", "kept")
    *_, command, kept = err.splitlines()
    assert code == 130 and kept == "stagetrace: the runs are in kept"
    assert Path("kept/07-b.part").exists() and not Path("kept/07-b.db").exists()
    words = command.partition("can be judged: stagetrace ")[2].split()
    assert words[-2:] == ["--allow", "max_num_seqs"], "which differs on purpose"
    files = [[str(path) for path in sorted(Path().glob(word))] if "*" in word else [word] for word in words]
    code, out, _ = stagetrace(*(word for group in files for word in group))
    assert code == 0 and "over 3 runs a side" in out


def test_nothing_is_said_to_be_whole_where_nothing_is(
    stagetrace: Cli, pretend: type[Pretend], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pretend, "left", interrupted)
    same = f"{sys.executable} --port {{port}}"
    code, _, err = stagetrace("gate", "--ab", same, same, *LOAD, "--stores", "kept")
    assert code == 130 and err.splitlines()[1:] == ["stagetrace: the runs are in kept"]


def test_a_server_told_not_to_record(stagetrace: Cli, pretend: type[Pretend], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretend, "__exit__", lambda self, *_: self._stack.close())
    same = f"{sys.executable} --port {{port}}"
    code, _, err = stagetrace("gate", "--ab", same, same, *LOAD)
    assert code == 2 and "run 1 of 10 (A): it answered, but nothing was recorded" in err


def test_a_request_in_twenty_may_fail_and_is_named(stagetrace: Cli, pretend: type[Pretend]) -> None:
    same = f"{sys.executable} --port {{port}}"
    load = ("--requests", "24", *LOAD[2:], "--stores", "kept")
    code, out, _ = stagetrace("gate", "--ab", same, f"BROKEN=1 {same}", *load)
    assert code == 0
    assert "kept/02-b.db: 1 of 24 requests not answered, left out" in out
    assert "kept/01-a.db" not in out


def test_what_is_wrong_is_said_before_anything_is_started(
    stagetrace: Cli, pretend: type[Pretend], tmp_path: Path
) -> None:
    same = f"{sys.executable} --port {{port}}"
    assert "say where it listens" in stagetrace.refused("gate", "--ab", same, sys.executable)
    assert "not a mix" in stagetrace.refused("gate", "--ab", same, same, "--prompt-tokens", "many")
    assert "or --ab CMD_A CMD_B" in stagetrace.refused("gate", "--ab", same, same, "--current", "x.db")
    assert "write it as ttft_p95" in stagetrace.refused("gate", "--ab", same, same, "--budget", "fast")
    assert "no such field" in stagetrace.refused("gate", "--ab", same, same, "--allow", "colour")
    assert "no directory" in stagetrace.refused("gate", "--ab", same, same, "--markdown", "gone/summary.md")
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        said = stagetrace.refused("gate", "--ab", same, f"{sys.executable} --port {port}")
        assert f"port {port} is taken" in said
    assert not pretend.started and not os.listdir(tmp_path)


def test_two_gates_of_one_second_have_a_folder_each(
    stagetrace: Cli, pretend: type[Pretend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Then(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Then:
            return cls(2026, 11, 30, 12, tzinfo=tz)

    monkeypatch.setattr(sys.modules["stagetrace.commands.gate"], "datetime", Then)  # the name is the command's, too
    same = f"{sys.executable} --port {{port}}"
    for folder in ("stagetrace-gate-20261130-120000", "stagetrace-gate-20261130-120000-2"):
        assert f"the runs are in {folder}\n" in stagetrace("gate", "--ab", same, same, "--runs", "1", *LOAD)[2]


def test_plans_are_the_load_of_both() -> None:
    settings = Plan(concurrency=8, warmup=3).settings("http://h:1")
    assert (settings.warmup, settings.concurrency, settings.requests, settings.rate) == (8, 8, 50, None)
