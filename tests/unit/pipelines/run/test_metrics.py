"""Metrics of a run, as Prometheus scrapes them."""

from __future__ import annotations

import socket
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import fields
from functools import partialmethod
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.pipelines.run.progress import MEANINGS, SinkProgress, metric_values, serve
from penstock.pipelines.spec.expectations import ExpectationCounts

CHECKED = {"quality.even": ExpectationCounts(rows=9, violations=4)}
SINKS = {
    "rows": SinkProgress(batch=3, batches=4, read=10, lag_records=7, lag_s=1.5, expectations=CHECKED),
    "alarms": SinkProgress(read=2),
}


def test_a_scrape_has_every_sink() -> None:
    with serve(("127.0.0.1", 0), {"water": lambda: SINKS}) as address:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            lines = answer.read().decode().splitlines()
        with pytest.raises(urllib.error.HTTPError, match="404") as missing:
            urllib.request.urlopen(f"http://{address}/other", timeout=60)
        missing.value.close()
    labels = '{pipeline="water",sink="rows"}'
    assert f"penstock_pipeline_read_total{labels} 10.0" in lines
    assert f"penstock_pipeline_lag_records{labels} 7.0" in lines
    assert f"penstock_pipeline_lag_seconds{labels} 1.5" in lines
    assert 'penstock_pipeline_read_total{pipeline="water",sink="alarms"} 2.0' in lines
    labels = '{expectation="quality.even",pipeline="water",sink="rows"}'
    assert f"penstock_pipeline_expectation_rows_total{labels} 9.0" in lines
    assert f"penstock_pipeline_expectation_violations_total{labels} 4.0" in lines
    assert "# TYPE penstock_pipeline_lag_records gauge" in lines
    assert "# HELP penstock_pipeline_lag_records Records in the sources that the sink has not finished." in lines


def test_each_metric_has_a_help_text() -> None:
    known: dict[str, Any] = {field.name: 1 for field in fields(SinkProgress)}
    named = metric_values(SinkProgress(**known))
    assert set(named) == set(MEANINGS)
    assert all(MEANINGS[name].endswith(".") and len(MEANINGS[name]) > 20 for name in named)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the wait for a client at once")
def test_the_end_does_not_wait_for_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    # The server looks only every ten minutes, by default twice in a second, whether it is to end.
    patient = partialmethod(ThreadingHTTPServer.serve_forever, poll_interval=600)
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", patient)
    with serve(("127.0.0.1", 0), {"water": lambda: SINKS}) as address:
        assert urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read()
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-metrics"]


def test_no_address_and_one_that_is_taken() -> None:
    with serve(None, {}) as address:
        assert address is None
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with (
            pytest.raises(ConfigError, match="metrics cannot be served"),
            serve(("127.0.0.1", taken.getsockname()[1]), {}),
        ):
            raise AssertionError
