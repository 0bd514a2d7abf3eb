"""`stagetrace baseline` and `stagetrace gate`: files in, one verdict and one exit code out."""

from __future__ import annotations

import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from stagetrace.faults import Fault
from stagetrace.gate import output
from stagetrace.gate.baseline import SCHEMA, read_runs
from stagetrace.gate.compare import compare
from stagetrace.gate.decide import PASS
from stagetrace.gate.match import match
from stagetrace.gate.runs import Run
from stagetrace.gate.settings import Wishes
from stagetrace.model import RunRecord
from stagetrace.stages import STAGES
from stagetrace.store import StoreWriter
from tests.unit.helpers import DEADLINE_S
from tests.unit.simulated import Noise, runs_of
from tests.unit.stored import request
from tests.unit.test_cli import Cli

QUIET = Noise(0.008, 0.01, 0.02)
CONFIG = {"max_num_seqs": 8, "prefix_caching": 1, "device": "cpu", "kv_blocks": 100}


@pytest.fixture
def stagetrace(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return Cli(monkeypatch, capfd)


def store(path: Path, run: Run, config: Mapping[str, Any] = CONFIG, model: str = "tiny", driven: str = "c1") -> Path:
    """The run as `stagetrace run` and `stagetrace load` would have left it, warm-up included."""
    name = path.stem.encode().hex()[-8:].rjust(8, "0")
    records = [request(10**6, external_id=f"load-{driven}-{name}-warm1", start_unix_ns=run.started_unix_ns - 1)]
    for number, (key, each) in enumerate(run.requests.items()):
        ms = each.ms
        record = request(
            number, request_id=f"{path.stem}-{key}", external_id=f"load-{driven}-{name}-{key}", model=model,
            prompt_tokens=each.prompt_tokens, output_tokens=3, start_unix_ns=run.started_unix_ns + number * 10**9,
            e2e_ms=ms["e2e_ms"], ttft_ms=ms["ttft_ms"], queue_ms=ms["queue_ms"], prefill_ms=ms["prefill_ms"],
            unattributed_ms=ms["unattributed"], token_times_ms=[ms["itl_ms"] * n for n in range(3)],
        )  # fmt: skip
        for stage in record.stages:
            stage.duration_ms = ms[stage.key]
        records.append(record)
    with StoreWriter(path) as writer:
        writer.write_run(RunRecord("session", "paper", "1.0", model, dict(config), run.started_unix_ns))
        writer.write_requests(records)
    return path


@pytest.fixture
def stores(tmp_path: Path) -> Callable[..., tuple[list[str], list[str]]]:
    """Files of both sides: five runs each."""

    def make(slower: Mapping[str, float] | None = None, noise: Noise = QUIET, runs: int = 5, **current: Any) -> Any:
        sides = runs_of(7, runs, noise, slower or {}, prompts=12)
        return [
            [
                str(store(tmp_path / f"{side}{n}.db", run, **(current if side == "b" else {})))
                for n, run in enumerate(of)
            ]
            for side, of in zip("ab", sides, strict=True)
        ]

    return make


# ---------------------------------------------------------------- verdicts


def test_nothing_changed(stagetrace: Cli, stores: Callable[..., Any]) -> None:
    before, after = stores()
    code, out, err = stagetrace("gate", "--baseline", *before, "--current", *after)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("PASS: ")
    for fact in ("concurrency 1", "prefix caching on", "model tiny", "5 against 5 runs"):
        assert fact in out


def test_the_rate_of_false_alarms_is_promised_of_runs_in_turn_only(
    stagetrace: Cli, stores: Callable[..., Any], tmp_path: Path
) -> None:
    before, after = stores()
    said = stagetrace("gate", "--baseline", *before, "--current", *after)[1]
    assert "At most 1% of unchanged ones fail" in said and "in turn" not in said
    later = [replace(run, started_unix_ns=run.started_unix_ns + 10**14) for run in runs_of(7, 5, QUIET, {}, 12)[1]]
    after = [str(store(tmp_path / f"later{n}.db", run)) for n, run in enumerate(later)]
    said = stagetrace("gate", "--baseline", *before, "--current", *after)[1]
    assert "At most 1%" not in said and "sides not run in turn" in said
    found = json.loads(stagetrace("gate", "--baseline", *before, "--current", *after, "--json")[1])
    assert found["false_alarms_at_most"] is None


def test_a_file_on_stdout_is_alone_there(stagetrace: Cli, stores: Callable[..., Any]) -> None:
    before, after = stores()
    code, base, err = stagetrace("baseline", *before, "-o", "-")
    assert code == 0 and len(json.loads(base)["runs"]) == 5 and "5 runs with 60 requests in -" in err
    sides = ("gate", "--baseline", *before, "--current", *after)
    code, out, err = stagetrace(*sides, "--junit", "-")
    assert code == 0 and ElementTree.fromstring(out).tag == "testsuite" and err.splitlines()[-1].startswith("PASS: ")
    code, out, err = stagetrace(*sides, "--markdown", "/dev/fd/1")
    assert code == 0 and out.startswith("### stagetrace gate") and "PASS: " in err
    assert "--junit and --json" in stagetrace.refused(*sides, "--junit", "-", "--json")


def test_a_slower_stage_is_named(stagetrace: Cli, stores: Callable[..., Any], tmp_path: Path) -> None:
    before, after = stores({"prefill": 0.25, "prefill_ms": 0.25, "ttft_ms": 0.17})
    base = str(tmp_path / "base.json")
    code, out, err = stagetrace("baseline", *before, "-o", base)
    assert (code, out) == (0, "") and "5 runs with 60 requests" in err
    code, out, _ = stagetrace("gate", "--baseline", base, "--current", *after, "--explain")
    assert code == 1
    assert out.splitlines()[-1].startswith("FAIL: prefill is 2")
    assert "What carried the change: prefill" in out and "b0-0000" in out

    code, out, _ = stagetrace("gate", "--baseline", base, "--current", *after, "--json")
    found = json.loads(out)
    assert (code, found["exit_code"], found["verdict"], found["stage"]) == (1, 1, "FAIL", "prefill")
    rows = {row["key"]: row for row in found["measures"]}
    assert rows["prefill"]["change"] == pytest.approx(0.25, abs=0.03)
    assert rows["prefill"]["change_ms"] == pytest.approx(0.25 * rows["prefill"]["baseline_ms"], rel=0.2)
    assert rows["decode"]["verdict"] == "PASS" and rows["decode"]["part_of"] == "e2e_ms"
    assert {row["key"] for row in found["measures"]} >= {stage.key for stage in STAGES}
    assert found["requests"][0]["request_id"].startswith("b")

    # The other way round it is faster, and faster never fails.
    code, out, _ = stagetrace("gate", "--baseline", *after, "--current", *before)
    assert code == 0, out


def test_too_noisy_is_inconclusive_and_says_what_would_do(stagetrace: Cli, stores: Callable[..., Any]) -> None:
    before, after = stores(noise=Noise(0.10, 0.0, 0.02))
    files = ("gate", "--baseline", *before, "--current", *after)
    code, out, _ = stagetrace(*files)
    last = out.splitlines()[-1]
    assert code == 3 and last.startswith("INCONCLUSIVE: 5 runs a side cannot tell for ")
    assert "runs a side would decide" in last and "would have been caught" in last
    assert stagetrace(*files, "--inconclusive", "pass")[0] == 0
    assert stagetrace(*files, "--inconclusive", "fail")[0] == 1
    assert "--inconclusive maybe" in stagetrace.refused(*files, "--inconclusive", "maybe")


def test_noise_that_drowns_anything_is_no_figure(stagetrace: Cli, stores: Callable[..., Any]) -> None:
    before, after = stores(noise=Noise(0.8, 0.0, 0.02), runs=3)
    files = ("gate", "--baseline", *before, "--current", *after)
    assert max(row["detectable"] for row in json.loads(stagetrace(*files, "--json")[1])["measures"]) > 9
    assert "; even 10 times the " in stagetrace(*files)[1].splitlines()[-1]


def test_what_it_writes_spoils_nothing(stagetrace: Cli, stores: Callable[..., Any]) -> None:
    before, after = stores()
    assert stagetrace("baseline", *before, "-o", "base.json")[0] == 0
    Path("notes.txt").write_text("mine")
    Path("other.json").write_text('\n{"kind": 1}')
    Path("other.xml").write_text("<?xml version='1.0'?><x/>")
    for option, path, why in (
        ("--junit", before[0], "an input of this comparison"), ("--junit", "base.json", "an input of this comparison"),
        ("--markdown", after[1], "an input of this comparison"), ("--junit", "notes.txt", "something else"),
        ("--markdown", "other.json", "something else"), ("--markdown", "other.xml", "something else"),
    ):  # fmt: skip
        there = Path(path).read_bytes()
        files = ("--baseline", "base.json", before[0]) if path == before[0] else ("--baseline", "base.json")
        said = stagetrace.refused("gate", *files, "--current", *after, option, path)
        assert f"{option} {path}: " in said and why in said and Path(path).read_bytes() == there
    said = stagetrace.refused("gate", "--baseline", "base.json", "--current", *after, "--markdown", before[0])
    assert "there is something else" in said, "no text is appended to a store"


def test_what_is_of_ab_only_is_refused_with_runs(stagetrace: Cli, stores: Callable[..., Any]) -> None:
    before, after = stores()
    said = stagetrace.refused("gate", "--baseline", *before, "--current", *after, "--runs", "5")
    assert "--runs is of --ab only" in said


@pytest.mark.parametrize("columns", ["0", "1", "40"])
def test_a_narrow_terminal_costs_no_figure(
    columns: str, stagetrace: Cli, stores: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = stores()
    files = ("gate", "--baseline", *before, "--current", *after, "--explain")
    wide = stagetrace(*files)[1]
    monkeypatch.setenv("COLUMNS", columns)
    assert stagetrace(*files)[1] == wide and "ms" in wide


def test_a_closed_stdout_does_not_change_the_verdict(stores: Callable[..., Any], tmp_path: Path) -> None:
    before, after = stores()
    words = [sys.executable, "-m", "stagetrace", "gate", "--baseline", *before, "--current", *after]
    line = ["sh", "-c", f"{shlex.join(words)} >&-"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("more", [(), ("--json",), ("--junit", "-"), ("--markdown", "-")])
def test_a_reader_who_has_left_does_not_change_the_verdict(
    more: tuple[str, ...], stores: Callable[..., Any], tmp_path: Path
) -> None:
    """1 is that of a slowdown."""
    before, after = stores()
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "stagetrace", "gate", "--baseline", *before, "--current", *after, *more]
    try:
        done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, timeout=DEADLINE_S)
    finally:
        os.close(writer)
    assert done.returncode == 0, done.stderr


def test_one_run_a_side_is_inconclusive(stagetrace: Cli, stores: Callable[..., Any]) -> None:
    before, after = stores({"prefill": 3.0}, runs=1)
    code, out, _ = stagetrace("gate", "--baseline", *before, "--current", *after)
    too_few = "too few to know how far runs vary; begin with 5 a side"
    assert code == 3 and out.splitlines()[-1] == f"INCONCLUSIVE: 1 run a side: {too_few}"
    assert too_few in stagetrace("gate", "--baseline", *before, "--current", *after, "--junit", "-")[1]


def test_reports_for_machines(stagetrace: Cli, stores: Callable[..., Any], tmp_path: Path) -> None:
    before, after = stores({"decode": 0.3, "e2e_ms": 0.27})
    junit, summary = tmp_path / "gate.xml", tmp_path / "summary.md"
    summary.write_text("before\n")
    written = ("--junit", str(junit), "--markdown", str(summary), "--budget", "e2e_p50 <= 1ms")
    assert stagetrace("gate", "--baseline", *before, "--current", *after, *written)[0] == 1
    suite = ElementTree.parse(junit).getroot()
    cases = {case.get("name"): case for case in suite}
    assert cases["decode"].find("failure") is not None and cases["tokenize"].find("failure") is None
    assert cases["e2e_p50 <= 1ms"].find("failure") is not None
    assert suite.get("failures") == str(sum(case.find("failure") is not None for case in suite))
    text = summary.read_text()
    assert text.startswith("before\n### stagetrace gate: ❌ FAIL") and "| decode | **FAIL** |" in text
    assert "e2e_p50 &lt;= 1ms" in text


# ---------------------------------------------------------------- what cannot be compared: exit 2, one line


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"config": {**CONFIG, "max_num_seqs": 16}}, "max_num_seqs 16 against 8"),
        ({"config": {**CONFIG, "prefix_caching": 0}}, "prefix_caching 0 against 1"),
        ({"config": {**CONFIG, "gpu": "H200"}}, "gpu H200 against unknown"),
        ({"config": {**CONFIG, "kv_blocks": 50}}, "kv_blocks 50 against 100"),
        ({"model": "large"}, "model large against tiny"),
        ({"driven": "c8"}, "concurrency 8 against 1"),
        ({"driven": "r4"}, "request_rate 4.0 against unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_differs_is_named(
    changed: dict[str, Any], named: str, stagetrace: Cli, stores: Callable[..., Any]
) -> None:
    before, after = stores(**changed)
    files = ("gate", "--baseline", *before, "--current", *after)
    assert named in stagetrace.refused(*files)
    field = named.partition(" ")[0]
    if field != "request_rate":  # then concurrency differs, too
        code, out, _ = stagetrace(*files, "--allow", field)
        now, before_it = named.removeprefix(f"{field} ").split(" against ")
        assert code == 0 and f"differs: {field} {before_it} → {now}" in out
        if field in ("model", "concurrency"):  # the line above the table speaks of both sides
            assert f"{field} {before_it} → {now}, " in out.replace("\n", " ")
    assert "there are: " in stagetrace.refused(*files, "--allow", "colour")


def test_all_that_would_have_to_be_allowed_is_named(stagetrace: Cli, stores: Callable[..., Any]) -> None:
    before, after = stores(model="large", config={**CONFIG, "max_num_seqs": 16})
    said = stagetrace.refused("gate", "--baseline", *before, "--current", *after)
    assert "(--allow max_num_seqs --allow model to compare all the same)" in said


def test_a_run_counts_once(stagetrace: Cli, stores: Callable[..., Any]) -> None:
    """Five times the same run would vary by nothing, and any difference from five times another be sure."""
    before, after = stores()
    said = stagetrace.refused("gate", "--baseline", *[before[0]] * 5, "--current", *[after[0]] * 5)
    assert f"{before[0]}: given twice; give each run once" in said
    said = stagetrace.refused("gate", "--baseline", *before, "--current", *after[1:], before[2])
    assert f"{before[2]}: given twice" in said
    # A baseline, which rounds, that is made of itself and of the same stores once more.
    assert stagetrace("baseline", *before, "-o", "base.json")[0] == 0
    said = stagetrace.refused("baseline", "base.json", *before, "-o", "base.json")
    assert "the same run as" in said and "base.json (run 1)" in said
    assert stagetrace("gate", "--baseline", "base.json", "--current", *after)[0] == 0
    assert "the same run as" in stagetrace.refused("gate", "--baseline", "base.json", "--current", *before)


def test_a_baseline_that_no_gate_takes_is_said_to_be_one(stagetrace: Cli, stores: Callable[..., Any]) -> None:
    before, after = stores(config={**CONFIG, "max_num_seqs": 16})
    code, _, err = stagetrace("baseline", *before, after[0], "-o", "mixed.json")
    assert code == 0 and "6 runs with" in err
    assert f"{after[0]}: max_num_seqs 16 against 8 of {before[0]}: the gate will refuse this baseline" in err


def test_an_upgrade_is_named_and_compared() -> None:
    before, after = runs_of(3, 5, QUIET)
    newer = [replace(run, fingerprint={**run.fingerprint, "engine_version": "2"}) for run in after]
    assert match(before, newer).differ == ["engine_version 1 → 2"]


def test_servers_may_differ_on_purpose_but_not_in_their_load() -> None:
    before, after = runs_of(3, 5, QUIET)
    other = [replace(run, fingerprint={**run.fingerprint, "max_num_seqs": 1}) for run in after]
    assert match(before, other, settings=False).differ == ["max_num_seqs 8 → 1"]
    warm = [replace(run, fingerprint={**run.fingerprint, "cached_tokens": 80.0}) for run in after]
    with pytest.raises(Fault, match=r"cached_tokens 80.0 against 0.0"):
        match(before, warm, settings=False)
    with pytest.raises(Fault, match=r"run-\d.db: max_num_seqs 1 against 8 .* on the same side"):
        match([*before[1:], other[0]], after[1:])


def test_another_prompt_mix() -> None:
    before, after = runs_of(3, 5, QUIET)
    fewer = [replace(run, requests=dict(list(run.requests.items())[:20])) for run in after]
    with pytest.raises(Fault, match="20 of 50 prompts"):
        compare(match(before, fewer), Wishes())


def test_a_few_requests_that_failed_do_not_make_it_another_mix() -> None:
    before, after = runs_of(3, 5, QUIET)
    mixed = [replace(run, fingerprint={**run.fingerprint, "prompt_mix": f"{n} prompts"}) for n, run in enumerate(after)]
    failed = [replace(run, requests=dict(list(run.requests.items())[:-2])) for run in mixed]
    assert match(before, failed).differ == []
    assert compare(match(before, failed), Wishes()).verdict == PASS
    fewer = [replace(run, requests=dict(list(run.requests.items())[:40])) for run in mixed]
    with pytest.raises(Fault, match="prompt_mix"):
        match(before, fewer)
    longer = [
        replace(run, requests={k: replace(r, prompt_tokens=r.prompt_tokens + 1) for k, r in run.requests.items()})
        for run in mixed
    ]
    with pytest.raises(Fault, match="prompt_mix"):
        match(before, longer)


def test_runs_without_an_end_to_end_time() -> None:
    before, after = ([_timeless(run) for run in side] for side in runs_of(3, 5, QUIET))
    with pytest.raises(Fault, match=r"run-0.db: no request has an end-to-end time \(e2e_ms\)"):
        compare(match(before, after), Wishes())


def _timeless(run: Run) -> Run:
    def without(ms: Mapping[str, float]) -> dict[str, float]:
        return {key: value for key, value in ms.items() if key != "e2e_ms"}

    return replace(run, requests={key: replace(r, ms=without(r.ms)) for key, r in run.requests.items()})


def test_a_missing_stage() -> None:
    before, after = runs_of(3, 5, QUIET)
    blind = [_without(run, "embedding") for run in after]
    with pytest.raises(Fault, match=r"stage embedding has no time \(not_observable\), but has one in run-0.db"):
        match(before, blind)
    report = compare(match([_without(run, "embedding") for run in before], blind), Wishes())
    assert report.unjudged == {"embedding": "not_observable"} and report.verdict == PASS


def test_what_has_no_first_text_has_no_time_to_it() -> None:
    sides = runs_of(3, 5, QUIET)
    gone = ("ttft_ms", "itl_ms", "lm_head", "sample", "detokenize", "decode")
    for key in gone:
        sides = tuple([_without(run, key) for run in side] for side in sides)
    report = compare(match(*sides), Wishes())
    assert report.verdict == PASS
    assert not {row.measure.key for row in report.rows} & set(gone)


def _without(run: Run, key: str) -> Run:
    requests = {
        name: replace(each, ms={k: ms for k, ms in each.ms.items() if k != key}) for name, each in run.requests.items()
    }
    return replace(run, requests=requests, without={**run.without, key: "not_observable"})


def test_a_summary_shows_what_is_not_ours_as_it_is() -> None:
    before, after = runs_of(3, 3, QUIET, prompts=3)
    model = "a|b `c` [d](http://e) ![f](g) *h* <img src=x> &lt; \\"
    after = [replace(run, fingerprint={**run.fingerprint, "model": model}) for run in after]
    said = output.markdown(compare(match(before, after, ("model",)), Wishes()))
    (line,) = [line for line in said.splitlines() if line.startswith("* differs")]
    shown = r"a\|b \`c\` \[d\](http://e) !\[f\](g) \*h\* &lt;img src=x> &amp;lt; \\"
    assert line == f"* differs: model tiny → {shown}"


def test_files_that_cannot_be_used(stagetrace: Cli, stores: Callable[..., Any], tmp_path: Path) -> None:
    before, after = stores()
    base = tmp_path / "base.json"
    assert stagetrace("baseline", *before, "-o", str(base))[0] == 0
    whole = base.read_text()

    def said(text: str) -> str:
        base.write_text(text)
        return stagetrace.refused("gate", "--baseline", str(base), "--current", *after)

    assert "truncated or damaged JSON" in said(whole[: len(whole) // 2])
    newer = f'"schema": {SCHEMA + 1}'
    assert f"baseline of schema {SCHEMA + 1}, this stagetrace reads {SCHEMA}; use a newer" in said(
        whole.replace(f'"schema": {SCHEMA}', newer)
    )
    assert "JSON, but no baseline" in said("{}")
    assert "not a whole baseline ('fingerprint' is missing)" in said(whole.replace('"fingerprint"', '"finger"'))
    assert "a value in it is of the wrong kind" in said(whole.replace('"without": {}', '"without": 7'))
    assert "is no time" in said(re.sub(r"(\[10\d, 3), [\d.]+", r"\1, NaN", whole, count=1))
    assert "is no time" in said(re.sub(r"(\[10\d, 3), [\d.]+", r"\1, -1.5", whole, count=1))
    assert "is not printable" in said(whole.replace('"model": "tiny"', '"model": "tiny\\n::error::"'))
    assert "a value in it is of the wrong kind" in said(re.sub(r"\[10\d, 3", "[1e999, 3", whole, count=1))
    assert "truncated or damaged JSON" in said('{"kind":' + "[" * 100_000)
    assert "no requests in it" in said(json.dumps({**json.loads(whole), "runs": []}))
    assert "No such file" in stagetrace.refused("gate", "--baseline", "gone.db", "--current", *after)
    (tmp_path / "text.db").write_text("not a store")
    assert "not a stagetrace store" in stagetrace.refused("gate", "--baseline", "text.db", "--current", *after)
    base.write_text("\ufeff" + whole)  # as editors on Windows begin a file
    assert stagetrace("gate", "--baseline", str(base), "--current", *after)[0] in (0, 3)
    with StoreWriter(tmp_path / "empty.db") as writer:
        writer.write_run(RunRecord("session"))
    assert "empty.db: no request of a load in it" in stagetrace.refused(
        "gate", "--baseline", *before, "--current", "empty.db"
    )
    assert "a directory" in stagetrace.refused("gate", "--baseline", str(tmp_path), "--current", *after)
    assert "name either --baseline FILE... and --current FILE..., or --ab" in stagetrace.refused(
        "gate", "--baseline", *before
    )
    assert "--junit" in stagetrace.refused("gate", "--baseline", *before, "--current", *after, "--junit")
    nowhere = str(tmp_path / "no" / "gate.xml")
    said = stagetrace("gate", "--baseline", *before, "--current", *after, "--junit", nowhere)
    assert said[0] == 2 and f"there is no directory {tmp_path / 'no'}" in said[2]


def test_requests_that_were_not_answered(tmp_path: Path, stores: Callable[..., Any]) -> None:
    (path, *_), _ = stores()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(
            "UPDATE requests SET status = 'error' WHERE id IN (SELECT id FROM requests ORDER BY id DESC LIMIT 3)"
        )
    with pytest.raises(Fault, match="3 of 12 requests were not answered"):
        read_runs(Path(path))


def test_our_own_fault_is_70(stagetrace: Cli, stores: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = stores()

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("stagetrace.gate.compare.decide", broken)
    code, out, err = stagetrace("gate", "--baseline", *before, "--current", *after)
    assert (code, out) == (70, "") and "ZeroDivisionError: ours" in err and "no verdict" in err


def test_without_scipy(stagetrace: Cli, stores: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = stores()
    for name in [name for name in sys.modules if name.startswith("stagetrace.gate.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    said = stagetrace.refused("gate", "--baseline", *before, "--current", *after)
    assert "pip install 'stagetrace[gate]'" in said
    assert stagetrace("baseline", *before, "-o", "base.json")[0] == 0, "which needs none of it"


def test_a_change_that_rounds_to_nothing_has_no_minus() -> None:
    assert [output.signed(value, 1) for value in (-0.04, -0.06, 0.0, 1234.5)] == ["+0.0", "-0.1", "+0.0", "+1,234.5"]
