from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import ConfigError, UnavailableError
from penstock.spark.environment import jars

ARTEFACT = jars.DELTA["4.2"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def maven(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program called mvn that does ``script``."""
    program = directory / "bin" / "mvn"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def test_a_run_needs_what_was_set_up_and_says_how() -> None:
    assert not jars.is_set_up()
    with pytest.raises(ConfigError, match="Delta Lake is not set up") as error:
        jars.delta_jars("4.2.1")
    assert "make jars" in (error.value.do or "")


def test_a_missing_delta_version_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"there is no Delta Lake for Spark 4\.3\.0") as error:
        jars.delta_settings(spark="4.3.0")
    assert "Spark 4.1 or 4.2" in (error.value.do or "")


def test_maven_fetches_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = (
        'for o in "$@"; do case $o in -DoutputDirectory=*) d=${o#*=};; esac; done; mkdir -p $d; touch $d/b.jar $d/a.jar'
    )
    maven(cache, monkeypatch, copy)
    assert jars.resolve(ARTEFACT) == jars.folder(ARTEFACT)
    assert [path.name for path in jars.delta_jars("4.2.1")] == ["a.jar", "b.jar"]
    settings = jars.delta_settings({"spark.jars": "mine.jar"}, "4.2.1")
    assert settings["spark.jars"].split(",")[0] == "mine.jar"
    assert len(settings["spark.jars"].split(",")) == 3
    assert settings["spark.sql.extensions"] == "io.delta.sql.DeltaSparkSessionExtension"
    (cache / "bin" / "mvn").write_text("#!/bin/sh\nexit 1\n")
    assert jars.resolve(ARTEFACT) == jars.folder(ARTEFACT)
    assert [path.name for path in jars.folder(ARTEFACT).parent.iterdir()] == [jars.folder(ARTEFACT).name]


def test_errors_of_maven_are_reported(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    maven(cache, monkeypatch, "echo no such artefact; exit 1")
    with pytest.raises(UnavailableError) as error:
        jars.resolve(ARTEFACT)
    assert error.value.why == "no such artefact"
    assert not jars.folder(ARTEFACT).exists()
    assert jars.main() == 1
    assert "no such artefact" in capsys.readouterr().err


def test_a_missing_maven_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match=r"Maven \(mvn\) is not installed"):
        jars.resolve(ARTEFACT)
