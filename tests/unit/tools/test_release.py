"""``tools/release.py``: what it refuses, and what it writes. The whole of it: tests/end_to_end/test_release.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

import penstock
from tools import release

CHANGELOG = "# Changelog\n\n## 0.2.0 (2026-12-01)\n"


def checkout(root: Path, changelog: str = CHANGELOG) -> Path:
    package = root / "src" / "penstock"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.2.0"\n')
    (root / "CHANGELOG.md").write_text(changelog)
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    return root


def test_the_version_is_that_of_the_package() -> None:
    assert release.version_of(release.ROOT) == penstock.__version__


def test_a_clean_checkout_with_a_dated_version_is_ready(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    release.check_ready(root, release.version_of(root))
    (root / "new").write_text("1")
    with pytest.raises(release.NotReadyError, match=r"has changes[^\n]*\n.*new"):
        release.check_ready(root, "0.2.0")


@pytest.mark.parametrize("heading", ["## 0.2.0 (unreleased)", "## 0.2.0", "## 0.2.01 (2026-12-01)"])
def test_a_version_without_a_date_is_refused(tmp_path: Path, heading: str) -> None:
    root = checkout(tmp_path, f"# Changelog\n\n{heading}\n")
    with pytest.raises(release.NotReadyError, match=r"no heading '## 0\.2\.0 \(YEAR"):
        release.check_ready(root, "0.2.0")


def test_a_directory_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("1")
    assert release.main(["--draft", "--directory", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err


def program(folder: Path, text: str) -> Path:
    """A program that writes ``text``, as an interpreter that is asked for its version."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho {text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("cpython 3.10", "it is cpython 3.10, and the core needs CPython 3.11 or newer"),
        ("pypy 3.11", "it is pypy 3.11, and the core needs CPython"),
        ("nothing", "it is no Python"),
    ],
)
def test_a_program_that_cannot_run_penstock_is_refused(said: str, reason: str, tmp_path: Path) -> None:
    path = program(tmp_path, said)
    with pytest.raises(release.NotReadyError, match=f"--python {path}: {reason}"):
        release.interpreters([path], tmp_path / "work", "pure")
    with pytest.raises(release.NotReadyError, match="--python /none: it is no Python"):
        release.interpreters([Path("/none")], tmp_path / "work", "pure")


def test_two_interpreters_of_one_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(release.NotReadyError, match=rf"{sys.executable} is Python 3\.\d+ as well"):
        release.interpreters([Path(sys.executable)], tmp_path, "pure")


def test_a_pure_wheel_needs_no_environments_to_build(tmp_path: Path) -> None:
    path = program(tmp_path, "cpython 3.99")
    found = release.interpreters([path], tmp_path / "work", "pure")
    assert [each.path for each in found] == [Path(sys.executable), path]
    assert not (tmp_path / "work").exists()


def test_the_sums_are_those_of_sha256sum(tmp_path: Path) -> None:
    for name in ("b.whl", "a.tar.gz"):
        (tmp_path / name).write_text(name)
    release.write_sums(tmp_path)
    lines = (tmp_path / release.SUMS).read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == ["a.tar.gz", "b.whl"]
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", release.SUMS], cwd=tmp_path, check=True)


def test_the_index_lists_the_distributions_with_their_digests(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("penstock-1-py3-none-any.whl", "penstock-1.tar.gz", "penstock-1-licenses.md"):
        (folder / name).write_text(name)
    with release.package_index(folder, tmp_path / "index") as url:
        with urlopen(f"{url}/penstock/") as answer:
            page = answer.read().decode()
        with urlopen(f"{url}/penstock/penstock-1-py3-none-any.whl") as answer:
            wheel = answer.read()
    assert wheel == b"penstock-1-py3-none-any.whl"
    digest = release.digest(folder / "penstock-1-py3-none-any.whl")
    assert f'href="penstock-1-py3-none-any.whl#sha256={digest}"' in page
    assert page.count("<a ") == 2


def test_the_inventory_has_the_version_and_the_libraries_of_the_console(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"metadata": {"component": {"name": "penstock"}}, "components": []}))
    release.complete_inventory(file, "0.2.0")
    found = json.loads(file.read_text())
    assert found["metadata"]["component"]["purl"] == "pkg:pypi/penstock@0.2.0"
    names = {component["name"]: component["licenses"] for component in found["components"]}
    assert {"preact", "htm", "uplot", "@picocss/pico"} <= names.keys()
    assert names["htm"] == [{"license": {"id": "Apache-2.0"}}]


def test_a_licence_that_the_metadata_lacks_is_added_and_no_other() -> None:
    table = "| pyrage       | 1.4.0   | UNKNOWN |\n| pyrage-other | 1.4.0   | UNKNOWN |\n"
    assert release.with_known_licences(table) == table.replace("UNKNOWN", "MIT", 1)


def installation(folder: Path, last: str, status: int) -> Path:
    """The Python of an installation whose command `penstock` writes a step and then ``last``."""
    folder.mkdir()
    penstock = folder / "penstock"
    penstock.write_text(f"#!/bin/sh\nset > set.txt\necho '{{\"event\": \"step\"}}'\necho '{last}'\nexit {status}\n")
    penstock.chmod(0o755)
    return folder / "python"


def test_the_demo_runs_in_the_folder_and_without_variables_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PENSTOCK_CORE", "PYTHONPATH", "SPARK_HOME", "PYSPARK_PYTHON", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "of-the-checkout")
    monkeypatch.setenv("JAVA_HOME", "kept")
    release.run_demo(installation(tmp_path / "bin", '{"ok": true}', 0), tmp_path)
    found = (tmp_path / "set.txt").read_text()
    assert "of-the-checkout" not in found
    assert "kept" in found


@pytest.mark.parametrize(("last", "status"), [('{"ok": false}', 0), ('{"ok": true}', 1), ('{"error": {}}', 1)])
def test_a_demo_that_fails_is_reported_with_what_it_wrote(last: str, status: int, tmp_path: Path) -> None:
    with pytest.raises(release.NotReadyError, match=rf"exit status {status}\n.*step.*\n.*{last[2:6]}"):
        release.run_demo(installation(tmp_path / "bin", last, status), tmp_path)
