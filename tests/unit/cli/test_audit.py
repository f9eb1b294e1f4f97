"""`penstock audit list`: what a request concerned, and why it failed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.cli.conftest import Command

COMMON = {
    "time": "2026-11-27T07:09:19Z",
    "server": "master",
    "credential": "user",
    "address": "127.0.0.1",
    "user": "ann",
}


def test_the_object_and_the_reason_of_a_failure_are_shown(penstock: Command, tmp_path: Path) -> None:
    rows = [
        {"method": "create", "parameters": {"topicName": "line3", "createUser": "ann"}, "result": True, "errCode": 0},
        {"method": "create", "parameters": {"topicName": "line3"}, "result": False, "failed": ["it exists"]},
        {"method": "set", "parameters": {"groupName": "lake"}, "result": False, "errCode": 400, "errMsg": "no number"},
        {"method": "backup", "parameters": {}, "result": False, "errCode": 0, "errMsg": "OK"},
        {"method": "set_log_level", "parameters": {"part": "mqtt", "level": "debug"}, "result": True},
    ]
    folder = tmp_path / "audit"
    folder.mkdir()
    (folder / "audit.jsonl").write_text("".join(json.dumps({**COMMON, **row}) + "\n" for row in rows))
    done = penstock("audit", "list", "--wide", "--data-dir", str(tmp_path))
    assert (done.status, done.err) == (0, "")
    _, *lines = done.out.splitlines()
    assert [line.split()[2:4] for line in lines] == [
        ["create", "line3"],
        ["create", "line3"],
        ["set", "lake"],
        ["backup", "-"],
        ["set_log_level", "mqtt"],
    ]
    ends = ["127.0.0.1  ok", "failed: it exists", "failed: no number", "127.0.0.1  failed", "127.0.0.1  ok"]
    assert [line.endswith(end) for line, end in zip(lines, ends, strict=True)] == [True] * 5


def test_the_list_fits_in_80_columns(penstock: Command, tmp_path: Path) -> None:
    reason = "topic line3 exists: choose another name, or delete it first"
    row = {
        **COMMON,
        "method": "admin_add_new_topic_record",
        "parameters": {"topicName": "a_topic_with_a_long_name"},
        "user": "an.engineer@plant-7",
        "result": False,
        "failed": [reason],
    }
    folder = tmp_path / "audit"
    folder.mkdir()
    (folder / "audit.jsonl").write_text(json.dumps(row) + "\n")
    lines = penstock("audit", "list", "--data-dir", str(tmp_path)).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == [
        "2026-11-27T07:09:19Z",
        "admin_add_…ic_record",
        "a_topic_…ng_name",
        "an.en…nt-7",
        "failed",
    ]
    assert lines[2:] == [f"    {reason}"]
    wide = penstock("audit", "list", "--wide", "--data-dir", str(tmp_path)).out
    assert "a_topic_with_a_long_name" in wide
    assert reason in wide
