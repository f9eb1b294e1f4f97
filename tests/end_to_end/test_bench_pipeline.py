"""`penstock bench pipeline` with a rate against a node.

By day tests/docs runs the command without a rate (docs/operations/measure.md), and
tests/unit/cli/test_bench_pipeline.py computes rates and latencies from batches and tables.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.nodes import RunningNode


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_pipeline_at_a_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with RunningNode(tmp_path) as node:
        load = ["--rate", "200", "--messages", "200", "--sinks", "2", "--size", "300", "--table-format", "parquet"]
        produce, commit = node.rows("bench", "pipeline", *load)
        assert (produce["operation"], commit["operation"]) == ("produce", "commit")
        assert produce["count"] == commit["count"] == 200
        assert produce["bytes_per_s"] == 200 * 300
        assert 0 < produce["p50_ms"] <= commit["p50_ms"] <= commit["p99_ms"] <= commit["p99_9_ms"] <= commit["max_ms"]
        assert commit["table_rows"] == 500  # three batches of the messages of one trigger are not measured
        assert commit["missing_rows"] == commit["repeated_rows"] == 0
        assert commit["batches"] >= 4
        assert commit["first_batch_s"] > 0
        assert commit["durability"] == node.ready["durability"]
        assert node.rows("tube", "topic", "list") == node.rows("tube", "group", "list") == []
        assert node.penstock("kv", "scan").stdout == b""
        assert list((tmp_path / "tmp").iterdir()) == []
