from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
import threading
from pathlib import Path

import pytest
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from penstock.errors import ConfigError
from penstock.spark.environment.java import Java
from penstock.spark.session import SUBMITTED, configuration, is_local, session, start_java


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("local", True),
        ("local[2]", True),
        ("local[*]", True),
        ("local[2,3]", True),
        ("local-cluster[2,1,1024]", True),
        ("spark://127.0.0.1:7077", True),
        ("spark://localhost:7077", True),
        ("spark://[::1]:7077", True),
        ("spark://localhost.example.org:7077", False),
        ("spark://10.0.0.1:7077", False),
        ("yarn", False),
        ("k8s://https://h:443", False),
        ("localhost", False),
    ],
)
def test_local_masters(master: str, expected: bool) -> None:
    assert is_local(master) is expected


def test_a_local_session_stays_on_the_machine_and_small() -> None:
    settings = configuration("app", "local[3]")
    assert settings["spark.app.name"] == "app"
    assert settings["spark.driver.bindAddress"] == settings["spark.driver.host"] == "127.0.0.1"
    assert settings["spark.ui.enabled"] == "false"
    assert settings["spark.sql.shuffle.partitions"] == "3"
    assert settings["spark.sql.session.timeZone"] == "UTC"
    assert "-Dpenstock.spark.logLevel=ERROR" in settings["spark.driver.extraJavaOptions"]


def test_local_files_need_no_process_for_their_mode() -> None:
    settings = configuration("app", "local", {"spark.driver.extraClassPath": "/mine.jar"})
    jar = settings["spark.executor.extraClassPath"]
    assert Path(jar).is_file()
    assert settings["spark.driver.extraClassPath"] == f"/mine.jar:{jar}"
    assert settings["spark.hadoop.fs.file.impl"] == "penstock.spark.LocalFiles"
    own = configuration("app", "local", {"spark.hadoop.fs.file.impl": "mine.Files"})
    assert own["spark.hadoop.fs.file.impl"] == "mine.Files"


def test_local_workers_do_not_delay_their_tasks() -> None:
    option = "spark.python.daemon.module"
    module = configuration("app", "local")[option]
    assert importlib.util.find_spec(module) is not None
    assert configuration("app", "local", {option: "mine"})[option] == "mine"
    assert option not in configuration("app", "spark://host:7077")  # its machines may have another version


@pytest.mark.parametrize(("master", "cores"), [("local", 1), ("local[*]", None), ("local[4,2]", 4)])
def test_shuffle_partitions_follow_the_cores(master: str, cores: int | None) -> None:
    expected = str(cores or os.cpu_count())
    assert configuration("app", master)["spark.sql.shuffle.partitions"] == expected


def test_a_cluster_session_keeps_sparks_defaults() -> None:
    settings = configuration("app", "spark://10.0.0.1:7077")
    assert set(settings) == {
        "spark.app.name",
        "spark.master",
        "spark.redaction.regex",
        "spark.sql.session.timeZone",
        "spark.driver.extraJavaOptions",
    }


@pytest.mark.parametrize("master", ["local[2]", "spark://127.0.0.1:7077", "yarn", SUBMITTED])
def test_the_checkpoint_manager_is_sparks_default(master: str) -> None:
    """The one that renames files lets two drivers write the same file of a checkpoint."""
    assert not [name for name in configuration("app", master) if "checkpointFileManager" in name]
    name = "spark.sql.streaming.checkpointFileManagerClass"
    assert configuration("app", master, {name: "mine"})[name] == "mine"


def test_the_users_configuration_wins() -> None:
    conf = {"spark.ui.enabled": "true", "spark.driver.extraJavaOptions": "-Xss4m", "spark.x": "y"}
    settings = configuration("app", "local[2]", conf, log_level="warn")
    assert settings["spark.ui.enabled"] == "true"
    assert settings["spark.x"] == "y"
    compiled = "-XX:-DontCompileHugeMethods "
    assert settings["spark.driver.extraJavaOptions"].startswith(f"{compiled}-Xss4m -Dlog4j2.configurationFile=file:///")
    assert settings["spark.driver.extraJavaOptions"].endswith("-Dpenstock.spark.logLevel=WARN")
    assert conf["spark.driver.extraJavaOptions"] == "-Xss4m"
    own = {"spark.driver.extraJavaOptions": "-Dlog4j2.configurationFile=/mine"}
    found = configuration("app", "local", own)["spark.driver.extraJavaOptions"]
    assert found == f"{compiled}-Dlog4j2.configurationFile=/mine"


def test_the_log_configuration_is_part_of_the_package() -> None:
    option = configuration("app", "yarn")["spark.driver.extraJavaOptions"].split()[0]
    assert Path(option.partition("file://")[2]).is_file()


def test_jars_are_files_not_downloads() -> None:
    with pytest.raises(ConfigError, match=r"spark\.jars\.packages='a:b:1' is not supported") as caught:
        configuration("app", "local", {"spark.jars.packages": "a:b:1"})
    assert "make jars" in str(caught.value.hint)


def test_an_unknown_log_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="log level 'quiet' is not a log level of Spark"):
        configuration("app", "local", log_level="quiet")


def test_java_starts_as_the_first_session_starts_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the function of pyspark that does so, which is not public: if it has another name, this test fails."""
    asked: list[SparkConf] = []
    signature = inspect.signature(SparkContext._ensure_initialized)

    def record(*args: object, **given: SparkConf) -> None:
        signature.bind(*args, **given)
        asked.append(given["conf"])

    monkeypatch.setattr(SparkContext, "_ensure_initialized", record)
    monkeypatch.setattr(sys.modules["penstock.spark.session"], "_java_started", threading.Event())
    for name in ("JAVA_HOME", "PYSPARK_PYTHON", "SPARK_LOCAL_IP", "SPARK_HOME"):
        monkeypatch.setenv(name, "")  # also restored after the call, which sets them
        monkeypatch.delenv(name)
    # Of the module: the package has a function of its name.
    monkeypatch.setattr(sys.modules["penstock.spark.session"], "find_java", lambda **_: Java(tmp_path, 17, "test"))
    start_java("app", "local[3]", {"spark.x": "y"})
    [conf] = asked
    found = dict(conf.getAll())
    expected = configuration("app", "local[3]", {"spark.x": "y"})
    option = "spark.driver.extraJavaOptions"
    assert found.pop(option).endswith(expected.pop(option))
    assert found == expected
    assert os.environ["JAVA_HOME"] == str(tmp_path)


def test_java_is_not_looked_for_again_while_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each look starts a process of Java, for 0.1 s."""
    looked: list[None] = []

    def find(**_: object) -> Java:
        looked.append(None)
        return Java(tmp_path, 17, "test")

    module = sys.modules["penstock.spark.session"]
    monkeypatch.setattr(module, "_java_started", threading.Event())
    monkeypatch.setattr(module, "find_java", find)
    monkeypatch.setattr(SparkContext, "_ensure_initialized", lambda **_: None)
    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", lambda _builder: None)
    for name in ("JAVA_HOME", "PYSPARK_PYTHON", "SPARK_LOCAL_IP", "SPARK_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    start_java("app", "local[3]")
    session("app", "local[3]")
    assert len(looked) == 1


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("mqtts://water:hunter2@edge-7:8883", True),
        ("spark.ssl.keyPassword", True),
        ("fs.s3a.access.key", True),
        ("TUBE_TOKEN", True),
        ("mqtts://edge-7:8883", False),
        ("spark://a:7077,b:7077", False),
        ("file:/opt/jars/a.jar", False),
    ],
)
def test_options_with_passwords_are_redacted(text: str, *, hidden: bool) -> None:
    """As Spark does it: where a part of name or value matches."""
    settings = configuration("app", "local[2]")
    assert (re.search(settings["spark.redaction.regex"], text) is not None) == hidden
