"""The audit trail: durable rows, in a bounded number of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.runtime.observability.audit import AuditTrail, read_audit
from tests.resource_limits import file_size_limit


def test_rows_come_back_in_their_order_and_only_the_owner_may_read_them(tmp_path: Path) -> None:
    trail = AuditTrail(tmp_path / "audit")
    for number in range(3):
        trail.append({"number": number, "text": "ä\n"})
    assert [row["number"] for row in read_audit(tmp_path / "audit")] == [0, 1, 2]
    assert (tmp_path / "audit" / "audit.jsonl").stat().st_mode & 0o777 == 0o600
    AuditTrail(tmp_path / "audit").append({"number": 3})
    assert [row["number"] for row in read_audit(tmp_path / "audit")] == [0, 1, 2, 3]
    assert list(read_audit(tmp_path / "none")) == []


def test_the_oldest_files_are_deleted(tmp_path: Path) -> None:
    trail = AuditTrail(tmp_path, file_bytes=100, files=12)
    for number in range(100):
        trail.append({"number": number, "text": "x" * 20})
    found = [row["number"] for row in read_audit(tmp_path)]
    assert found == list(range(found[0], 100))
    assert 12 < len(found) < 100
    assert len(list(tmp_path.iterdir())) == 12
    assert all(path.stat().st_size <= 100 for path in tmp_path.iterdir())


def test_a_row_that_a_crash_cut_costs_only_itself(tmp_path: Path) -> None:
    trail = AuditTrail(tmp_path)
    trail.append({"number": 0})
    with (tmp_path / "audit.jsonl").open("a") as file:
        file.write('{"number": 1, "te')
    trail.append({"number": 2})
    assert [row["number"] for row in read_audit(tmp_path)] == [0, 2]


def test_a_failure_is_reported_until_a_row_is_written(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("a file")
    trail = AuditTrail(tmp_path / "audit")
    with pytest.raises(StorageError, match="cannot be written"):
        trail.append({})
    assert "cannot be written" in str(trail.failure)
    (tmp_path / "audit").unlink()
    trail.append({})
    assert (trail.failure, trail.metric_values()) == (None, {"rows": 1, "refused_requests": 0, "failed_writes": 1})


def test_an_entry_that_a_full_disk_cuts_short_is_refused_and_the_next_one_is_complete(tmp_path: Path) -> None:
    trail = AuditTrail(tmp_path)
    trail.append({"text": "x" * 1000})
    with file_size_limit(1500), pytest.raises(StorageError, match="cannot be written: File too large"):
        trail.append({"text": "y" * 1000})
    assert (tmp_path / "audit.jsonl").stat().st_size == 1500
    trail.append({"text": "z"})
    assert [row["text"][0] for row in read_audit(tmp_path)] == ["x", "z"]
