"""Run test suites; print time and processor time per suite, the slowest and dearest tests and the total count.

Usage: python -m tools.suites [--all] [--jobs N] [SUITE ...]

Suites are independent: one that fails does not stop the others, and the exit status is 1 if any did. With several jobs
they and their parts run in parallel, and each line of output begins with its suite. Skipped tests are listed with the
reason, so that a successful run shows what was not tested. The tests marked nightly are run by tools/nightly.py.
Processor time includes all processes that a suite starts, also Java's: on two processors it limits a run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from penstock.spark.environment.java import SHORT_LIVED
from tools import class_archive

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable

PYTEST = {
    "unit": ["tests/architecture", "tests/unit", "tests/engine", "tests/conformance", "tests/fuzz"],
    "faults": ["tests/faults", "tests/histories", "tests/simulation"],
    "interop": ["tests/interop"],
    "end_to_end": ["tests/end_to_end"],
    "spark": ["tests/spark"],
    "docs": ["tests/docs"],
    "interpreted": [
        "tests/unit/mqtt",
        "tests/unit/statestore",
        "tests/engine",
        "tests/conformance",
        # Those of modules of the core.
        *(f"tests/unit/runtime/test_{name}.py" for name in ("clock", "commit_queue", "environment", "files")),
        "tests/unit/runtime/test_stepped_clock.py",
        "tests/unit/runtime/wal",
        "tests/unit/tube/engine/test_read_ahead.py",
        "tests/unit/tube/storage/test_meta.py",
        "tests/unit/node/test_node_mqtt.py",
        "tests/unit/node/test_tls_alerts.py",
        "tests/unit/cli/test_tube_offsets.py",
        # Bugs that are planted in the core; seeds do the same in both forms, which the suite "faults" compares.
        "tests/simulation/test_simulation.py",
    ],
}
ENVIRONMENT = {"interpreted": {"PENSTOCK_CORE": "interpreted"}}
"""Environment variables of a suite. All other suites run on the compiled core, if it is built."""
COMMON = {"PYTHONDONTWRITEBYTECODE": ""}
"""Environment variables of all suites, because the tests start hundreds of processes. Without bytecode in
``__pycache__``, as in many container images, each start of a node compiles all of its modules (1.2 instead of 0.9 s of
processor time)."""
WITH_SPARK = frozenset({"spark", "docs", "end_to_end", "interop"})
"""Suites that start sessions of Spark, with options of Java for processes that live for seconds."""
MOSTLY_SPARK = frozenset({"spark", "docs", "end_to_end"})
MOST_SPARK = 2
"""Suites, or parts, of ``MOSTLY_SPARK`` that run at the same time: each has a Java process that uses all cores."""
COMMANDS: dict[str, list[list[str]]] = {
    "lint": [[PYTHON, "-m", "ruff", "format", "--check", "."], [PYTHON, "-m", "ruff", "check", "."]],
    "types": [[PYTHON, "-m", "mypy", "src", "tests", "tools", "benchmarks"]],
}
ORDER = ["lint", "types", "unit", "faults", "interop", "docs", "interpreted", "end_to_end", "spark"]
"""Suites as they are reported."""
STARTS = ["spark", "types", "end_to_end", "unit", "docs", "faults", "interop", "interpreted", "lint"]
"""Suites as they are started: the longest first, so that all jobs end at about the same time. Types need no archive of
Java's classes, which the first suite with Spark makes."""
PARTS = {"spark": 2, "docs": 2, "faults": 2, "interop": 2, "interpreted": 2}
"""Suites that are cut into parts, for the same reason. Each part starts the session and the node of its tests."""
TOGETHER = ("tube_java", "kafka")
"""Files with one of these words in their name are in one part: Apache's servers, which they share, start once."""
USUAL_S = {"types": 75, "unit": 390, "interpreted": 190}
"""Processor time of suites in seconds, as far as it was measured alone, on two busy processors at about 3 GHz."""
DEAR = 1.2
"""A suite that needs this many times its usual processor time is named."""

_EXCEPTION = re.compile(r"(?:E {3,}| +\| )([A-Za-z_][\w.]*: .+)")
"""A line of a test's traceback with an exception: pytest's own form, or Python's form of an exception group."""

MEMORY_FOLDER = Path("/dev/shm")
MEMORY_BYTES = 6 << 30
"""Free memory that is needed to keep the files of the tests in memory."""

JOBS = min(4, (os.cpu_count() or 1) + 2)
"""Suites that run in parallel: two more than processors, at most 4. Half of their time is waiting, for a server to
start or for a timer: with one more than processors, a tenth of the processor time was not used."""


@dataclass
class Result:
    """Result of one suite: seconds, whether it passed, and the counts and times of its tests."""

    name: str
    seconds: float = 0.0
    processor_s: float = 0.0
    ok: bool = True
    passed: int = 0
    failed: int = 0
    skipped: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    slowest: list[tuple[float, str]] = field(default_factory=list)
    dearest: list[tuple[float, str]] = field(default_factory=list)


def read_report(report: Path, result: Result) -> None:
    """Add the tests of a JUnit report to ``result``."""
    if not report.exists():
        return
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        result.slowest.append((float(case.get("time", "0")), name))
        spent = case.find("properties/property[@name='processor_s']")
        if spent is not None:
            result.dearest.append((float(spent.get("value", "0")), name))
        skip = case.find("skipped")
        broken = case.find("failure") if case.find("failure") is not None else case.find("error")
        if broken is not None:
            result.failed += 1
            result.failures.append(f"{name}: {failure_text(broken)}")
        elif skip is not None:
            result.skipped.append(f"{name}: {skip.get('message', '')}")
        else:
            result.passed += 1


def first_lines(message: str, most: int = 300) -> str:
    """Return the beginning of a message as one line, enough to recognize the failure if only the end of a log is
    available."""
    text = " ".join(message.split())
    return text if len(text) <= most else f"{text[:most]}..."


def failure_text(failure: ET.Element) -> str:
    """Return a failure or error of a JUnit report as one line: its message, then the causes and the members of an
    exception group, at most six of them. The message of a group only has their number."""
    message = failure.get("message", "")
    found = (match[1] for match in map(_EXCEPTION.fullmatch, (failure.text or "").splitlines()) if match)
    causes = list(dict.fromkeys(line for line in found if line[:200] not in message))
    left = [f"{len(causes) - 6} more"] if len(causes) > 6 else []
    return "; ".join([first_lines(message), *(first_lines(line, 200) for line in causes[:6]), *left])


def pytest_command(paths: list[str], report: Path) -> list[str]:
    return [PYTHON, "-m", "pytest", "-q", "-m", "not nightly", f"--junit-xml={report}", *paths]


def temporary_parent() -> Path | None:
    """Return where the tests keep their files: in memory if there is enough, because thousands of fsync calls wait for
    a disk; None: where the system keeps temporary files. Power loss is simulated, so no test needs a real disk."""
    try:
        available = re.search(
            r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE
        )
        room = shutil.disk_usage(MEMORY_FOLDER).free
    except OSError:  # not Linux
        return None
    enough = available is not None and min(int(available[1]) << 10, room) >= MEMORY_BYTES
    return MEMORY_FOLDER if enough and os.access(MEMORY_FOLDER, os.W_OK) else None


_archive = threading.Lock()
"""Held while the archive is made, so that suites that begin at the same time make one."""


def environment_of(name: str, scratch: str) -> dict[str, str]:
    if name in WITH_SPARK:
        with _archive:
            class_archive.prepare()
    java = {"SPARK_SUBMIT_OPTS": SHORT_LIVED}
    return {**os.environ, "TMPDIR": scratch, **COMMON, **java, **ENVIRONMENT.get(name, {})}


def files_of(paths: list[str]) -> list[str]:
    """Return the test files below ``paths``, relative to the project."""
    found = (ROOT / path for path in paths)
    files = (file for path in found for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path]))
    return [str(file.relative_to(ROOT)) for file in files]


def part_of(files: list[str], part: int, parts: int) -> list[str]:
    """Return the files of one of ``parts`` parts, which have as many files as ``TOGETHER`` permits."""
    groups: dict[str, list[str]] = {}
    for file in files:
        groups.setdefault(next((word for word in TOGETHER if word in file), file), []).append(file)
    found: list[list[str]] = [[] for _ in range(parts)]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(found, key=len).extend(group)
    return sorted(found[part], key=files.index)


def run_suite(name: str, *, headed: bool, part: int = 0, parts: int = 1) -> Result:
    """Run one suite, or one of ``parts`` parts of its files; ``headed``: lines of output begin with its name."""
    result = Result(name)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=temporary_parent(), ignore_cleanup_errors=True) as scratch:
        report = Path(scratch) / "report.xml"
        commands = list(COMMANDS.get(name, []))
        paths = PYTEST.get(name, [])
        if paths:
            commands.append(pytest_command(paths if parts == 1 else part_of(files_of(paths), part, parts), report))
        environment = environment_of(name, scratch)
        spent = Path(scratch) / "processor_time"
        for command in commands:
            print(f"== {name}: {' '.join(command[2:] if command[0] == PYTHON else command)}", flush=True)
            measured = [PYTHON, "-m", "tools.processor_time", str(spent), *command]
            status = run_headed(measured, environment, f"{name:<11} | ") if headed else run_plain(measured, environment)
            result.ok = result.ok and status == 0
            result.processor_s += float(spent.read_text(encoding="ascii")) if spent.exists() else 0.0
        read_report(report, result)
    result.seconds = time.monotonic() - started
    return result


def run_plain(command: list[str], environment: dict[str, str]) -> int:
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def run_headed(command: list[str], environment: dict[str, str], head: str) -> int:
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(head + line, end="", flush=True)
    return process.returncode


def run_all(names: list[str], *, jobs: int) -> list[Result]:
    """Run the suites and their parts, ``jobs`` at a time, in the order of ``STARTS``; of those that are mostly Spark,
    ``MOST_SPARK`` at a time."""
    headed = min(jobs, len(names)) > 1
    parts = {name: PARTS.get(name, 1) if headed else 1 for name in names}
    waiting = [(name, part) for name in sorted(names, key=STARTS.index) for part in range(parts[name])]
    results: dict[tuple[str, int], Result] = {}
    changed = threading.Condition()
    free = [MOST_SPARK]

    def startable() -> tuple[str, int] | None:
        return next((each for each in waiting if free[0] or each[0] not in MOSTLY_SPARK), None)

    def work() -> None:
        while True:
            with changed:
                # What waits while nothing can be started is Spark's; a job that ends another one starts it.
                changed.wait_for(lambda: not waiting or startable() is not None)
                found = startable()
                if found is None:
                    return
                waiting.remove(found)
                name, part = found
                free[0] -= name in MOSTLY_SPARK
                changed.notify_all()
            try:
                results[found] = run_suite(name, headed=headed, part=part, parts=parts[name])
            finally:
                with changed:
                    free[0] += name in MOSTLY_SPARK
                    changed.notify_all()

    with ThreadPoolExecutor(jobs) as pool:
        for job in [pool.submit(work) for _ in range(jobs)]:
            job.result()
    return [joined([results[name, part] for part in range(parts[name])]) for name in names]


def joined(parts: list[Result]) -> Result:
    """Return the result of a suite that ran in parts."""
    return Result(
        parts[0].name,
        sum(part.seconds for part in parts),
        sum(part.processor_s for part in parts),
        all(part.ok for part in parts),
        sum(part.passed for part in parts),
        sum(part.failed for part in parts),
        [line for part in parts for line in part.skipped],
        [line for part in parts for line in part.failures],
        [test for part in parts for test in part.slowest],
        [test for part in parts for test in part.dearest],
    )


def close(results: list[Result], seconds: float) -> list[str]:
    """Return the lines of the final report; ``seconds`` is the duration of the whole run."""
    lines = ["", "suite         result    passed  failed  skipped   seconds  processor  usual"]
    lines += [
        f"{r.name:<13} {'ok' if r.ok else 'FAILED':<8} {r.passed:>7} {r.failed:>7} {len(r.skipped):>8}"
        f" {r.seconds:>9.1f} {r.processor_s:>10.1f} {USUAL_S.get(r.name, '-'):>6}"
        for r in results
    ]
    for head, tests in (
        ("slowest tests", (t for r in results for t in r.slowest)),
        ("dearest tests, in seconds of processor time", (t for r in results for t in r.dearest)),
    ):
        lines += ["", head, *(f"{value:>8.1f} s  {name}" for value, name in sorted(tests, reverse=True)[:10])]
    dear = [r.name for r in results if r.processor_s > DEAR * USUAL_S.get(r.name, r.processor_s)]
    if dear:
        lines += ["", f"dearer than usual, on this machine or since a change: {' '.join(dear)}"]
    skipped = [reason for r in results for reason in r.skipped]
    if skipped:
        lines += ["", f"skipped: {len(skipped)}", *(f"  {reason}" for reason in skipped)]
    failures = [failure for r in results for failure in r.failures]
    if failures:
        lines += ["", f"failed: {len(failures)}", *(f"  {failure}" for failure in failures)]
    passed, failed = sum(r.passed for r in results), sum(r.failed for r in results)
    # A suite without single tests (lint, types) counts as one.
    passed += sum(r.ok for r in results if r.name in COMMANDS)
    failed += sum(not r.ok and not r.failed for r in results)
    spent = sum(r.processor_s for r in results)
    total = f"{seconds:.0f} s in all, {spent:.0f} s of processor time on {os.cpu_count()} processors"
    return [*lines, "", total, f"{passed} passed, {failed} failed, {len(skipped)} skipped"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", choices=[*ORDER, []], metavar="SUITE")
    parser.add_argument("--all", action="store_true", help="every suite, in order")
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help="suites at a time (default: %(default)s)")
    options = parser.parse_args()
    names = ORDER if options.all else options.suites
    started = time.monotonic()
    results = run_all(list(dict.fromkeys(names)), jobs=max(1, options.jobs))
    report = close(results, time.monotonic() - started)
    print("\n".join(report), flush=True)
    return 0 if all(r.ok for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
