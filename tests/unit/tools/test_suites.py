"""The last lines of a run of the suites name the cause of each failure."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tools import suites

TESTS = """\
import asyncio
import socket


def leak(count):
    sockets = [socket.socket() for _ in range(count)]


def test_one_socket():
    leak(1)


def test_two_sockets():
    leak(2)


async def fail(error):
    raise error


def test_tasks():
    async def run():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail(ValueError("first")))
            tasks.create_task(fail(KeyError("y" * 500)))

    asyncio.run(run())


def test_group():
    raise ExceptionGroup("group", [ValueError(n) for n in range(9)])


def test_cause():
    try:
        int("x")
    except ValueError as error:
        raise RuntimeError("outer") from error


def test_plain():
    assert [1] == [2]
"""


def test_failures_name_their_causes_and_the_members_of_exception_groups(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nfilterwarnings = error\nasyncio_default_fixture_loop_scope = function\n", encoding="utf-8"
    )
    (tmp_path / "test_fails.py").write_text(TESTS, encoding="utf-8")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stdout
    result = suites.Result("unit")
    suites.read_report(report, result)
    assert result.failed == 6
    texts = dict(line.split(": ", 1) for line in result.failures)
    one, two, tasks, group, cause, plain = texts.values()
    assert "ResourceWarning: unclosed <socket.socket" in one
    assert two.startswith("ExceptionGroup: multiple unraisable exception warnings (2 sub-exceptions); ")
    assert two.count("ResourceWarning: unclosed <socket.socket") == 2
    assert "; ValueError: first" in tasks
    assert "; KeyError: 'yyyy" in tasks
    assert tasks.endswith("y...")
    assert "ValueError: 0; " in group
    assert group.endswith("ValueError: 5; 3 more")
    assert cause == "RuntimeError: outer; ValueError: invalid literal for int() with base 10: 'x'"
    assert plain.startswith("assert [1] == [2] At index 0 diff: 1 != 2")
    assert all(len(text) < 1_800 for text in texts.values())


def test_suites_and_their_parts_run_every_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[str, list[tuple[int, int]]] = {}

    def run_suite(name: str, *, headed: bool, part: int, parts: int) -> suites.Result:
        assert headed
        ran.setdefault(name, []).append((part, parts))
        return suites.Result(name, 1.0, ok=part == 0, passed=2, failures=[f"{name} {part}"])

    monkeypatch.setattr(suites, "run_suite", run_suite)
    results = suites.run_all(suites.ORDER, jobs=3)
    assert [result.name for result in results] == suites.ORDER
    assert sorted(ran) == sorted(suites.STARTS) == sorted(suites.ORDER)
    for result in results:
        parts = suites.PARTS.get(result.name, 1)
        assert sorted(ran[result.name]) == [(part, parts) for part in range(parts)]
        assert (result.passed, result.ok, len(result.failures)) == (2 * parts, parts == 1, parts)


def test_two_parts_that_are_mostly_spark_run_at_a_time_and_no_job_idles_before(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    running: list[str] = []
    together: list[list[str]] = []
    three = threading.Barrier(3)

    def run_suite(name: str, *, headed: bool, part: int, parts: int) -> suites.Result:
        started.append(name)
        running.append(name)
        if len(started) <= 3:  # the first of each job wait for each other
            three.wait(60)
        together.append(running[:])
        running.remove(name)
        return suites.Result(name)

    monkeypatch.setattr(suites, "run_suite", run_suite)
    suites.run_all(suites.ORDER, jobs=3)
    assert sorted(started[:3]) == ["spark", "spark", "types"]
    assert all(sum(name in suites.MOSTLY_SPARK for name in names) <= suites.MOST_SPARK for names in together)


def test_an_error_of_the_runner_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "run_suite", lambda *_args, **_options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        suites.run_all(suites.ORDER, jobs=3)


@pytest.mark.parametrize("suite", ["interop", "spark"])
def test_parts_have_about_as_many_files_and_those_that_share_servers_are_in_one(suite: str) -> None:
    files = suites.files_of(suites.PYTEST[suite])
    parts = [suites.part_of(files, part, 2) for part in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(files)
    assert abs(len(parts[0]) - len(parts[1])) <= 1
    for word in suites.TOGETHER:
        assert sum(any(word in file for file in part) for part in parts) <= 1


def test_a_part_of_a_suite_has_files_only() -> None:
    files = suites.files_of(suites.PYTEST["interpreted"])
    assert "tests/unit/tube/storage/test_meta.py" in files
    assert "tests/simulation/test_simulation.py" in files
    assert len(set(files)) == len(files) > 100
