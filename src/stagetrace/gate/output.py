"""A report for machines and for pull requests: JSON, JUnit XML, Markdown. The terminal's is in ``report``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from .compare import BudgetRow, Report, Row
from .decide import BETA, FAIL, FALSE_ALARMS, FEWEST_RUNS, INCONCLUSIVE, PASS, USUAL_RUNS

SCHEMA = 1
_TOO_FEW = f"too few to know how far runs vary; begin with {USUAL_RUNS} a side"
#: A slowdown beyond this share is no figure of use.
_HUGE = 9.0
#: What no XML may contain, escaped or not.
_NO_XML = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF], "?")
#: What makes code, links, images, stress and columns in Markdown.
_MARKS = re.compile(r"[\\`*\[\]|]")


def headline(report: Report) -> str:
    """The verdict and its reason, in one sentence."""
    one, other = report.runs
    runs = f"{one} and {other} runs" if one != other else f"{one} run{'s' * (one > 1)} a side"
    broken = [row for row in report.budgets if row.verdict == FAIL]
    if report.verdict == FAIL and report.culprit is not None:
        row = report.culprit
        what = f"{row.measure.title} is {_percent(row.change)} slower ({signed(row.change_ms)} ms)"
        return f"FAIL: {what}, over {runs}"
    if report.verdict == FAIL:
        return "FAIL: " + "; ".join(f"{row.budget.text} does not hold: {_ms(row.seen_ms)} ms" for row in broken)
    seen = _could_have_seen(report)
    if report.verdict == PASS:
        return f"PASS: no stage is slower by an effect of interest, over {runs}{seen}"
    if min(report.runs) < FEWEST_RUNS:
        return f"INCONCLUSIVE: {runs}: {_TOO_FEW}"
    needed = (
        f"{report.runs_needed} runs a side would decide"
        if report.runs_needed
        else "No practical number of runs would decide: it takes a quieter machine, or larger effects of interest"
    )
    return f"INCONCLUSIVE: {runs} cannot tell for {_undecided(report)}{seen}. {needed}"


def _undecided(report: Report) -> str:
    open_ = [row.measure.title for row in report.rows if row.outcome.verdict == INCONCLUSIVE]
    if len(open_) == len(report.rows):
        open_ = ["any timer or stage"]
    return ", ".join([*open_, *(row.budget.text for row in report.budgets if row.verdict == INCONCLUSIVE)])


def _could_have_seen(report: Report) -> str:
    row = report.detectable
    if row is None or row.outcome.detectable is None:
        return ""
    least = math.expm1(row.outcome.detectable)
    if least > _HUGE:
        return f"; even {_HUGE + 1:.0f} times the {row.measure.title} might not have been caught"
    return f"; from {_percent(least)} on, any timer or large stage would have been caught ({row.measure.title} last)"


def document(report: Report, code: int) -> dict[str, Any]:
    """The document of ``gate --json``. Times in ms, changes as shares of the baseline."""
    return {
        "schema": SCHEMA,
        "verdict": report.verdict,
        "exit_code": code,
        "reason": headline(report),
        "stage": report.culprit.measure.key if report.culprit else None,
        "runs": {"baseline": report.runs[0], "current": report.runs[1]},
        "runs_needed": report.runs_needed,
        "false_alarms_at_most": FALSE_ALARMS if report.interleaved else None,
        "missed_at_most": BETA,
        "differ": report.sides.differ,
        "not_answered": report.sides.failed,
        "measures": [_measure(row) for row in report.rows],
        "not_judged": report.unjudged,
        "budgets": [
            {
                "budget": row.budget.text, "seen_ms": _finite(row.seen_ms), "verdict": row.verdict,
                "runs_needed": row.runs_needed,
            }
            for row in report.budgets
        ],
        "requests": [
            {
                "prompt": shown.prompt, "prompt_tokens": shown.prompt_tokens, "baseline_ms": shown.before_ms,
                "current_ms": shown.after_ms, "request_id": shown.id or None, "run": shown.run,
            }
            for shown in report.shown
        ],
    }  # fmt: skip


def _measure(row: Row) -> dict[str, Any]:
    found, outcome = row.judged.estimate, row.outcome
    return {
        "key": row.measure.key,
        "part_of": row.measure.of,
        "share": row.judged.share,
        "verdict": outcome.verdict,
        "baseline_ms": row.judged.base_ms,
        "change": row.change,
        "change_ms": row.change_ms,
        "change_at_most": _finite(math.expm1(min(found.upper(BETA), 700.0))),
        "noise": found.noise,
        "effect": math.expm1(row.judged.threshold),
        "detectable": None if outcome.detectable is None else math.expm1(outcome.detectable),
        "runs_needed": outcome.runs_needed,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) and value < 1e300 else None


def junit(report: Report, fatal: bool) -> str:
    """JUnit XML: a test case for each measure and budget. ``fatal``: INCONCLUSIVE is an error, else it is skipped."""
    cases = list(_cases(report, fatal))
    failures = sum("<failure" in case for case in cases)
    errors, skipped = (sum(f"<{kind}" in case for case in cases) for kind in ("error", "skipped"))
    head = (
        f'<testsuite name="stagetrace gate" tests="{len(cases)}" failures="{failures}" errors="{errors}" '
        f'skipped="{skipped}">'
    )
    lines = ['<?xml version="1.0" encoding="utf-8"?>', head, *cases]
    lines += [f"<system-out>{_text(headline(report))}</system-out>", "</testsuite>"]
    return "\n".join(lines) + "\n"


def _cases(report: Report, fatal: bool) -> Iterator[str]:
    for row in report.rows:
        yield _case("stagetrace.stages", row.measure.key, row.outcome.verdict, row_words(row), fatal)
    for budget in report.budgets:
        yield _case("stagetrace.budgets", budget.budget.text, budget.verdict, budget_words(budget), fatal)


def _case(group: str, name: str, verdict: str, words: str, fatal: bool) -> str:
    opening = f"<testcase classname={quoteattr(group)} name={_attribute(name)}"
    if verdict == PASS:
        return f"{opening}/>"
    kind = "failure" if verdict == FAIL else "error" if fatal else "skipped"
    return f'{opening}><{kind} message={_attribute(words)} type="{verdict}"/></testcase>'


def _attribute(value: str) -> str:
    return quoteattr(value.translate(_NO_XML))


def _text(value: str) -> str:
    return escape(value.translate(_NO_XML))


def markdown(report: Report) -> str:
    """A summary for a pull request: the verdict, and the table folded away unless something is wrong."""
    icon = {PASS: "✅", FAIL: "❌", INCONCLUSIVE: "❔"}
    lines = [f"### stagetrace gate: {icon[report.verdict]} {report.verdict}", "", _cell(headline(report)) + ".", ""]
    lines += [f"* differs: {_cell(line)}" for line in report.sides.differ]
    lines += [f"* {_cell(line)}" for line in report.sides.failed]
    lines += ["", f"<details{' open' if report.verdict == FAIL else ''}><summary>Timers and stages</summary>", ""]
    lines += [
        "| | verdict | baseline (ms) | change | change (ms) | noise | caught from |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in report.rows:
        found, outcome = row.judged.estimate, row.outcome
        noise = "—" if found.noise is None else _percent(found.noise)
        least = math.inf if outcome.detectable is None else math.expm1(outcome.detectable)
        verdict = f"**{outcome.verdict}**" if outcome.verdict != PASS else PASS
        lines.append(
            f"| {row.measure.title} | {verdict} | {_ms(row.judged.base_ms)} | {signed(row.change * 100)} % "
            f"| {signed(row.change_ms)} | {noise} | {_percent(least) if least <= _HUGE else '—'} |"
        )
    lines += [f"| {_cell(b.budget.text)} | {b.verdict} | | | {_ms(b.seen_ms)} | | |" for b in report.budgets]
    return "\n".join([*lines, "", "</details>", ""])


def _cell(value: str) -> str:
    """As it is, whatever it is: a model's name may be any text, and the page is a pull request's."""
    plain = " ".join(value.split()).replace("&", "&amp;").replace("<", "&lt;")
    return _MARKS.sub(r"\\\g<0>", plain)


def row_words(row: Row) -> str:
    """A measure in one sentence."""
    found, outcome = row.judged.estimate, row.outcome
    change = f"{signed(row.change * 100)} % ({signed(row.change_ms)} ms on {_ms(row.judged.base_ms)} ms)"
    words = f"{row.measure.title}: {change}"
    if found.noise is not None:
        words += f", runs vary by {_percent(found.noise)}"
    if outcome.verdict == INCONCLUSIVE and min(found.runs) < FEWEST_RUNS:
        words += f"; {_TOO_FEW}"
    elif outcome.verdict == INCONCLUSIVE:
        needed = outcome.runs_needed
        words += f"; {needed} runs a side would decide" if needed else "; no practical number of runs would decide"
    return words


def budget_words(row: BudgetRow) -> str:
    """A budget in one sentence."""
    if not math.isfinite(row.seen_ms):
        return f"{row.budget.text}: not seen in any run"
    more = f"; {row.runs_needed} runs would decide" if row.runs_needed else ""
    return f"{row.budget.text}: {_ms(row.seen_ms)} ms{more}"


def _percent(value: float) -> str:
    return f"{value:.1%}".replace("%", " %")


def signed(value: float, digits: int = 2) -> str:
    """With its sign; what rounds to nothing is +0.00, never -0.00."""
    return f"{round(value, digits) + 0.0:+,.{digits}f}"


def _ms(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
