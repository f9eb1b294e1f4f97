"""A part of the nightly tests ends in time, and its next run continues there."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.processes import has_ended
from tools import nightly
from tools.suites import ROOT

TESTS = """\
import pathlib
import pytest

pytestmark = pytest.mark.nightly


class TestFirst:
    @pytest.mark.parametrize("text", ["a::b", "c[d]"])
    def test_passes(self, text, record_property):
        record_property("summary", f"saw {text}")
        assert text


def test_is_interrupted():
    if not pathlib.Path("second-run").exists():
        raise KeyboardInterrupt


def test_fails():
    raise AssertionError("no")


def test_is_skipped():
    pytest.skip("has no reason")
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers = nightly: x\nfilterwarnings = error:record_property\n", encoding="utf-8"
    )
    folder = tmp_path / "tests" / "slow"
    folder.mkdir(parents=True)
    (folder / "test_slow.py").write_text(TESTS, encoding="utf-8")
    monkeypatch.setitem(nightly.PARTS, "slow", ["tests/slow"])
    return tmp_path


def test_an_interrupted_part_continues_with_the_test_that_was_interrupted(root: Path) -> None:
    cursor = root / "cursor.json"
    tests, results = nightly.run_part("slow", cursor, 60.0, root)
    first = [f"tests/slow/test_slow.py::TestFirst::test_passes[{text}]" for text in ("a::b", "c[d]")]
    assert tests[:2] == first
    assert {test: (result["outcome"], result["message"]) for test, result in results.items()} == {
        first[0]: ("passed", "saw a::b"),
        first[1]: ("passed", "saw c[d]"),
    }
    (root / "second-run").touch()
    _, results = nightly.run_part("slow", cursor, 60.0, root)
    assert [result["outcome"] for result in results.values()] == ["passed", "passed", "passed", "failed", "skipped"]
    lines = nightly.summary("slow", tests, results)
    assert lines[-1] == "3 passed, 1 failed, 1 skipped"
    assert lines[-2].endswith("0 of 5 tests not run yet")
    assert any("has no reason" in line for line in lines)
    stored = nightly.read_summary(_written(root, lines), tests)
    assert list(map(_rounded, stored.values())) == list(map(_rounded, results.values()))
    # A part that is complete begins again.
    _, results = nightly.run_part("slow", cursor, 60.0, root)
    assert len(results) == 5


def test_an_interrupt_of_the_tool_ends_pytest_and_keeps_the_results(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "tests" / "slow" / "test_slow.py").write_text(WAITS, encoding="utf-8")
    monkeypatch.setattr(nightly, "ROOT", root)
    begun = root / "pid"

    def interrupt() -> None:
        until = time.monotonic() + 50
        while not begun.exists() and time.monotonic() < until:
            time.sleep(0.01)
        if begun.exists():
            os.kill(os.getpid(), signal.SIGINT)  # this process alone

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        monkeypatch.setattr("sys.argv", ["nightly.py", "slow"])
        assert nightly.main() == 130
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    for pid in begun.read_text().split():
        _wait_for_end(int(pid))
    assert (root / "closed").exists(), "the fixtures were closed"
    results = json.loads((root / "build/nightly/slow.json").read_text())
    summary = (root / nightly.SUMMARIES / "slow.md").read_text()
    assert "1 passed, 0 failed, 0 skipped" in summary
    assert "test_waits" in summary.partition("not run yet")[2]
    assert {test.partition("::")[2]: result["outcome"] for test, result in results.items()} == {"test_ends": "passed"}


WAITS = """\
import os
import pathlib
import subprocess
import time

import pytest

pytestmark = pytest.mark.nightly


@pytest.fixture
def opened():
    yield
    pathlib.Path("closed").touch()


def test_ends():
    assert True


def test_waits(opened):
    left = subprocess.Popen(["sleep", "60"])
    pathlib.Path("new").write_text(f"{os.getpid()} {left.pid}")
    pathlib.Path("new").rename("pid")
    time.sleep(60)
    raise AssertionError("it was not interrupted")
"""


def _wait_for_end(pid: int) -> None:
    """Wait until a process has ended."""
    until = time.monotonic() + 50
    while not has_ended(pid):
        assert time.monotonic() < until, f"{pid} still runs"
        time.sleep(0.01)


def _written(root: Path, lines: list[str]) -> Path:
    summary = root / nightly.SUMMARIES / "slow.md"
    summary.parent.mkdir(parents=True, exist_ok=True)
    summary.write_text("\n".join(lines), encoding="utf-8")
    return summary


def _rounded(result: dict[str, object]) -> dict[str, object]:
    return {**result, "seconds": round(float(str(result["seconds"])), 1)}


def test_a_file_that_is_a_part_of_its_own_is_left_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nightly.OWN, "own", "tests/slow/test_slow.py")
    assert nightly.run_part("slow", root / "cursor.json", 60.0, root) == ([], {})


def test_the_parts_of_simulations_have_all_their_nightly_tests() -> None:
    tests = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/simulation").rglob("test_*.py")]
    marked = [path for path in tests if "pytest.mark.nightly" in (ROOT / path).read_text(encoding="utf-8")]
    assert len(marked) > 2
    parts = *nightly.PARTS["simulation"], *nightly.PARTS["two-nodes"]
    assert [path for path in marked if not path.startswith(parts)] == []


def test_a_part_continues_at_its_summary_in_another_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that failed at another commit run again."""
    tests = [f"tests/a.py::b[{n}]" for n in range(5)]
    passed = {"outcome": "passed", "message": "", "seconds": 1.0, "commit": "abc"}
    results = {**dict.fromkeys(tests[:2], passed), tests[3]: {**passed, "outcome": "failed", "message": "no"}}
    lines = nightly.summary("slow", tests, results)
    assert f"passed       2.0 s  abc  {tests[0]}  to {tests[1]}" in lines
    assert nightly.read_summary(_written(tmp_path, lines), tests) == results
    ran: list[str] = []

    def run(_part: str, left: list[str], _seconds: float, _root: Path) -> nightly.Results:
        ran.extend(left)
        return {}

    monkeypatch.setitem(nightly.PARTS, "slow", ["tests"])
    monkeypatch.setattr(nightly, "collect", lambda _paths, _root: tests)
    monkeypatch.setattr(nightly, "run", run)
    _, results = nightly.run_part("slow", tmp_path / "cursor.json", 60.0, tmp_path)
    assert ran == tests[2:]
    assert results == dict.fromkeys(tests[:2], passed)


def test_parameters_with_other_messages_have_a_line_each() -> None:
    tests = ["tests/a.py::b[0]", "tests/a.py::b[1]", "tests/a.py::b[2]", "tests/a.py::c"]
    passed = {"outcome": "passed", "message": "25 seeds", "seconds": 1.0, "commit": "abc"}
    lines = nightly.summary("part", tests, {tests[0]: passed, tests[1]: {**passed, "message": "24 seeds"}})
    assert lines[2:5] == [
        "passed       1.0 s  abc  tests/a.py::b[0]  25 seeds",
        "passed       1.0 s  abc  tests/a.py::b[1]  24 seeds",
        "not run yet       2  tests/a.py::b[2] and more",
    ]


def test_the_summary_has_a_table_of_what_the_tests_have_measured() -> None:
    rounds = [[("takeover/kill", {"first write s": 2.5}), ("full", {"first write s": 1.0})]]
    rounds.append([("takeover/pause", {"first write s": 7.123}), ("takeover/kill", {"first write s": 3.5})])
    results: nightly.Results = {
        f"test[{number}]": {"outcome": "passed", "message": f"ok; {text}", "seconds": 1.0, "commit": "c"}
        for number, text in enumerate(map(nightly.measurements, rounds))
    }
    results["test[2]"] = {"outcome": "failed", "message": "full: x=1", "seconds": 1.0, "commit": "c"}
    lines = nightly.summary("cluster", list(results), results)
    assert [line.split() for line in lines[3:7]] == [
        ["full:", "first", "write", "s", "1", "1", "1", "1"],
        ["takeover:", "first", "write", "s", "3", "3.5", "7.12", "7.12"],
        ["takeover/kill:", "first", "write", "s", "2", "3", "3.5", "3.5"],
        ["takeover/pause:", "first", "write", "s", "1", "7.12", "7.12", "7.12"],
    ]
