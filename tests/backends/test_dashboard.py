"""The dashboard's queries and the alert rules, asked of a real Prometheus that has scraped us."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stagetrace.model import RequestRecord, StepRecord
from stagetrace.stages import STAGES
from tests.backends.conftest import ALERTS, Scraper
from tests.backends.prometheus import eventually
from tests.debian import program

DASHBOARD = ALERTS.parents[1] / "grafana" / "stagetrace.json"
NAMES = {"$__rate_interval": "30s", "$model": ".*"}


@pytest.fixture
def busy(prometheus: Scraper, records: list[RequestRecord]) -> Scraper:
    """Requests, steps and losses of every kind, between two scrapes and before them."""
    for n in range(2):
        prometheus.sink.requests(records)
        prometheus.sink.steps([StepRecord((n + 1) << 32, 7, (1, 2), 3, 3, 0, 1, 4, 0.95, preempted=2)])
        prometheus.health.marks_dropped += 3
        prometheus.health.spans_dropped["queue_full"] += 5
        prometheus.health.hook_errors["a:B.c"] = 1
        query = f"sum(gen_ai_server_request_duration_seconds_count) == {(n + 1) * len(records)}"
        eventually(partial(prometheus.vector, query), "all requests are counted")
    time.sleep(0.5)
    return prometheus


def test_every_panel_of_the_dashboard_shows_something(busy: Scraper) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = {panel["title"]: panel for panel in dashboard["panels"]}
    seen: dict[str, list[dict[str, str]]] = {}
    for title, panel in panels.items():
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in NAMES.items():
                query = query.replace(name, value)
            found = busy.vector(query)
            assert found and all(math.isfinite(value) for _, value in found), f"{title}: {query}: {found}"
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert all(label in labels for labels, _ in found) or label == "error", f"{title}: no {label}: {found}"
            seen.setdefault(title, []).extend(labels for labels, _ in found)
    assert [labels["stage"] for labels in seen["Where the time goes"]] == sorted(stage.key for stage in STAGES)
    assert {labels.get("error", "") for labels in seen["Calls by outcome"]} == {"", "400"}
    _, model = dashboard["templating"]["list"]
    metric, label = model["query"].removeprefix("label_values(").removesuffix(")").split(", ")
    assert {labels[label] for labels, _ in busy.vector(metric)} == {"tiny"}


def test_every_alert_rule_can_be_evaluated(busy: Scraper) -> None:
    def rules() -> list[dict[str, Any]]:
        (group,) = busy.get("/api/v1/rules")["groups"]
        return [] if any(rule["health"] == "unknown" for rule in group["rules"]) else group["rules"]

    found = eventually(rules, "the rules are evaluated")
    assert {rule["name"]: rule["health"] for rule in found} == dict.fromkeys((r["name"] for r in found), "ok")
    lost = eventually(lambda: busy.vector('ALERTS{alertname="RecordingIncomplete"}'), "what is lost is told")
    assert {labels["alertstate"] for labels, _ in lost} == {"firing"}


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    """By promtool, on series made up: ten quiet minutes, and ten in which everything is wrong."""
    promtool = program("promtool", "prometheus")
    check = subprocess.run([promtool, "check", "rules", str(ALERTS)], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr
    names = re.findall(r"alert: (\w+)", ALERTS.read_text())
    assert len(names) == len(set(names)) == 5
    cases = [case(names, series(bad), bad) for bad in (False, True)]
    document = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "test.yml").write_text(json.dumps(document))  # which is YAML, too
    done = subprocess.run([promtool, "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def series(bad: bool) -> dict[str, str]:
    """Ten minutes of every metric that the rules name. ``bad``: first texts take 5 s, and so on."""
    labels = 'model="m",engine="0",process="0",operation="chat"'
    made = {}
    for name, limits in (("gen_ai_server_time_to_first_token", "2.5 5"), ("stagetrace_queue_duration", "0.75 1.5")):
        fast, slow = limits.split()
        made[f'{name}_seconds_bucket{{{labels},le="{fast}"}}'] = "0x10" if bad else "0+60x10"
        for limit in (slow, "+Inf"):
            made[f'{name}_seconds_bucket{{{labels},le="{limit}"}}'] = "0+60x10"
    if not bad:  # well below the limit
        made = {name.replace('le="2.5"', 'le="1.5"'): values for name, values in made.items()}
    calls = "gen_ai_server_request_duration_seconds_count"
    for error, rate in {"": 60, "aborted": 30, "400": 30, "503": 30 * bad, "engine_died": 30 * bad}.items():
        made[f'{calls}{{{labels},error="{error}"}}'] = f"0+{rate}x10"
    made['stagetrace_preemptions_total{model="m",engine="0",process=""}'] = f"0+{30 * bad}x10"
    made['stagetrace_kv_cache_utilization{model="m",engine="0",process=""}'] = f"{0.5 + 0.45 * bad}x10"
    made['stagetrace_marks_dropped_total{instance="a",job="b"}'] = f"7+{bad:d}x10"
    made['stagetrace_spans_dropped_total{instance="a",job="b",reason="queue_full"}'] = "7x10"
    return made


def case(names: list[str], values: dict[str, str], bad: bool) -> dict[str, Any]:
    """What promtool is to find after those ten minutes."""
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in names] if bad else []
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": these} for name, these in values.items()],
        "promql_expr_test": [{"expr": firing, "eval_time": "10m", "exp_samples": expected}],
    }
