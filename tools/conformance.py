"""Check the MQTT 5.0 conformance statements and their tests, and write them as a page.

``tests/conformance/mqtt5/statements.json`` has a row for each numbered statement (Appendix B of the standard): who must
meet it, the requirement (paraphrased), and the ids of tests as pytest prints them, with the part in brackets for
parametrized tests. A row without tests has the reason in ``not_met``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["Rows", "collected", "load", "numbered", "page", "problems"]

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / "tests" / "conformance" / "mqtt5"
MOST_STATEMENTS = 5
"""Maximum number of statements per test."""

Rows = dict[str, dict[str, Any]]


def load() -> Rows:
    """Return statement -> row, in the standard's order."""
    rows: Rows = json.loads((DIRECTORY / "statements.json").read_text(encoding="utf-8"))
    return rows


def numbered() -> list[str]:
    """Return the ids of Appendix B."""
    sections: dict[str, list[int]] = json.loads((DIRECTORY / "appendix_b.json").read_text(encoding="utf-8"))
    return [f"MQTT-{section}-{number}" for section, numbers in sections.items() for number in numbers]


def collected(rows: Rows) -> set[str]:
    """Return the ids of the tests that pytest collects in the files named by the rows, with and without their
    parameters."""
    files = sorted({test.split("::")[0] for row in rows.values() for test in row.get("tests", ())})
    there = [file for file in files if (ROOT / file).exists()]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *there],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        raise SystemExit(f"conformance: the tests cannot be collected:\n{run.stdout}{run.stderr}")
    ids = {line for line in run.stdout.splitlines() if "::" in line}
    return ids | {test.split("[")[0] for test in ids}


def problems(rows: Rows, tests: set[str]) -> list[str]:
    """Return the errors of the rows, given the existing tests; empty if there are none."""
    found: list[str] = []
    expected = numbered()
    found += [f"{statement}: it is missing" for statement in expected if statement not in rows]
    known = set(expected)
    found += [f"{statement}: the standard has no such statement" for statement in rows if statement not in known]
    shown: Counter[str] = Counter()
    for statement, row in rows.items():
        if row.get("who") not in ("server", "client", "both") or not row.get("requirement"):
            found.append(f"{statement}: has no party or requirement")
        named = row.get("tests", [])
        if bool(named) == bool(row.get("not_met")):
            found.append(f"{statement}: needs either tests, or the reason in not_met")
        shown.update(set(named))
        found += [f"{statement}: there is no test {test}" for test in named if test not in tests]
    found += [
        f"{test}: checks {count} statements, {MOST_STATEMENTS} at most"
        for test, count in shown.items()
        if count > MOST_STATEMENTS
    ]
    return found


def page(note: str) -> str:
    """Return the reference page.

    Raises:
        SystemExit: the rows have errors.
    """
    rows = load()
    wrong = problems(rows, collected(rows))
    if wrong:
        raise SystemExit("conformance: tests/conformance/mqtt5/statements.json:\n  " + "\n  ".join(wrong))
    missing = sum("not_met" in row for row in rows.values())
    count = f"{missing} {'is' if missing == 1 else 'are'} not met, with the reason" if missing else "All are met"
    about = (
        f"The {len(rows)} numbered conformance statements of MQTT 5.0 (OASIS Standard, Appendix B), paraphrased, with "
        "the party that must meet each and the tests that check it. Statements about clients are checked with "
        f"penstock's client, or by the broker's response to a client that violates them. {count}."
    )
    lines = [
        "# MQTT 5.0 conformance",
        "",
        note,
        "",
        about,
        "",
        "| statement | party | requirement | tests |",
        "| --- | --- | --- | --- |",
    ]
    for statement, row in rows.items():
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in row.get("tests", ()))
        requirement = row["requirement"].replace("|", "\\|")
        lines.append(f"| {statement} | {row['who']} | {requirement} | {tests or 'not met: ' + row['not_met']} |")
    return "\n".join([*lines, ""])
