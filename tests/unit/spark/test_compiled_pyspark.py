from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import py4j
import pyspark
import pytest

from penstock.errors import ConfigError
from penstock.spark.environment import compiled_pyspark as home
from penstock.spark.environment.compiled_pyspark import check_launcher, spark_home

INSTALLED = Path(pyspark.__file__).parent


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_the_spark_home_has_scripts_and_jars(environ: dict[str, str]) -> None:
    made = spark_home(environ)
    assert made is not None
    for name in ("bin/spark-submit", "jars"):
        assert (made / name).samefile(INSTALLED / name)


def test_a_process_of_spark_takes_the_compiled_package(environ: dict[str, str]) -> None:
    made = spark_home(environ)
    assert made is not None
    path = os.pathsep.join([str(made / "python/lib/pyspark.zip"), str(made / "python/lib/py4j-0-src.zip")])
    program = "import pyspark, py4j; print(pyspark.__file__, py4j.__file__, pyspark.__spec__.cached)"
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    files = [Path(file) for file in ran.stdout.split()]
    assert all(file.is_relative_to(made / "python/lib/pyspark.zip") for file in files)
    assert files[0].samefile(pyspark.__file__)
    assert files[1].samefile(py4j.__file__)
    assert files[2].samefile(pyspark.__spec__.cached or "")


def test_it_is_made_once(environ: dict[str, str]) -> None:
    made = spark_home(environ)
    assert made is not None
    before = made.stat().st_ino
    assert spark_home(environ) == made
    assert made.stat().st_ino == before
    assert list(made.parent.iterdir()) == [made]


def test_another_process_may_be_first(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tempfile.mkdtemp

    def late(prefix: str, dir: Path) -> str:  # noqa: A002 - the library's name
        monkeypatch.setattr(tempfile, "mkdtemp", directory)
        assert spark_home(environ) is not None
        return directory(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "mkdtemp", late)
    made = spark_home(environ)
    assert made is not None
    assert list(made.parent.iterdir()) == [made]


def test_a_users_own_home_is_left(environ: dict[str, str]) -> None:
    assert spark_home(environ | {"SPARK_HOME": "/opt/spark"}) is None


def test_an_unwritable_cache_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "penstock").write_text("a file is in the way")
    assert spark_home({"XDG_CACHE_HOME": str(tmp_path)}) is None
    assert "Spark's Python processes will start slowly" in caplog.text


@pytest.mark.parametrize("missing", ["pyspark", "py4j"])
def test_without_pips_packages_there_is_none(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    found = home._package
    monkeypatch.setattr(home, "_package", lambda name: None if name == missing else found(name))
    assert spark_home(environ) is None


def test_a_checkout_of_spark_is_left(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(home, "_package", lambda name: tmp_path / name)
    assert spark_home(environ) is None


def test_a_home_without_spark_and_a_path_without_bash_are_refused(tmp_path: Path) -> None:
    check_launcher({"PATH": os.environ["PATH"]})
    check_launcher({"PATH": os.environ["PATH"], "SPARK_HOME": str(INSTALLED)})
    with pytest.raises(ConfigError, match=r"SPARK_HOME='/nowhere' is not a Spark installation") as caught:
        check_launcher({"PATH": os.environ["PATH"], "SPARK_HOME": "/nowhere"})
    assert "unset SPARK_HOME" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="bash is not on PATH"):
        check_launcher({"PATH": str(tmp_path)})


@pytest.mark.parametrize("wrong", [{"SPARK_HOME": "/nowhere"}, {"PATH": "/nowhere"}])
def test_a_session_that_cannot_start_is_reported(wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.spark.session import session

    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"SPARK_HOME|bash"):
        session("test")
