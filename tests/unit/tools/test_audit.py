"""``tools/audit.py``: what is not known is reported, and is no success. A nightly test looks up all pinned packages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import audit
from tools.release import console_libraries


def program(folder: Path, stdout: object, stderr: str = "", status: int = 0) -> Path:
    """A program that answers as pip-audit or npm."""
    path = folder / "program"
    text = stdout if isinstance(stdout, str) else json.dumps(stdout)
    path.write_text(
        f"#!{sys.executable}\nimport sys\nprint({text!r})\nprint({stderr!r}, file=sys.stderr)\nsys.exit({status})\n"
    )
    path.chmod(0o755)
    return path


def requirements(folder: Path) -> Path:
    file = folder / "some.txt"
    file.write_text(
        "h11==0.14.0 \\\n    --hash=sha256:00\nuvloop==0.23.0 ; sys_platform != 'win32' \\\n    --hash=sha256:01\n"
    )
    return file


def test_a_vulnerability_is_reported_with_the_version_that_has_the_fix(tmp_path: Path) -> None:
    vulns = [
        {"id": "PYSEC-1", "fix_versions": ["0.16.0"]},
        {"id": "GHSA-2", "fix_versions": []},
    ]
    answer = {
        "dependencies": [
            {"name": "h11", "version": "0.14.0", "vulns": vulns},
            {"name": "uvloop", "version": "0.23.0", "vulns": []},
        ]
    }
    found = audit.Audit()
    found.add_python(requirements(tmp_path), program(tmp_path, answer, status=1))
    assert found.lines() == [
        "h11 0.14.0: PYSEC-1, fixed in 0.16.0; GHSA-2, fixed in no version",
        "2 packages: 1 with a known vulnerability, 0 not looked up",
    ]


def test_a_package_that_the_list_lacks_is_not_looked_up(tmp_path: Path) -> None:
    """pip-audit itself writes 'No known vulnerabilities found' and has exit status 0."""
    answer = {"dependencies": [{"name": "h11", "skip_reason": "Dependency not found on PyPI: h11 (0.14.0)"}]}
    found = audit.Audit()
    found.add_python(requirements(tmp_path), program(tmp_path, answer))
    assert found.lines() == [
        "1 not looked up: the list of PyPI does not have them: h11 0.14.0",
        "1 packages: 0 with a known vulnerability, 1 not looked up",
    ]


@pytest.mark.parametrize("stdout", ["", "[]", "no JSON"])
def test_without_a_list_no_package_is_looked_up(stdout: str, tmp_path: Path) -> None:
    found = audit.Audit()
    found.add_python(requirements(tmp_path), program(tmp_path, stdout, "ERROR: Could not connect to PyPI", 1))
    assert found.lines()[0] == "2 not looked up: ERROR: Could not connect to PyPI: h11 0.14.0, uvloop 0.23.0"
    assert found.vulnerable == {}


def test_the_libraries_of_the_console_are_looked_up(tmp_path: Path) -> None:
    (version,) = [each["version"] for each in console_libraries() if each["name"] == "preact"]
    vulnerable: dict[str, Any] = {"preact": {"via": [{"url": "https://example.org/GHSA-3"}, "htm"]}}
    found = audit.Audit()
    found.add_console(str(program(tmp_path, {"vulnerabilities": vulnerable}, status=1)))
    assert found.vulnerable == {f"preact {version}": "https://example.org/GHSA-3; because of htm"}
    assert found.unknown == {}
    assert len(found.packages) == len(console_libraries())


def test_without_npm_or_its_list_the_libraries_of_the_console_are_not_looked_up(tmp_path: Path) -> None:
    for npm, reason in (
        (None, "npm is not installed"),
        (
            str(program(tmp_path, {"message": "405 Not Allowed - POST https://npm.invalid"}, "", 1)),
            "npm: 405 Not Allowed",
        ),
    ):
        found = audit.Audit()
        found.add_console(npm)
        assert set(found.unknown.values()) == {reason}
        assert len(found.unknown) == len(console_libraries())


def test_the_files_with_packages_of_python_are_looked_up() -> None:
    names = {file.name for file in audit.requirement_files()}
    assert {"audit.txt", "build.txt", "dev.txt", "node.txt", "pipeline.txt", "release.txt"} <= names
    assert "debian.txt" not in names


@pytest.mark.nightly
def test_no_pinned_package_has_a_known_vulnerability(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = audit.audit(tmp_path / "environment")
    assert found.vulnerable == {}
    if found.unknown:
        pytest.skip(f"{found.lines()[-1]}: {'; '.join(sorted(set(found.unknown.values())))}")
    record_property("summary", found.lines()[-1])
