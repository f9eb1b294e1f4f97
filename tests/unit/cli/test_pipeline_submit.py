"""The line of spark-submit: words, quoting, and what does not go together."""

from __future__ import annotations

import json
import shlex
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.cli.pipeline import spark_submit_main as submitted
from penstock.cli.pipeline.submit import SubmitCommand, SubmitRequest, submit_line
from penstock.demo.data import example
from penstock.errors import ConfigError
from penstock.spark.session import REDACTED


def line(master: str, **changed: Any) -> SubmitCommand:
    given: dict[str, Any] = {
        "spark_submit": "spark-submit",
        "program": "/opt/penstock/submitted.py",
        "file": Path("flows/p.yaml"),
        "name": "water",
    }
    return submit_line(SubmitRequest(master=master, **(given | changed)))


def options(found: SubmitCommand, name: str) -> list[str]:
    return [value for option, value in zip(found.argv, found.argv[1:], strict=False) if option == name]


def test_a_standalone_cluster() -> None:
    found = line("spark://host:7077", environment={"WATER_LAKE": "/lake of water"}, arguments=["--once"])
    assert found.environment == {"WATER_LAKE": "/lake of water"}
    assert options(found, "--conf") == [
        "spark.executorEnv.WATER_LAKE=/lake of water",
        "spark.sql.session.timeZone=UTC",
        f"spark.redaction.regex={REDACTED}",
        "spark.python.daemon.module=penstock.spark.environment.worker_daemon",
    ]
    assert found.argv[-3:] == ["/opt/penstock/submitted.py", "flows/p.yaml", "--once"]
    assert found.shell().splitlines()[0] == "WATER_LAKE='/lake of water' spark-submit \\"


def test_yarn_in_a_cluster_ships_file_and_environment() -> None:
    found = line("yarn", deploy_mode="cluster", archive="env.tar.gz", environment={"A": "1"})
    assert found.environment == {}
    assert options(found, "--archives") == ["env.tar.gz#environment"]
    assert options(found, "--files") == ["flows/p.yaml"]
    assert found.argv[-1] == "p.yaml"
    conf = dict(text.split("=", 1) for text in options(found, "--conf"))
    assert conf["spark.pyspark.python"] == "./environment/bin/python"
    assert (conf["spark.yarn.appMasterEnv.A"], conf["spark.executorEnv.A"]) == ("1", "1")


def test_a_driver_on_this_machine_runs_the_python_of_the_command() -> None:
    given = {"archive": "env.tar.gz", "driver_python": "/opt/penstock/bin/python"}
    found = line("yarn", **given)
    # For Java, which asks that Python for the data sources.
    assert found.environment == {"PYSPARK_DRIVER_PYTHON": "/opt/penstock/bin/python"}
    conf = dict(text.split("=", 1) for text in options(found, "--conf"))
    assert conf["spark.pyspark.driver.python"] == "/opt/penstock/bin/python"
    assert conf["spark.pyspark.python"] == "./environment/bin/python"
    found = line("yarn", deploy_mode="cluster", **given)
    assert found.environment == {}
    elsewhere = options(found, "--conf")
    assert not [text for text in elsewhere if text.startswith("spark.pyspark.driver.python=")]
    # Both: Spark would take what the shell of the command has along.
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        assert f"spark.yarn.appMasterEnv.{name}=./environment/bin/python" in elsewhere


@pytest.mark.parametrize("deploy_mode", ["client", "cluster"])
def test_containers_of_yarn_have_the_java_that_is_named(deploy_mode: str) -> None:
    given = options(line("yarn", deploy_mode=deploy_mode, java_home="/opt/openjdk-17"), "--conf")
    assert "spark.yarn.appMasterEnv.JAVA_HOME=/opt/openjdk-17" in given
    assert "spark.executorEnv.JAVA_HOME=/opt/openjdk-17" in given


def test_kubernetes() -> None:
    upload = {"spark.kubernetes.file.upload.path": "s3a://bucket/uploads"}
    given = {"deploy_mode": "cluster", "image": "lake/penstock:1", "environment": {"A": "1"}, "conf": upload}
    found = line("k8s://https://host:6443", name="water_flow-", **given)
    # Names of Kubernetes are made of it.
    assert options(found, "--name") == ["penstock-water-flow"]
    assert options(found, "--files") == ["flows/p.yaml"]
    conf = dict(text.split("=", 1) for text in options(found, "--conf"))
    assert conf["spark.kubernetes.container.image"] == "lake/penstock:1"
    assert conf["spark.kubernetes.driverEnv.A"] == "1"


@pytest.mark.parametrize("nasty", ["a b", "$(touch x)", "it's", 'say "so"', "a;b&c|d", "new\nline", "*", "", "--conf"])
def test_a_shell_gets_the_words_back(nasty: str) -> None:
    found = line(
        "spark://host:7077",
        file=Path("dir") / (nasty or "x"),
        wheel=f"{nasty}.zip",
        conf={"spark.x": nasty},
        environment={"A": nasty},
        arguments=["--state-dir", nasty],
    )
    words = shlex.split(found.shell().replace("\\\n", " "))
    assert words == [f"A={nasty}", *found.argv]


@pytest.mark.parametrize(
    ("master", "changed", "message"),
    [
        ("spark://h:1", {"deploy_mode": "cluster"}, "cannot be combined with"),
        ("mesos://h:1", {}, "is not a Spark master"),
        ("yarn", {"image": "x"}, "--image is for Kubernetes"),
        ("spark://h:1", {"java_home": "/j"}, "--java-home is for YARN"),
        ("k8s://h:1", {}, "needs an image"),
        ("k8s://https://h", {"image": "x"}, "has no port"),
        ("k8s://h:1", {"image": "x", "deploy_mode": "cluster"}, "is not available to the driver"),
        ("yarn", {"wheel": "penstock-1-py3-none-any.whl"}, "executors would not find"),
        ("yarn", {"environment": {"A B": "1"}}, "is not the name of a variable"),
    ],
)
def test_incompatible_options_are_refused(master: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        line(master, **changed)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/my spark")
    command = ["pipeline", "submit", str(example("pipeline.yaml")), "--spark-master", "yarn", "--dry-run"]
    assert main([*command, "--env", "A=1", "--state-dir", "/shared/state", "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["environment"] == {"PYSPARK_DRIVER_PYTHON": sys.executable, "A": "1"}
    assert found["argv"][0] == "/opt/my spark/bin/spark-submit"
    assert found["argv"][-5:] == [
        submitted.__file__, str(example("pipeline.yaml")), "--state-dir", "/shared/state", "--once",
    ]  # fmt: skip
    assert main(command) == 0
    line = f"PYSPARK_DRIVER_PYTHON={sys.executable} '/opt/my spark/bin/spark-submit' \\\n  --master yarn \\\n"
    assert capsys.readouterr().out.startswith(line)
    for more, words in [(["--env", "A"], "is not NAME=VALUE"), (["--deploy-mode", "x"], "is not known")]:
        assert main([*command, *more]) == 2
        assert words in capsys.readouterr().err


def test_a_driver_elsewhere_needs_paths_that_it_finds_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LAKE", "WORD"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "p.yaml"
    file.write_text(
        'name: p\nsource: {topics: [t]}\nstatestore: {broker: "mqtt://a:${WORD:-x}@edge"}\n'
        "sinks: [{name: rows, table: {path: '${LAKE}/rows'}}]\n"
    )
    command = ["pipeline", "submit", str(file), "--spark-master", "yarn", "--deploy-mode", "cluster", "--dry-run"]
    state = ["--state-dir", "/shared/state"]
    # The variables are those that the driver will have, not those of this process.
    for more, words in [
        (state, "the environment variable LAKE is not set"),
        (["--env", "LAKE=/shared"], "--state-dir: 'penstock-pipelines' is not an absolute path"),
        (["--env", "LAKE=lake", *state], "sink 'rows': 'lake/rows' is not an absolute path"),
    ]:
        assert main([*command, *more]) == 2
        assert words in capsys.readouterr().err
    for lake in ("/shared", "s3://lake/tables", "hdfs://host/lake"):
        assert main([*command, "--env", f"LAKE={lake}", *state]) == 0
    file.write_text(file.read_text().replace("${WORD:-x}", "${WORD}"))
    assert main([*command, "--env", "LAKE=/shared", *state]) == 2
    # Kubernetes will fill it in.
    on_kubernetes = [
        "--spark-master",
        "k8s://https://h:1",
        "--image",
        "i",
        "--conf",
        "spark.kubernetes.file.upload.path=u",
    ]
    secret = ["--conf", "spark.kubernetes.driver.secretKeyRef.WORD=water:password"]
    assert main([*command, *on_kubernetes, *secret, "--env", "LAKE=/shared", *state]) == 0
    assert "secret@edge" not in capsys.readouterr().out


def test_errors_are_reported_before_spark_submit_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "none"))
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    command = ["pipeline", "submit", str(example("pipeline.yaml")), "--spark-master", "yarn"]
    assert main([*command, "--archive", "none.tar.gz"]) == 2
    assert "--archive 'none.tar.gz' does not exist" in capsys.readouterr().err
    assert main(command) == 2
    assert "neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set" in capsys.readouterr().err
    monkeypatch.setenv("YARN_CONF_DIR", "/etc/hadoop")
    assert main(command) == 2
    assert "is not a Spark installation" in capsys.readouterr().err


def test_the_state_directory_is_in_a_bucket_of_the_drivers_endpoint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's s3a and the driver's own requests use the same endpoint and region."""
    monkeypatch.setattr("penstock.spark.environment.jars.s3a_jars", lambda *_: [Path("/jars/s3a.jar")])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://here:9000")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    command = ["pipeline", "submit", str(example("pipeline.yaml")), "--spark-master", "spark://h:1", "--dry-run"]
    command += ["--state-dir", "s3://lake/state"]
    there = ["--env", "AWS_ENDPOINT_URL=http://there:9000", "--env", "AWS_REGION=eu-west-2"]
    for more, endpoint, region in [([], "http://here:9000", "eu-west-1"), (there, "http://there:9000", "eu-west-2")]:
        assert main([*command, *more]) == 0
        line = capsys.readouterr().out
        assert f"spark.hadoop.fs.s3a.endpoint={endpoint}" in line
        assert f"spark.hadoop.fs.s3a.endpoint.region={region}" in line
    assert main([*command[:-1], "hdfs://host/state"]) == 2
    assert "is a URI" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["environment", "conf"])
def test_a_password_is_no_argument(place: str) -> None:
    """Arguments are shown by ps, and options of Spark by its pages."""
    name = "PLANT_BROKER" if place == "environment" else "spark.executorEnv.PLANT_BROKER"
    with pytest.raises(ConfigError, match=f"{name} has a URL with a password") as raised:
        line("spark://host:7077", **{place: {name: "mqtts://water:hunter2@edge-7:8883"}})
    assert "hunter2" not in str(raised.value)
    line("spark://host:7077", **{place: {name: "mqtts://edge-7:8883"}})


@pytest.fixture
def with_files(tmp_path: Path) -> Path:
    """Return a pipeline file that reads a schema twice, and a Python file."""
    (tmp_path / "rows.ddl").write_text("machine STRING")
    (tmp_path / "twice.py").write_text("def transform(batch): return batch")
    file = tmp_path / "p.yaml"
    file.write_text("""\
name: p
source: {topics: [t]}
steps:
  - {name: rows, parse: {schema_file: rows.ddl}}
  - {name: twice, python: {file: twice.py, schema: machine STRING}}
  - {name: others, from: source, parse: {schema_file: rows.ddl}}
sinks:
  - {name: twice, from: twice, table: {path: /lake/twice}}
  - {name: others, from: others, table: {path: /lake/others}}
""")
    return file


CLUSTER = ("--spark-master", "yarn", "--deploy-mode", "cluster", "--state-dir", "/shared/state", "--dry-run", "--json")


def test_a_driver_in_the_cluster_gets_the_files_that_the_pipeline_reads(
    with_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = with_files.parent
    assert main(["pipeline", "submit", str(with_files), *CLUSTER]) == 0
    argv = json.loads(capsys.readouterr().out)["argv"]
    assert argv[argv.index("--files") + 1] == f"{here}/p.yaml,{here}/rows.ddl,{here}/twice.py"
    # An absolute path is that of a shared file system.
    with_files.write_text(with_files.read_text().replace("rows.ddl", f"{here}/rows.ddl"))
    assert main(["pipeline", "submit", str(with_files), *CLUSTER]) == 0
    argv = json.loads(capsys.readouterr().out)["argv"]
    assert argv[argv.index("--files") + 1] == f"{here}/p.yaml,{here}/twice.py"


def test_a_file_in_another_directory_is_not_available_to_a_driver_in_the_cluster(
    with_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    below = with_files.parent / "functions"
    below.mkdir()
    (with_files.parent / "twice.py").rename(below / "twice.py")
    with_files.write_text(with_files.read_text().replace("twice.py", "functions/twice.py"))
    assert main(["pipeline", "submit", str(with_files), *CLUSTER]) == 2
    said = capsys.readouterr().err
    assert "step 'twice': 'functions/twice.py' would not be available to the driver" in said
    assert "put the file next to" in said


@pytest.mark.parametrize("name", ["a,b.py", "a#b.py", "a*.py", "a?.py", "[ab].py", "{a,b}.py", "a\\b.py"])
def test_a_name_that_spark_splits_or_expands_is_refused(
    with_files: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (with_files.parent / "twice.py").rename(with_files.parent / name)
    with_files.write_text(with_files.read_text().replace("file: twice.py", f"file: {json.dumps(name)}"))
    assert main(["pipeline", "submit", str(with_files), *CLUSTER, "--json"]) == 2
    said = json.loads(capsys.readouterr().err)["error"]
    assert said["what"] == f"the file {str(with_files.parent / name)!r} cannot be shipped"
    assert "spark-submit interprets" in said["why"]


def test_a_directory_and_an_archive_with_a_pattern_are_refused(
    with_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = with_files.parent.rename(with_files.parent.with_name("site[1]"))
    assert main(["pipeline", "submit", str(moved / "p.yaml"), *CLUSTER]) == 2
    assert "the pipeline file" in capsys.readouterr().err
    # A driver on this machine reads the file itself; the archive is sent in any case.
    command = ["pipeline", "submit", str(moved / "p.yaml"), "--spark-master", "local[1]"]
    assert main([*command, "--archive", "env*.tar.gz"]) == 2
    assert "--archive 'env*.tar.gz' cannot be shipped" in capsys.readouterr().err


def test_a_package_and_the_command_that_runs_it(
    with_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the installed packages, whose files a test of the archive has."""
    monkeypatch.setattr("penstock.pipelines.export.archive.distributions", lambda extras: {})
    for name in ("s3a", "delta"):
        (tmp_path / f"{name}.jar").write_bytes(b"jar")
        jars = [tmp_path / f"{name}.jar"]
        monkeypatch.setattr(f"penstock.spark.environment.jars.{name}_jars", lambda *_, jars=jars: jars)
    with_files.write_text(with_files.read_text().replace("/lake/twice", "abfss://lake@host/twice"))
    target = tmp_path / "made" / "p.tar.gz"
    command = ["pipeline", "package", str(with_files), "--spark-master", "yarn", "--archive", str(target), "--json"]
    given = ["--deploy-mode", "cluster", "--state-dir", "s3://lake/state", "--conf", "spark.jars=/opt/own.jar"]
    assert main([*command, *given]) == 0
    found = json.loads(capsys.readouterr().out)
    with tarfile.open(target) as archive:
        assert [name for name in archive.getnames() if not name.startswith("packages/")] == [
            *("bin/python", "jars/delta.jar", "jars/s3a.jar", "main.py", "package.json"),
            *("pipeline/p.yaml", "pipeline/rows.ddl", "pipeline/twice.py"),
        ]
    assert found["bytes"] == target.stat().st_size
    assert found["unpack"] == f"mkdir environment && tar -xzf {target} -C environment"
    argv = found["argv"]
    assert "--files" not in argv
    assert options(SubmitCommand({}, [argv]), "--archives") == [f"{target}#environment"]
    program = ["environment/main.py", "environment/pipeline/p.yaml", "--state-dir", "s3://lake/state", "--json"]
    assert argv[-5:] == program
    assert "spark.jars=/opt/own.jar,environment/jars/delta.jar,environment/jars/s3a.jar" in argv
    assert "spark.pyspark.python=./environment/bin/python" in argv
    # The driver on the submitting machine runs the unpacked files as well.
    assert main([*command, "--state-dir", "/shared/state", "--archive", str(tmp_path / "q.tar.gz")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["environment"] == {"PYSPARK_DRIVER_PYTHON": "environment/bin/python"}
    assert main([*command, "--state-dir", "/shared/state"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*command, "--archive", "a,b.tar.gz"]) == 2
    assert "cannot be shipped" in capsys.readouterr().err
