"""The archive of a pipeline: what it contains, that it is reproducible, and what is refused."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tarfile
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, StorageError
from penstock.pipelines.export import archive
from penstock.pipelines.export.archive import ArchiveFile, distributions, package_files, pipeline_files, write_archive
from penstock.pipelines.spec.loader import load

FILE = """\
name: p
source: {topics: [t], options: {tubemq.user: reader, tubemq.passwordFile: /secrets/reader}}
statestore: {broker: "mqtts://water:${file:/secrets/water}@edge"}
steps:
  - {name: rows, parse: {schema_file: schemas/rows.ddl}}
  - {name: twice, python: {file: twice.py, schema: password STRING}}
sinks:
  - {name: rows, table: {path: lake/rows}}
  - {name: sent, tubemq: {topic: sent, value: machine, headers: {token: "{machine}", unit: bar}}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "rows.ddl").write_text("machine STRING")
    (tmp_path / "twice.py").write_text("def transform(batch): return batch")
    path = tmp_path / "p.yaml"
    path.write_text(FILE.replace("/secrets/water", str(tmp_path / "water")))
    (tmp_path / "water").write_text("hunter2")
    return path


def test_files_of_the_pipeline(file: Path) -> None:
    found = pipeline_files(file, load(file))
    assert [entry.name for entry in found] == ["pipeline/p.yaml", "pipeline/schemas/rows.ddl", "pipeline/twice.py"]
    assert all(isinstance(entry.content, Path) and b"hunter2" not in entry.content.read_bytes() for entry in found)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("${file:/secrets/water}", "hunter2", "3:22: the file contains a password"),
        ("${file:/secrets/water}", "${WORD:-hunter2}", "3:22: the file contains a password"),
        ("${file:/secrets/water}", "hunter${WORD:-}2", "the file contains a password"),
        ("tubemq.passwordFile: /secrets/reader", "clientSecret: hunter2", "the file contains a password"),
        ("tubemq.passwordFile: /secrets/reader", "fs.s3a.secret.key: hunter2", "the file contains a password"),
        ('"{machine}"', "hunter2", "the file contains a password"),
        ("unit: bar", "Authorization: 'Bearer ${WORD:-hunter2}'", "the file contains a password"),
        ("water:${file:/secrets/water}", "water:${file:/secrets/water}hunter2", "the file contains a password"),
        ("${file:/secrets/water}", "${file:water}", "would not exist where the pipeline runs"),
    ],
)
def test_secrets_are_refused(file: Path, old: str, new: str, words: str) -> None:
    pipeline = load(file)
    file.write_text(FILE.replace(old, new))
    with pytest.raises(ConfigError) as raised:
        pipeline_files(file, pipeline)
    assert words in str(raised.value)
    assert "hunter" not in str(raised.value)
    assert (raised.value.why, raised.value.hint) != (None, None)


def test_variables_without_a_password_are_accepted(file: Path) -> None:
    url = "mqtts://${LOGIN:-water}:${WORD:-}@${HOST:-edge:8883}"
    file.write_text(file.read_text().replace("mqtts://water:${file:" + str(file.parent / "water") + "}@edge", url))
    assert url in file.read_text()
    assert pipeline_files(file, load(file))


@pytest.mark.parametrize("path", ["DIRECTORY/schemas/rows.ddl", "schemas/../schemas/rows.ddl"])
def test_files_elsewhere_are_refused(file: Path, path: str) -> None:
    path = path.replace("DIRECTORY", str(file.parent))
    file.write_text(file.read_text().replace("schemas/rows.ddl", path))
    with pytest.raises(ConfigError, match=f"step 'rows': '{path}' would not be part of the package"):
        pipeline_files(file, load(file))


def test_requirements_without_those_of_spark() -> None:
    found = distributions(["spark"])
    assert {"penstock", "pydantic", "pydantic-core", "pyarrow", "deltalake", "arro3-core", "obstore"} <= set(found)
    assert not {"pyspark", "py4j", "pytest", "mypy", "confluent-kafka", "psycopg"} & set(found)
    assert "psycopg-binary" in distributions(["spark", "postgresql"])


def _installed(site: Path, name: str, requires: str = "", *, files: dict[str, str] | None = None) -> PathDistribution:
    info = site / f"{name}-1.dist-info"
    given = {f"{info.name}/METADATA": f"Name: {name}\nVersion: 1\n{requires}", **(files or {})}
    given[f"{info.name}/RECORD"] = "".join(f"{path},,\n" for path in (*given, f"{info.name}/RECORD", "../bin/run"))
    for path, text in given.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    return PathDistribution(info)


def test_a_missing_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    requires = "Requires-Dist: other[fast]>=1; python_version > '3'\nRequires-Dist: gone; extra == 'spark'\n"
    _installed(tmp_path / "site", "penstock", requires + "Requires-Dist: old; python_version < '3'\n")
    _installed(tmp_path / "site", "other", "Requires-Dist: quick; (sys_platform != 'x') and extra == 'fast'\n")
    _installed(tmp_path / "site", "quick", "Requires-Dist: penstock\n")
    assert sorted(distributions([])) == ["other", "penstock", "quick"]
    with pytest.raises(ConfigError, match="'gone' is not installed"):
        distributions(["spark"])


def test_files_of_packages_without_programs_and_records(tmp_path: Path) -> None:
    files = {"one/__init__.py": "", "one/__pycache__/a.pyc": "", "one/b.so": "", "one.pth": "/home"}
    names = [entry.name for entry in package_files([_installed(tmp_path, "one", files=files)])]
    assert sorted(names) == ["packages/one-1.dist-info/METADATA", "packages/one/__init__.py", "packages/one/b.so"]
    # penstock itself, also if it is installed from a clone.
    names = [entry.name for entry in package_files([distributions([])["penstock"]])]
    assert {
        "packages/penstock/cli/main.py",
        "packages/pyspark_tubemq.py",
        "packages/penstock/spark/jvm/penstock.jar",
    } <= {*names}


def test_the_same_files_make_the_same_bytes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"1" * 100)
    files = [ArchiveFile("b/run", b"#!/bin/sh\n", is_executable=True), ArchiveFile("a", data)]
    size = write_archive(tmp_path / "one.tar.gz", files)
    os.utime(data, (1, 1))
    data.chmod(0o600)
    assert write_archive(tmp_path / "deep" / "two.tar.gz", reversed(files)) == size
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "deep" / "two.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "one.tar.gz") as found:
        shown: list[Any] = [(entry.name, entry.mode, entry.mtime, entry.uid, entry.gid, entry.uname) for entry in found]
    assert shown == [("a", 0o644, 0, 0, 0, ""), ("b/run", 0o755, 0, 0, 0, "")]
    assert gzip.decompress((tmp_path / "one.tar.gz").read_bytes())[:1] == b"a"
    with pytest.raises(ConfigError, match="exists already"):
        write_archive(tmp_path / "one.tar.gz", files)


def test_nothing_remains_of_an_archive_that_fails(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing cannot be packaged: No such file"):
        write_archive(tmp_path / "one.tar.gz", [ArchiveFile("a", b""), ArchiveFile("b", tmp_path / "missing")])
    assert list(tmp_path.iterdir()) == []


def test_the_launcher_finds_the_packages_and_reports_a_missing_python(tmp_path: Path, file: Path) -> None:
    entries = {entry.name: entry for entry in archive.program_files("p", file, {})}
    home = tmp_path / "with space"
    for name, content in [("bin/python", entries["bin/python"].content), ("packages/inside.py", b"")]:
        assert isinstance(content, bytes)
        (home / name).parent.mkdir(parents=True)
        (home / name).write_bytes(content)
    launcher = home / "bin" / "python"
    launcher.chmod(0o755)
    environ = {"PATH": os.environ["PATH"], "PENSTOCK_PYTHON": sys.executable, "PYTHONPATH": "/given"}
    script = "import inside, sys; print(inside.__file__, '/given' in sys.path, sys.argv[1:])"
    done = subprocess.run(
        ["bin/python", "-c", script, "a b"], cwd=home, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{home}/packages/inside.py True ['a b']\n"
    done = subprocess.run(
        [launcher], env=environ | {"PENSTOCK_PYTHON": "/no/python"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 127
    assert done.stderr.startswith("penstock: /no/python is not on PATH of ")
