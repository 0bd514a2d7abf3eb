"""A real Prometheus scrapes us: every metric arrives, and percentiles from buckets are our own within a bucket."""

from __future__ import annotations

import time

from stagetrace.exporting import INSTRUMENTS
from stagetrace.model import RequestRecord, StepRecord
from stagetrace.numbers import numbers
from stagetrace.store import Trace
from tests.backends.conftest import Scraper
from tests.backends.prometheus import check_percentiles, eventually
from tests.unit.stored import card_sample


def test_percentiles_from_its_buckets_are_ours_within_a_bucket(
    prometheus: Scraper, records: list[RequestRecord]
) -> None:
    prometheus.sink.requests(records)
    count = "sum(gen_ai_server_request_duration_seconds_count)"
    eventually(lambda: prometheus.value(count) == len(records), "all requests are counted")
    check_percentiles(prometheus, numbers(Trace(requests=records))["timers"])


def test_every_metric_and_its_exemplars_arrive(prometheus: Scraper, records: list[RequestRecord]) -> None:
    prometheus.sink.requests(records)
    prometheus.sink.steps([StepRecord(7 << 32, 7, (1, 2), 3, 3, 0, 1, 4, 0.25, preempted=2)])
    prometheus.sink.gpu([card_sample(), card_sample(energy_j=7.75)])
    eventually(lambda: prometheus.value("stagetrace_preemptions_total") == 2.0, "evictions are counted")
    known = set(prometheus.get("/api/v1/label/__name__/values"))
    for each in INSTRUMENTS.values():
        name = each.name.replace(".", "_") + ("_seconds_bucket" if each.unit == "s" else "")
        name += "_total" if each.kind == "counter" else ""
        # Nothing went wrong here: a counter without a label value has no series yet.
        assert name in known or (each.health and each.labels), name
    assert prometheus.value("stagetrace_kv_cache_utilization") == 0.25
    assert prometheus.value("stagetrace_queue_depth") == 4 and prometheus.value("stagetrace_batch_size") == 3
    assert prometheus.value("hw_gpu_utilization") == 0.5
    assert prometheus.value("stagetrace_marks_dropped_total") == 0
    query = {"query": "gen_ai_server_time_to_first_token_seconds_bucket", "start": time.time() - 60, "end": time.time()}
    found = eventually(lambda: prometheus.get("/api/v1/query_exemplars", **query), "exemplars")
    traces = {example["labels"]["trace_id"] for series in found for example in series["exemplars"]}
    assert traces and traces <= {record.trace_id for record in records}
