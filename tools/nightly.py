"""Run the tests marked nightly, a part at a time; a part continues where its last run ended.

Usage: nightly.py [--minutes N] [--again] [PART ...]

A part has the nightly tests of one suite. A run ends after 45 minutes at the latest: a running test is then
interrupted, and the next run begins with it. When every test of a part has a result, the part is complete, and the next
run begins with the first test. Tests that failed at another commit run again. The results of each part, with commit and
conditions, are written to benchmarks/results/nightly/PART.md; a run in another checkout continues there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from tools.suites import ENVIRONMENT, PYTEST, PYTHON, ROOT, failure_text

OWN = {
    "simulation": "tests/simulation/test_simulation.py",
    "two-nodes": "tests/simulation/cluster",
    "fuzz": "tests/fuzz",
    "cluster": "tests/histories/test_cluster.py",
    "audit": "tests/unit/tools/test_audit.py",
}
PARTS = {
    **{part: [path for path in paths if path not in OWN.values()] for part, paths in PYTEST.items()},
    "docs": ["tests/docs"],
    **{part: [path] for part, path in OWN.items()},
}
"""Folders and files of the tests of each part, by name; a file of another part below its folders is left out."""

SUMMARIES = "benchmarks/results/nightly"
"""Folder of the summaries."""

MINUTES = 45.0
"""Maximum duration of a run in minutes."""

TEST_S = 1_200
"""Timeout of a test without its own in seconds: four times as long as otherwise, since these runs often have the lowest
priority."""

ENDING_S = 60.0
"""Seconds that an interrupted run has to close its fixtures."""

Results = dict[str, dict[str, Any]]
"""Test id to outcome (passed, failed, skipped), seconds, message, commit."""

_LINE = re.compile(r"(passed|failed|skipped) +([0-9.]+) s  (\S+)  (tests/.*?)(?:  to (tests/.*?))?(?:  (.*))?")
"""A line of a summary: outcome, seconds, commit, test, the last one if it is about several, message."""


_MEASURED = re.compile(r"\bmeasured: (.*)")
"""What a test has measured, at the end of its message, as :func:`measurements` writes it."""


class InterruptedRun(KeyboardInterrupt):
    """This process was interrupted while tests ran; ``results`` are those of the tests that had ended, of ``tests``."""

    def __init__(self, tests: list[str], results: Results) -> None:
        super().__init__()
        self.tests = tests
        self.results = results


def commit(root: Path = ROOT) -> str:
    """Return the short name of the commit, with ``-dirty`` if files differ; ``unknown`` outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{SUMMARIES}")
    return (git("describe", "--always") or "unknown") + ("-dirty" if changed else "")


def collect(paths: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the ids of the nightly tests below ``paths``, in the order in which they run.

    Raises:
        SystemExit: pytest cannot collect them; its output was printed.
    """
    command = [PYTHON, "-m", "pytest", "-q", "-m", "nightly", "--collect-only", "-W", "ignore", *paths]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode not in {0, 5}:
        print(done.stdout + done.stderr, file=sys.stderr)
        raise SystemExit(done.returncode)
    return [line for line in done.stdout.splitlines() if "::" in line]


def report_name(test: str) -> str:
    """Return the name of the test with this id in JUnit's report."""
    head, bracket, parameters = test.partition("[")
    file, *classes, name = head.split("::")
    return f"{'.'.join([*Path(file).with_suffix('').parts, *classes])}::{name}{bracket}{parameters}"


def read_report(report: Path, tests: Iterable[str]) -> Results:
    """Return the results of the ``tests`` that ended."""
    if not report.exists():
        return {}
    by_name = {report_name(test): test for test in tests}
    found: Results = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        test = by_name.get(f"{case.get('classname', '')}::{case.get('name', '')}")
        if test is None:
            continue
        notes = {item.get("name"): item.get("value", "") for item in case.iter("property")}
        outcome, message = "passed", notes.get("summary", "")
        for kind, name in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            if (element := case.find(kind)) is not None:
                outcome, message = name, failure_text(element)
        found[test] = {"outcome": outcome, "message": message, "seconds": float(case.get("time", "0"))}
    return found


def run(part: str, tests: list[str], seconds: float, root: Path = ROOT) -> Results:
    """Run ``tests`` in one pytest process for at most ``seconds``; returns the results of the tests that ended.

    Tests of the part ``interpreted`` run on the interpreted core.

    Raises:
        InterruptedRun: this process was interrupted; pytest has ended.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        # No timeout of faulthandler, which would end the process without a report. The family xunit2 does not support
        # properties that a test recorded.
        options = ["-o", "faulthandler_timeout=0", "-o", "junit_family=xunit1", f"--timeout={TEST_S}"]
        command = [PYTHON, "-m", "pytest", "-q", "-m", "nightly", *options, f"--junit-xml={report}", *tests]
        # A process group of its own: an interrupt of a terminal does not reach the processes of the tests, and all of
        # them can be ended.
        environment = {**os.environ, **ENVIRONMENT.get(part, {})}
        process = subprocess.Popen(command, cwd=root, env=environment, process_group=0)
        interrupt: KeyboardInterrupt | None = None
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt as error:
            interrupt = error
        finally:
            _end(process)
        results = read_report(report, tests)
    if interrupt is not None:
        raise InterruptedRun(tests, results) from interrupt
    return results


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt pytest, if it has not ended: it closes its fixtures and writes its report. Kill what is left, also of
    the processes of its tests."""
    try:
        process.send_signal(signal.SIGINT)
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_part(part: str, cursor: Path, seconds: float, root: Path = ROOT) -> tuple[list[str], Results]:
    """Continue ``part`` at its cursor, or without one at its summary; returns all its tests and their current results.

    Raises:
        InterruptedRun: this process was interrupted; it has the same results, as the cursor.
    """
    elsewhere = tuple(path for own, path in OWN.items() if own != part)
    tests = [test for test in collect(PARTS[part], root) if not test.startswith(elsewhere)]
    if cursor.exists():
        kept: Results = json.loads(cursor.read_text(encoding="utf-8"))
    else:
        kept = read_summary(root / SUMMARIES / f"{part}.md", tests)
    here = commit(root)
    results = {
        test: kept[test]
        for test in tests
        if test in kept and (kept[test]["outcome"] != "failed" or kept[test]["commit"] == here)
    }
    left = [test for test in tests if test not in results]
    if not left:
        results, left = {}, tests
    interrupt: InterruptedRun | None = None
    ended: Results = {}
    if left:
        try:
            ended = run(part, left, seconds, root)
        except InterruptedRun as error:
            interrupt, ended = error, error.results
    results |= {test: {**result, "commit": here} for test, result in ended.items()}
    cursor.parent.mkdir(parents=True, exist_ok=True)
    cursor.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if interrupt is not None:
        raise InterruptedRun(tests, results) from interrupt
    return tests, results


def summary(part: str, tests: list[str], results: Results) -> list[str]:
    """Return a table of what the tests have measured, the results of a part, then the counts.

    A test has a line; parameters of one test function that follow each other share it if they have passed at the same
    commit with the same message.
    """
    commits = ", ".join(sorted({result["commit"] for result in results.values()}))
    counts = {name: sum(r["outcome"] == name for r in results.values()) for name in ("passed", "failed", "skipped")}
    left = [test for test in tests if test not in results]
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    lines = [f"commit {commits}; {machine}", "", *_table(results)]
    for (outcome, at, message, *_), group in groupby(tests, lambda test: _shared(test, results)):
        members = list(group)
        if outcome:
            last = f"  to {members[-1]}" if len(members) > 1 else ""
            reason = f"  {message}" if message else ""
            seconds = sum(results[test]["seconds"] for test in members)
            lines.append(f"{outcome:<8}{seconds:>8.1f} s  {at}  {members[0]}{last}{reason}")
        else:
            lines.append(f"not run yet  {len(members):>6}  {members[0]}" + (" and more" if len(members) > 1 else ""))
    seconds = sum(result["seconds"] for result in results.values())
    lines += ["", f"{part}: {seconds:.0f} s, {len(left)} of {len(tests)} tests not run yet"]
    return [*lines, f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"]


def measurements(rounds: Iterable[tuple[str, Mapping[str, float]]]) -> str:
    """Return the end of a test's message with what each of its rounds has measured.

    The summary of the part has a table of them, by the name of the round and of the value. Rounds ``GROUP/NAME`` are
    also counted together.
    """
    return "measured: " + "; ".join(
        f"{name}: " + ", ".join(f"{what}={value:.3g}" for what, value in values.items()) for name, values in rounds
    )


def _table(results: Results) -> list[str]:
    """Return the table of what the tests have measured; empty without measurements."""
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for result in results.values():
        if result["outcome"] != "passed" or (match := _MEASURED.search(result["message"])) is None:
            continue
        for part in match[1].split("; "):
            name, _, values = part.partition(": ")
            group, slash, _ = name.partition("/")
            for item in values.split(", "):
                what, _, value = item.partition("=")
                for row in (name, group) if slash else (name,):
                    found[row, what].append(float(value))
    if not found:
        return []
    lines = [f"{'measured':<44}{'count':>8}{'median':>10}{'p99':>10}{'largest':>10}"]
    for (name, what), all_values in sorted(found.items()):
        all_values.sort()
        p99 = all_values[math.ceil(0.99 * len(all_values)) - 1]
        text = f"{name}: {what}"
        lines.append(
            f"{text:<44}{len(all_values):>8}{statistics.median(all_values):>10.3g}{p99:>10.3g}{all_values[-1]:>10.3g}"
        )
    return [*lines, ""]


def _shared(test: str, results: Results) -> tuple[str, ...]:
    """What tests on one line of the summary have in common: outcome, commit, message, test function."""
    result = results.get(test)
    if result is None:
        return "", "", ""
    single = test if result["outcome"] != "passed" else test.partition("[")[0]
    return result["outcome"], result["commit"], result["message"], single


def read_summary(path: Path, tests: list[str]) -> Results:
    """Return the results of ``tests`` in a summary; empty without one. Tests on one line get equal seconds."""
    found: Results = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        match = _LINE.fullmatch(line)
        if match is None or match[4] not in tests or (match[5] or match[4]) not in tests:
            continue
        members = tests[tests.index(match[4]) : tests.index(match[5] or match[4]) + 1]
        seconds = float(match[2]) / max(1, len(members))
        result = {"outcome": match[1], "message": match[6] or "", "seconds": seconds, "commit": match[3]}
        found |= dict.fromkeys(members, result)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help="; ".join(PARTS))
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, metavar="N", help="longest run (default: %(default)s)"
    )
    parser.add_argument("--again", action="store_true", help="begin with the first test")
    options = parser.parse_args()
    # A shell starts background jobs with SIGINT ignored, and pytest would not be interrupted then.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # otherwise pytest would continue
    failed = False
    for part in options.parts or PARTS:
        cursor = ROOT / "build" / "nightly" / f"{part}.json"
        if options.again:
            cursor.unlink(missing_ok=True)
        started = time.monotonic()
        interrupted = False
        try:
            tests, results = run_part(part, cursor, options.minutes * 60, ROOT)
        except InterruptedRun as error:
            tests, results, interrupted = error.tests, error.results, True
        except KeyboardInterrupt:
            print("interrupted before the tests", file=sys.stderr)
            return 130
        lines = summary(part, tests, results)
        print("\n".join(lines), f"this run: {time.monotonic() - started:.0f} s", sep="\n", flush=True)
        target = ROOT / SUMMARIES / f"{part}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join([f"# Nightly tests: {part}", "", "```", *lines, "```", ""]), encoding="utf-8")
        if interrupted:
            print("interrupted; the next run continues", file=sys.stderr)
            return 130
        failed = failed or any(result["outcome"] == "failed" for result in results.values())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
