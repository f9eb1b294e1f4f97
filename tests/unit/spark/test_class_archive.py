"""The archive of Spark's classes: its name, when it is used, and what a failure leaves. Without Java."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.errors import ConfigError, StorageError, UnavailableError
from penstock.spark.environment import class_archive
from penstock.spark.environment.class_archive import archive_path, installation, java_options, make_archive
from penstock.spark.environment.java import Java


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Spark home and a Java; the cache directory is one of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = tmp_path / "cache" / "penstock" / "spark" / "1"
    for file in (home / "jars" / "spark.jar", tmp_path / "java" / "bin" / "java"):
        file.parent.mkdir(parents=True)
        file.write_bytes(b"1")
    monkeypatch.setenv("SPARK_HOME", str(home))
    for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(class_archive, "find_java", lambda: Java(tmp_path / "java", 17, "PATH"))
    return home


def test_the_name_depends_on_java_and_the_jars(home: Path, tmp_path: Path) -> None:
    java = tmp_path / "java"
    names = [archive_path(home, java)]
    (home / "jars" / "spark.jar").write_bytes(b"22")
    names.append(archive_path(home, java))
    (home / "jars" / "other.jar").touch()
    names.append(archive_path(home, java))
    (java / "bin" / "java").write_bytes(b"22")
    names.append(archive_path(home, java))
    assert len({*names}) == 4
    assert {name.parent for name in names} == {tmp_path / "cache" / "penstock" / "classes"}


def test_a_session_uses_an_archive_that_exists(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "java"
    assert java_options(java, home) == ""
    path = archive_path(home, java)
    path.parent.mkdir(parents=True)
    path.touch()
    assert java_options(java, home) == f"-XX:SharedArchiveFile={path} -Xlog:disable -Xlog:all=error:stderr"
    assert java_options(java, home, "-XX:SharedArchiveFile=/own.jsa") == ""
    assert java_options(java, None) == java_options(tmp_path / "gone", home) == ""
    assert java_options(java, home, "-Xlog:gc").startswith("-XX:SharedArchiveFile")
    # Java reads these before: logging that they begin would be ended.
    for name, option in [("JAVA_TOOL_OPTIONS", "-Xlog:gc"), ("SPARK_SUBMIT_OPTS", "-Xshare:off")]:
        with monkeypatch.context() as context:
            context.setenv(name, option)
            assert java_options(java, home) == ""
    # An option that Spark would split.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "with space"))
    archive_path(home, java).parent.mkdir(parents=True)
    archive_path(home, java).touch()
    assert java_options(java, home) == ""


def test_a_cache_directory_with_a_space_is_refused(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "with space"
    (cache / "penstock").mkdir(parents=True)
    (cache / "penstock" / "spark").symlink_to(home.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("SPARK_HOME", str(cache / "penstock" / "spark" / home.name))
    with pytest.raises(ConfigError, match="the class archive cannot be in"):
        make_archive()


def test_a_generated_home_is_that_of_pip_also_if_the_parent_process_has_set_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installation() == home
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert installation() is None
    with pytest.raises(ConfigError, match="no class archive for this Spark"):
        make_archive()


def test_it_is_made_once_and_replaces_that_of_an_older_version(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []

    def run(scratch: Path, options: str) -> None:
        made.append(options)
        Path(options.partition("AtExit=")[2].split()[0]).write_bytes(b"archive")

    monkeypatch.setattr(class_archive, "_run_session", run)
    path, is_new = make_archive("-XX:+UseSerialGC")
    assert is_new
    assert path.read_bytes() == b"archive"
    assert made[0].startswith("-XX:+UseSerialGC -XX:ArchiveClassesAtExit=")
    assert make_archive() == (path, False)
    (home / "jars" / "spark.jar").write_bytes(b"22")
    for scratch, age_s in ((".making-now", 0), (".making-killed", 7200)):
        (path.parent / scratch / "spark").mkdir(parents=True)
        os.utime(path.parent / scratch, (time.time() - age_s,) * 2)
    newer, _ = make_archive()
    assert {*path.parent.iterdir()} == {newer, path.parent / ".making-now"}
    assert main(["pipeline", "warm-up"]) == 0
    assert capsys.readouterr().out == f"{newer} exists already\n"
    assert len(made) == 2


def test_nothing_remains_of_an_archive_that_java_cannot_make(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        given.append(env)
        return subprocess.CompletedProcess(command, 1, "", "no base archive\n")

    monkeypatch.setenv("SPARK_CONF_DIR", "/conf")
    monkeypatch.setattr("penstock.spark.environment.class_archive.subprocess.run", run)
    with pytest.raises(UnavailableError, match="Java cannot make the class archive") as raised:
        make_archive()
    assert raised.value.why == "no base archive"
    assert "SPARK_CONF_DIR" not in given[0]
    assert "ArchiveClassesAtExit" in given[0]["SPARK_SUBMIT_OPTS"]
    (directory,) = (home.parents[1]).glob("classes")
    assert list(directory.iterdir()) == []


def test_a_cache_that_is_not_writable(home: Path) -> None:
    (home.parents[1] / "classes").write_text("a file")
    with pytest.raises(StorageError, match="the class archive cannot be written"):
        make_archive()
