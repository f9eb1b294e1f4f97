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
    assert "make jars" in (error.value.hint or "")


def test_a_missing_delta_version_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"there is no Delta Lake for Spark 4\.3\.0") as error:
        jars.delta_settings(spark="4.3.0")
    assert "Spark 4.1 or 4.2" in (error.value.hint or "")


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


def test_two_processes_fetch_at_the_same_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one finds the jars of the first when it renames its own."""
    target = jars.folder(ARTEFACT)
    copy = 'for o in "$@"; do case $o in -DoutputDirectory=*) d=${o#*=};; esac; done; mkdir -p $d; touch $d/b.jar'
    maven(cache, monkeypatch, f"{copy}; mkdir {target}; touch {target}/a.jar")
    assert jars.resolve(ARTEFACT) == target
    assert [path.name for path in target.parent.rglob("*.jar")] == ["a.jar"]
    assert [path.name for path in target.parent.iterdir()] == [target.name]


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


COPY = 'for o in "$@"; do case $o in -DoutputDirectory=*) d=${o#*=};; esac; done; mkdir -p $d; '


def test_jars_of_s3a_are_compared_with_their_sums(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    maven(cache, monkeypatch, COPY + "printf good > $d/a.jar; printf bad > $d/b.jar; touch $d/c.jar")
    sums = cache / "sums"
    good = "770e607624d689265ca6c44884d0807d9b054d23c473c106c72be9de08b7376c"
    sums.write_text(f"{good} a.jar\n{good} b.jar\n{good} d.jar\n")
    monkeypatch.setattr(jars, "_S3A_SUMS", sums)
    with pytest.raises(UnavailableError, match=r"other jars than expected: b\.jar, c\.jar, d\.jar"):
        jars.resolve_s3a()
    assert not jars.is_s3a_set_up()
    assert jars.main() == 1
    assert "their sums are not those in sums" in capsys.readouterr().err
    (cache / "bin" / "mvn").write_text(f"#!/bin/sh\n{COPY} printf good > $d/a.jar\n")
    sums.write_text(f"{good} a.jar\n")
    assert [path.name for path in jars.resolve_s3a().iterdir()] == ["a.jar"]
    assert jars.is_s3a_set_up()


def test_options_of_s3a_have_no_credentials(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(ConfigError, match=r"checkpoints in a bucket \(s3a\) are not set up") as refused:
        jars.s3a_settings(None, "eu-west-1")
    assert "make jars" in str(refused.value.hint)
    jars.folder(jars.S3A).mkdir(parents=True)
    (jars.folder(jars.S3A) / "a.jar").touch()
    given = {"spark.jars": "mine.jar", "spark.hadoop.fs.s3a.retry.limit": "9"}
    found = jars.s3a_settings("http://127.0.0.1:9000", "eu-west-1", given)
    assert found["spark.jars"] == f"mine.jar,{jars.folder(jars.S3A)}/a.jar"
    assert found["spark.hadoop.fs.s3a.endpoint"] == "http://127.0.0.1:9000"
    assert "spark.hadoop.fs.s3a.retry.limit" not in found
    assert not {"key", "secret"} & set(found.values())
    assert "spark.hadoop.fs.s3a.endpoint" not in jars.s3a_settings(None, "eu-west-1")


def test_another_hadoop_has_no_jars_of_s3a() -> None:
    with pytest.raises(ConfigError, match=r"there are no jars of s3a for Spark 4\.1\.4"):
        jars.s3a_jars("4.1.4")
