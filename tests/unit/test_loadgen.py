"""The load generator: what it sends follows from the seed, and what it reports is what happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from stagetrace.faults import Fault
from stagetrace.loadgen.mix import parse_mix
from stagetrace.loadgen.plan import Ask, Calibration, Texts, calibrated, plan
from stagetrace.loadgen.settings import parse_url
from stagetrace.loadgen.wire import Broken, Response, events
from stagetrace.propagation import parse
from stagetrace.serve import free_port
from tests.unit.fake_server import Fake, serving, text
from tests.unit.helpers import DEADLINE_S, plain_environment, wait_until
from tests.unit.test_address import UNUSABLE
from tests.unit.test_cli import Cli

Start = Callable[..., Fake]


@pytest.fixture
def server() -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda **how: stack.enter_context(serving(Fake(**how)))


@pytest.fixture
def stagetrace(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "2000")
    return Cli(monkeypatch, capfd)


def client_file(stagetrace: Cli, *arguments: str, code: int = 0) -> dict[str, Any]:
    ended, out, err = stagetrace("load", *arguments, "-o", "client.json")
    assert (ended, err) == (code, ""), out
    document: dict[str, Any] = json.loads(Path("client.json").read_text())
    return document


# ---------------------------------------------------------------- mixes and plans


@pytest.mark.parametrize(
    ("written", "possible"),
    [
        ("400", {400}),
        ("1-3", {1, 2, 3}),
        ("200:0.7,2000:0.3", {200, 2000}),
        ("7,9", {7, 9}),
        ("5:0,6:2", {6}),
        (" 1 - 2 : .5 , 9:1 ", {1, 2, 9}),
    ],
)
def test_a_mix_draws_its_lengths(written: str, possible: set[int]) -> None:
    mix, rng = parse_mix("--prompt-tokens", written), random.Random(1)
    assert {mix.draw(rng) for _ in range(500)} == possible
    assert mix.longest == max(possible)


def test_weights_are_shares() -> None:
    mix, rng = parse_mix("--prompt-tokens", "200:0.7,2000:0.3"), random.Random(1)
    assert sum(mix.draw(rng) == 200 for _ in range(10_000)) == pytest.approx(7000, abs=200)


@pytest.mark.parametrize("written", ["", "x", "0", "5-2", "-5", "5:", "5:-1", "5:0", "1,", "99999999", "1.5", "5:nan"])
def test_what_is_no_mix(stagetrace: Cli, written: str) -> None:
    with pytest.raises(Fault, match="--prompt-tokens"):
        parse_mix("--prompt-tokens", written)
    assert "--output-tokens" in stagetrace.refused("load", "--url", "http://127.0.0.1:1", f"--output-tokens={written}")


def test_a_plan_follows_from_its_seed() -> None:
    prompt, output = parse_mix("p", "100-500"), parse_mix("o", "1-9")
    first, again, other = (list(plan(seed, prompt, output, 5.0, 50)) for seed in (1, 1, 2))
    assert first == again != other
    closed = list(plan(1, prompt, output, None, 50))
    assert [a.prompt_tokens for a in closed] == [a.prompt_tokens for a in first], "whatever the loop"
    assert [a.due_s for a in closed] == [None] * 50
    assert list(islice(plan(1, prompt, output, 5.0, None), 50)) == first, "whatever ends it"


def test_arrivals_are_poisson() -> None:
    mix = parse_mix("p", "1")
    due = [ask.due_s or 0.0 for ask in plan(3, mix, mix, 20.0, 4001)]
    gaps = sorted(b - a for a, b in pairwise(due))
    assert due[0] == 0 and gaps[0] > 0
    assert sum(gaps) / 4000 == pytest.approx(1 / 20, rel=0.05)
    # The median of an exponential distribution is ln 2 of its mean.
    assert gaps[2000] == pytest.approx(0.6931 / 20, rel=0.08)


def test_calibration_sees_what_a_token_is() -> None:
    assert calibrated([(20, 11), (3000, 607)]) == Calibration(5.0, 7.0, "usage")
    assert calibrated([(20, 11), (3000, None)]) == calibrated([]) == calibrated([(20, 9), (3000, 9)]) == Calibration()
    assert Calibration(5.0, 7.0).characters(107) == 500
    assert Calibration(5.0, 7.0).characters(3) == 1


def test_prompts_differ_from_the_start_unless_they_share_it() -> None:
    texts = Texts(1, Calibration(5.0))
    alone = [texts.prompt(Ask(index, 100, 1, None), 0) for index in range(200)]
    assert {len(prompt) for prompt in alone} == {500}
    assert len({prompt[:40] for prompt in alone}) == 200
    shared = [texts.prompt(Ask(index, 100, 1, None), 60) for index in range(20)]
    assert len({prompt[:300] for prompt in shared}) == 1
    assert len({prompt[300:340] for prompt in shared}) == 20
    assert {len(prompt) for prompt in shared} == {500}
    assert len(texts.prompt(Ask(0, 10, 1, None), 60)) == 50, "no longer than asked for"
    assert alone == [Texts(1, Calibration(5.0)).prompt(Ask(index, 100, 1, None), 0) for index in range(200)]
    assert len(texts.prompt(Ask(0, 300_000, 1, None), 0)) == 1_500_000


# ---------------------------------------------------------------- HTTP


def response(*pieces: bytes) -> Response:
    made = Response()
    for piece in pieces:
        made.feed(piece)
    return made


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nab\nc\r\n3;x=y\r\nd\ne\r\n0\r\n\r\n"


def test_a_chunked_answer_wherever_it_is_cut() -> None:
    for at in range(len(CHUNKED) + 1):
        made = response(CHUNKED[:at], CHUNKED[at:])
        assert (made.status, made.complete, made.take(), made.body()) == (200, True, b"ab\ncd\n", b"e")
    made = response(*(CHUNKED[i : i + 1] for i in range(len(CHUNKED))))
    assert made.complete and made.body() == b"ab\ncd\ne"
    assert not response(CHUNKED[:-1]).complete
    assert response(CHUNKED[:-2] + b"Trailer: x\r\n\r\n").complete


def test_answers_with_a_length_and_without() -> None:
    whole = b"HTTP/1.1 404 Not Found\r\ncontent-length: 3\r\n\r\nabcmore"
    made = response(whole)
    assert (made.status, made.complete, made.body()) == (404, True, b"abc")
    assert not response(whole[:-6]).complete
    assert response(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 204 No\r\nContent-Length: 0\r\n\r\n").complete
    until_closed = response(b"HTTP/1.0 200 OK\r\n\r\nabc")
    assert not until_closed.complete
    until_closed.eof()
    assert until_closed.complete and until_closed.body() == b"abc"


@pytest.mark.parametrize(
    "data", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", CHUNKED.replace(b"4\r\nab", b"q\r\nab"), b"x" * 70_000]
)
def test_what_is_no_answer(data: bytes) -> None:
    with pytest.raises(Broken):
        response(data)


def test_events() -> None:
    assert events(b': hello\r\ndata: {"a": 1}\r\n\ndata:{}\nevent: x\ndata: [DONE]\n') == [{"a": 1}, {}, None]
    for line in (b"data: nonsense\n", b"data: 5\n", b"data: \xff\n"):
        with pytest.raises(Broken):
            events(line)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:y", "http://x:99999"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(Fault, match="--url"):
        parse_url(url)


def test_addresses() -> None:
    plain, secure = parse_url("http://h:8000/v1/"), parse_url("https://h/base/v1")
    assert (plain.host, plain.port, plain.base, plain.tls) == ("h", 8000, "", None)
    assert (secure.port, secure.base) == (443, "/base") and secure.tls is not None
    assert parse_url("http://[::1]:80").netloc == "[::1]:80"


# ---------------------------------------------------------------- against a server


def test_a_closed_loop(stagetrace: Cli, server: Start) -> None:
    fake = server(pause_s=0.01, metrics='cache_info{enable_prefix_caching="True"} 1')
    arguments = ("--url", fake.url, "--concurrency", "4", "--requests", "12", "--prompt-tokens", "100-300")
    document = client_file(stagetrace, *arguments, "--output-tokens", "3-5", "--seed", "7", "--warmup", "2")
    assert (document["model"], document["loop"], document["seed"]) == ("paper", {"concurrency": 4}, 7)
    assert document["calibration"] == {"characters_per_token": 5.0, "overhead_tokens": 7.0, "source": "usage"}
    requests = document["requests"]
    assert [r["index"] for r in requests] == list(range(12))
    assert all(r["prompt_tokens"] == r["asked_prompt_tokens"] for r in requests), "the words need no tokenizer"
    assert all(r["output_tokens"] == r["asked_output_tokens"] == len(r["chunk_ns"]) for r in requests)
    for r in requests:
        assert r["sent_ns"] < r["first_text_ns"] == r["chunk_ns"][0] <= r["chunk_ns"][-1] <= r["end_ns"]
        assert (r["status"], r["error"], r["finish_reason"]) == (200, None, "length")
        assert (r["first_text_ns"] - r["sent_ns"]) / 1e6 >= 10
    assert len(fake.asked) == 2 + 2 + 12
    assert len(document["warmup"]) == 4
    summary = document["summary"]
    assert (summary["requests"], summary["failed"], summary["prefix_caching"]) == (12, 0, True)
    assert 2 < summary["concurrency"] <= 4
    assert summary["request_rate"] == pytest.approx(12 / summary["window_s"])


def test_ids_and_traceparents_are_each_requests_own(stagetrace: Cli, server: Start) -> None:
    for flag, options in (("01", ()), ("00", ("--unsampled",))):
        fake = server()
        document = client_file(stagetrace, "--url", fake.url, "--requests", "5", *options)
        sent = {headers["x-request-id"]: headers["traceparent"] for headers, _ in fake.asked}
        noted = {r["request_id"]: r["traceparent"] for r in [*document["warmup"], *document["requests"]]}
        assert sent == noted and len(sent) == len(set(sent.values())) == 7
        parents = [parse(header) for header in sent.values()]
        assert all(
            parent is not None and header.endswith(flag) for parent, header in zip(parents, sent.values(), strict=True)
        )


def test_the_same_seed_sends_the_same(stagetrace: Cli, server: Start) -> None:
    def sent(*options: str) -> list[str]:
        fake = server()
        client_file(stagetrace, "--url", fake.url, "--requests", "6", "--prompt-tokens", "50-90", *options)
        return fake.texts()[2:]

    assert sent() == sent("--seed", "0") != sent("--seed", "1")
    shared = sent("--shared-prefix", "40")
    assert len({prompt[:160] for prompt in shared}) == 1 and len(set(shared)) == 6


@pytest.mark.parametrize("options", [(), ("--no-stream",), ("--completions",), ("--completions", "--no-stream")])
def test_what_is_asked_for(stagetrace: Cli, server: Start, options: tuple[str, ...]) -> None:
    fake = server()
    document = client_file(stagetrace, "--url", fake.url + "/v1", "--requests", "2", "--output-tokens", "4", *options)
    body = fake.asked[-1][1]
    assert ("prompt" in body) is ("--completions" in options)
    assert body["stream"] is ("--no-stream" not in options) is document["stream"]
    assert (body["max_tokens"], body["model"], body["ignore_eos"]) == (4, "paper", True)
    request = document["requests"][0]
    assert (request["first_text_ns"] is None) is ("--no-stream" in options), (
        "without a stream nobody sees the first text"
    )
    assert request["output_tokens"] == 4 and request["end_ns"] > request["sent_ns"]


def test_an_open_loop_sends_when_it_is_due(stagetrace: Cli, server: Start) -> None:
    fake = server(pause_s=0.1)
    document = client_file(stagetrace, "--url", fake.url, "--rate", "50", "--requests", "20", "--output-tokens", "2")
    requests = document["requests"]
    assert [r["due_ns"] for r in requests] == sorted(r["due_ns"] for r in requests)
    assert all(r["sent_ns"] >= r["due_ns"] for r in requests)
    assert document["loop"] == {"rate": 50.0}
    assert document["summary"]["concurrency"] > 4, "answers are not waited for"
    assert document["summary"]["late_ms"]["p50"] < 50


@pytest.mark.parametrize("loop", [("--rate", "40"), ("--concurrency", "3")])
def test_a_load_may_end_by_the_clock(stagetrace: Cli, server: Start, loop: tuple[str, ...]) -> None:
    fake = server(pause_s=0.01)
    document = client_file(stagetrace, "--url", fake.url, *loop, "--duration", "0.5", "--output-tokens", "2")
    requests = document["requests"]
    assert len(requests) >= 5 and document["summary"]["failed"] == 0
    began = requests[0]["due_ns"] or requests[0]["sent_ns"]
    assert all((r["due_ns"] or r["sent_ns"]) - began <= 0.6e9 for r in requests)


def test_a_server_that_tells_no_usage(stagetrace: Cli, server: Start) -> None:
    document = client_file(stagetrace, "--url", server(usage=False).url, "--requests", "1")
    assert document["calibration"]["source"] == "assumed"
    assert document["requests"][0]["prompt_tokens"] is None
    assert document["summary"]["prompt_tokens"]["p50"] is None
    assert document["summary"]["output_tokens_per_s"] is None


# ---------------------------------------------------------------- what goes wrong


def test_failed_requests_are_counted_and_shown(stagetrace: Cli, server: Start) -> None:
    how = {"refused": frozenset({1, 2}), "broken": frozenset({4}), "failing": frozenset({5})}
    document = client_file(stagetrace, "--url", server(**how).url, "--requests", "8", code=1)
    wanted = {"HTTP 400 BadRequestError": 2, "broken off": 1, "InternalServerError": 1}
    assert document["summary"]["errors"] == wanted
    assert (document["summary"]["requests"], document["summary"]["failed"]) == (4, 4)
    assert "too" not in json.dumps(document["requests"]), "what a server says may echo a prompt"
    code, out, err = stagetrace("load", "--url", server(**how).url, "--requests", "8")
    assert (code, err) == (1, "")
    assert "4 requests failed: 2 × HTTP 400 BadRequestError" in out and "(too long)" in out


def test_a_request_that_takes_too_long(stagetrace: Cli, server: Start) -> None:
    fake = server(pause_s=0.05)
    arguments = ("--url", fake.url, "--requests", "2", "--output-tokens", "100", "--timeout", "0.3")
    assert client_file(stagetrace, *arguments, code=1)["summary"]["errors"] == {"timeout": 2}


def test_nobody_answers(stagetrace: Cli) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert f"--url {url}: no server answers there (Connection refused)" in stagetrace.refused("load", "--url", url)


def test_a_model_that_is_not_there(stagetrace: Cli, server: Start) -> None:
    fake = server(models=("one", "two"))
    said = stagetrace.refused("load", "--url", fake.url, "--model", "three")
    assert "unknown model three" in said and "one, two" in said
    assert client_file(stagetrace, "--url", fake.url, "--model", "two", "--requests", "1")["model"] == "two"
    assert "--model" in stagetrace.refused("load", "--url", server(models=()).url)


def test_a_server_that_refuses_all(stagetrace: Cli, server: Start) -> None:
    fake = server(ahead=0, refused=frozenset(range(9)))
    said = stagetrace.refused("load", "--url", fake.url)
    assert "HTTP 400 BadRequestError: too long" in said


def test_lengths_that_the_model_does_not_take(stagetrace: Cli, server: Start) -> None:
    fake = server(max_model_len=512)
    said = stagetrace.refused("load", "--url", fake.url, "--prompt-tokens", "100:9,500:1", "--output-tokens", "20")
    assert "520" in said and "512" in said
    assert fake.asked == []


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((), "--url"),
        (("--url", "nonsense"), "--url"),
        (("--url", "http://h", "--rate", "1", "--concurrency", "1"), "--concurrency"),
        (("--url", "http://h", "--requests", "1", "--duration", "1"), "--duration"),
        (("--url", "http://h", "--rate", "0"), "--rate"),
        (("--url", "http://h", "--rate", "nan"), "--rate"),
        (("--url", "http://h", "--duration", "-1"), "--duration"),
        (("--url", "http://h", "--requests", "0"), "--requests"),
        (("--url", "http://h", "-o", "gone/client.json"), "gone"),
        (("--url", "http://h", "-o", "other"), "other"),
        (("--url", "http://h", "--prompt-tokens", "90:1,50-60:1", "--shared-prefix", "50"), "a prompt of 50 tokens"),
    ],
)
def test_what_cannot_be_sent(stagetrace: Cli, arguments: tuple[str, ...], names: str) -> None:
    Path("other").write_text("somebody's letter")
    assert names in stagetrace.refused("load", *arguments)
    assert Path("other").read_text() == "somebody's letter"


@pytest.mark.parametrize("url", [*UNUSABLE, "http://127.0.0.1:1/é"])
def test_what_is_no_server_s_address(stagetrace: Cli, url: str) -> None:
    assert "not a server's address; write it as http://HOST:PORT" in stagetrace.refused("load", "--url", url)


def test_what_is_ours_in_the_report_is_explained(stagetrace: Cli, server: Start) -> None:
    code, out, _ = stagetrace("load", "--url", server().url, "--requests", "2", "--rate", "50")
    assert code == 0 and "late_ms: sent later than due" in out and "chunk_gap_ms: between two pieces" in out
    code, out, _ = stagetrace("load", "--url", server().url, "--requests", "2")
    assert code == 0 and "late_ms" not in out


def test_a_password_in_the_address_is_sent_and_never_shown(
    stagetrace: Cli, server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STAGETRACE_API_KEY", raising=False)
    fake = server()
    url = fake.url.replace("://", "://user:sec%20ret@")
    code, out, err = stagetrace("load", "--url", url, "--requests", "1", "-o", "client.json")
    assert code == 0 and {headers["authorization"] for headers, _ in fake.asked} == {"Basic dXNlcjpzZWMgcmV0"}
    refused = stagetrace.refused("load", "--url", "http://user:sec%20ret@127.0.0.1:1")
    for seen in (out, err, Path("client.json").read_text(), refused):
        assert "ret@" not in seen and "user:" not in seen
    monkeypatch.setenv("STAGETRACE_API_KEY", "clé")
    assert "STAGETRACE_API_KEY" in stagetrace.refused("load", "--url", fake.url)


def test_an_older_client_file_is_replaced(stagetrace: Cli, server: Start) -> None:
    fake = server()
    first = client_file(stagetrace, "--url", fake.url, "--requests", "1")
    second = client_file(stagetrace, "--url", fake.url, "--requests", "1")
    assert first["requests"] != second["requests"]
    assert [path.name for path in Path().iterdir()] == ["client.json"]


def test_the_client_file_on_stdout_is_alone_there(stagetrace: Cli, server: Start) -> None:
    code, out, err = stagetrace("load", "--url", server().url, "--requests", "1", "-o", "-")
    assert code == 0 and len(json.loads(out)["requests"]) == 1
    assert "The client's side" in err and "1 requests in -" in err and not list(Path().iterdir())


def test_ctrl_c_keeps_what_was_done(server: Start, tmp_path: Path) -> None:
    fake = server(pause_s=0.02)
    command = [
        sys.executable, "-m", "stagetrace", "load", "--url", fake.url, "--concurrency", "3", "--requests", "9999",
        "--output-tokens", "5", "-o", str(tmp_path / "client.json"),
    ]  # fmt: skip
    with subprocess.Popen(
        command, env=plain_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: len(fake.asked) > 12, "requests are sent")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (130, "")
    assert "Interrupted" in out
    document = json.loads((tmp_path / "client.json").read_text())
    assert document["interrupted"] is True
    assert document["summary"]["requests"] >= 5
    assert set(document["summary"]["errors"]) <= {"cancelled"}
    assert len(document["requests"]) < 100


def test_a_key_is_sent_where_one_is_set(stagetrace: Cli, server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = server()
    monkeypatch.setenv("STAGETRACE_API_KEY", "secret")
    document = client_file(stagetrace, "--url", fake.url, "--requests", "1")
    assert {headers["authorization"] for headers, _ in fake.asked} == {"Bearer secret"}
    assert "secret" not in json.dumps(document)


def test_times_are_the_servers(stagetrace: Cli, server: Start) -> None:
    """Stamps are taken when bytes come, not when they are looked at."""
    fake = server(pause_s=0.05)
    started = time.monotonic_ns()
    document = client_file(stagetrace, "--url", fake.url, "--requests", "3", "--output-tokens", "4")
    for r in document["requests"]:
        assert started < r["sent_ns"] < r["end_ns"] < time.monotonic_ns()
        gaps = [(b - a) / 1e6 for a, b in zip(r["chunk_ns"], r["chunk_ns"][1:], strict=False)]
        assert min(gaps) > 40
    assert os.path.getsize("client.json") > 0 and text(fake.asked[-1][1])
