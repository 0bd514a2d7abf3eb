"""A server for the length of a ``with`` block: its port, its start, and its end whatever it does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from stagetrace.faults import Fault
from stagetrace.gate.ab import Plan
from stagetrace.loadgen import run_load
from stagetrace.serve import HOST, Served, free_port, port_is_free
from tests.unit.helpers import plain_environment, wait_until

REPO = Path(__file__).resolve().parents[2]
#: A server that answers as one should, has a child of its own, and ends when it is told to, or never.
SERVER = """
import os, signal, subprocess, sys, time
from tests.unit.fake_server import Fake, Handler, _Server
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, "self", os.getpid(), flush=True)
if "--compiler" in sys.argv:
    code = "import signal, time; signal.signal(15, lambda *_: exit(open('removed', 'w').close()));"
    code += "open('compiling', 'w').close(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], cwd=sys.argv[-1])
if "--deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--forgetful" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
class Here(Handler):
    fake = Fake(key="secret" if "--locked" in sys.argv else "")
_Server(("127.0.0.1", int(sys.argv[1])), Here).serve_forever()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# ---------------------------------------------------------------- ports


@pytest.mark.parametrize(
    ("given_out", "ports"),
    [
        ("32768\t60999\n", range(22768, 32768)),
        ("10000 65000", range(1024, 10000)),
        ("1024 60999", range(61000, 65536)),
        ("1024 65535", range(1024, 65536)),
        ("", range(22768, 32768)),
    ],
)
def test_a_free_port_is_none_that_the_kernel_may_give_to_a_connection(
    given_out: str, ports: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text(given_out)
    monkeypatch.setattr("stagetrace.serve._GIVEN_OUT", tmp_path / "range")
    found = [free_port() for _ in range(50)]
    assert all(port_is_free(port) and port in ports for port in found) and len(set(found)) > 40


def test_a_taken_port_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr("stagetrace.serve._ports", lambda: range(port, port + 1))
    assert free_port() == port
    with socket.create_server((HOST, port)), pytest.raises(Fault, match=rf"no free port on {HOST} from {port} to"):
        free_port()


# ---------------------------------------------------------------- one server


def served(folder: Path, *arguments: str, port: int = 0) -> Served:
    port = port or free_port()
    environment = {"PYTHONPATH": str(REPO)}
    return Served(
        [sys.executable, "-c", SERVER, str(port), *arguments], port, folder / "s.db", folder / "s.log", environment
    )  # fmt: skip


def test_a_server_is_there_and_then_all_of_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGETRACE", "0")
    with served(tmp_path) as server:
        child = int((tmp_path / "s.log").read_text().split()[1])
        assert alive(child) and not port_is_free(server.port)
        assert "STAGETRACE" not in server.environment
    assert port_is_free(server.port)
    wait_until(lambda: not alive(child), "the server's child has ended")
    assert (tmp_path / "s.db").is_file()


def test_a_server_that_wants_a_key_is_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAGETRACE_API_KEY", raising=False)
    with served(tmp_path, "--locked") as server:
        with pytest.raises(Fault, match="HTTP 401: it wants another key, or one at all: set STAGETRACE_API_KEY"):
            run_load(Plan(requests=2).settings(server.url), lambda *_: None)
        monkeypatch.setenv("STAGETRACE_API_KEY", "secret")
        assert run_load(Plan(requests=2).settings(server.url), lambda *_: None).exchanges


def test_a_server_that_will_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagetrace.serve.STOP_S", 0.2)
    with served(tmp_path, "--deaf") as server:
        child = int((tmp_path / "s.log").read_text().split()[1])
    wait_until(lambda: not alive(child) and port_is_free(server.port), "nothing is left of it")


def test_what_a_server_leaves_behind_may_clean_up(tmp_path: Path) -> None:
    """A compiler, say: killed at once it leaves half a file in a cache, and the next server does not start."""
    with served(tmp_path, "--compiler", str(tmp_path)):
        wait_until(lambda: (tmp_path / "compiling").exists(), "the compiler is at work")
    assert (tmp_path / "removed").exists()


def test_a_server_that_misses_the_first_signal_gets_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagetrace.serve.TOLD_AGAIN_S", 0.3)
    monkeypatch.setattr("stagetrace.serve.STOP_S", 600.0)
    with served(tmp_path, "--forgetful") as server:
        server.tick = (phases := []).append  # type: ignore[func-returns-value]
    assert port_is_free(server.port) and set(phases) == {"ending"}


def test_who_will_not_wait_for_the_end_of_a_server_ends_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagetrace.serve.STOP_S", 600.0)

    def impatient(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), served(tmp_path, "--deaf") as server:
        child = int((tmp_path / "s.log").read_text().split()[1])
        server.tick = impatient
    wait_until(lambda: not alive(child) and port_is_free(server.port), "nothing is left of it")


def test_what_is_no_server_of_a_model_is_not_waited_for(tmp_path: Path) -> None:
    port = free_port()
    words = [sys.executable, "-m", "http.server", str(port), "--bind", HOST]
    other = Served(words, port, tmp_path / "s.db", tmp_path / "s.log")
    with pytest.raises(Fault, match=rf"port {port} answers HTTP 404 on /v1/models: that is no OpenAI-comp"), other:
        pass
    wait_until(lambda: port_is_free(port), "it is gone")


def test_why_a_server_has_ended_is_its_last_error(tmp_path: Path) -> None:
    code = "print('ImportError: main.so: file too short\\n  warnings.warn(x)'); raise SystemExit(1)"
    failing = Served([sys.executable, "-c", code], free_port(), tmp_path / "s.db", tmp_path / "s.log")
    with pytest.raises(Fault, match=r"the last error in it: ImportError: main\.so: file too short$"), failing:
        pass


def test_a_server_that_is_never_ready_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagetrace.serve._answer", lambda _: 500)
    monkeypatch.setattr("stagetrace.serve.READY_S", 0.1)
    with pytest.raises(Fault, match=r"did not answer within 0 s, but with HTTP 500 on /v1/models"), served(tmp_path):
        pass


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    failing = Served(
        [sys.executable, "-c", "raise SystemExit('no model there')"], free_port(), tmp_path / "s.db", tmp_path / "s.log"
    )
    with (
        pytest.raises(Fault, match=r"the server ended with 1; its log is .*s\.log; the last line: no model there"),
        failing,
    ):
        pass
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Fault, match=f"port {port} is taken"), served(tmp_path, port=port):
            pass


def test_who_starts_servers_and_is_killed_leaves_none(tmp_path: Path) -> None:
    code = f"""
        import time
        from pathlib import Path
        from tests.unit.test_serve import served
        with served(Path({str(tmp_path)!r})):
            print("up", flush=True)
            time.sleep(600)
    """
    environment = {**plain_environment(), "PYTHONPATH": str(REPO)}
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    with starter:
        assert starter.stdout is not None and starter.stdout.readline() == "up\n"
        _, child, _, server = (tmp_path / "s.log").read_text().split()[:4]
        starter.kill()
    wait_until(lambda: not alive(int(server)), "stagetrace run, told of its parent's death, has ended the server")
    os.kill(int(child), signal.SIGKILL)  # what a server leaves behind is the server's to end; only we would have
