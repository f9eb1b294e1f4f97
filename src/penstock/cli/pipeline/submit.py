"""`penstock pipeline submit`: run a pipeline with spark-submit."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from penstock.cli.options import DryRun, Json
from penstock.cli.output import print_json
from penstock.cli.pipeline.options import Conf, File, Metrics, Once, StateDir, options_of_spark
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.pipelines.spec.pipeline import Pipeline
    from penstock.pipelines.submit import Line

__all__ = ["submit"]


SparkMaster = Annotated[
    str, typer.Option(help="spark://HOST:PORT, yarn, k8s://https://HOST:PORT or local[N].", metavar="MASTER")
]
DeployMode = Annotated[str, typer.Option(help="Location of the driver: client or cluster.", metavar="MODE")]
Python = Annotated[
    str | None, typer.Option(help="Path of Python on the executors.", metavar="PATH", show_default=False)
]
Wheel = Annotated[
    str | None,
    typer.Option(
        help="Ship penstock's wheel, copied to a name in .zip, to the executors.",
        metavar="PATH",
        show_default=False,
    ),
]
Archive = Annotated[
    str | None,
    typer.Option(help="Ship a packed virtual environment (venv-pack).", metavar="PATH", show_default=False),
]
JavaHome = Annotated[
    str | None,
    typer.Option(
        help="YARN: path of Java 17 or 21 on the nodes, if their default is another version.",
        metavar="PATH",
        show_default=False,
    ),
]
Image = Annotated[
    str | None,
    typer.Option(help="Kubernetes: container image of driver and executors.", metavar="IMAGE", show_default=False),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help="Environment variable for the pipeline file; repeatable.", show_default=False
    ),
]


def submit(
    file: File,
    spark_master: SparkMaster,
    deploy_mode: DeployMode = "client",
    dry_run: DryRun = False,
    python: Python = None,
    wheel: Wheel = None,
    archive: Archive = None,
    java_home: JavaHome = None,
    image: Image = None,
    env: Env = None,
    conf: Conf = None,
    state_dir: StateDir = None,
    once: Once = False,
    metrics: Metrics = None,
    as_json: Json = False,
) -> None:
    """Submit a pipeline to a Spark cluster with spark-submit.

    The file is checked first. Every machine needs Python with penstock's packages: installed, in the image, or shipped
    with --archive. State and tables must be on a file system that driver and executors share. --dry-run prints the
    command line.
    """
    from penstock.cli.pipeline import spark_submit_main as submitted
    from penstock.pipelines.spec.loader import load
    from penstock.pipelines.submit import SubmitRequest, submit_line
    from penstock.spark.session import quiet_java_options

    variables, spark_conf = _variables(env or []), options_of_spark(conf or [])
    pipeline = load(file, {**os.environ, **_of_secrets(spark_conf), **variables})
    if deploy_mode == "cluster":
        _refuse_relative_paths(pipeline, state_dir)
    if deploy_mode not in {"client", "cluster"}:
        raise ConfigError(
            f"--deploy-mode {deploy_mode!r} is not known", option="deploy-mode", do="choose client or cluster"
        )
    line = submit_line(
        SubmitRequest(
            spark_submit=_spark_submit(),
            program=str(Path(submitted.__file__)),
            file=file,
            name=pipeline.name,
            master=spark_master,
            deploy_mode=deploy_mode,
            python=python,
            wheel=wheel,
            archive=archive,
            java_home=java_home,
            image=image,
            conf=spark_conf,
            # Otherwise Spark uses python3 on PATH, or the path for executors.
            driver_python=sys.executable,
            java_options=quiet_java_options("", "FATAL"),
            environment=variables,
            arguments=_of_run(state_dir, metrics, once=once, as_json=as_json and not dry_run),
        )
    )
    if not dry_run:
        _check_files(spark_master, wheel, archive)
        _hand_over(line)
    elif as_json:
        print_json({"environment": line.environment, "argv": line.argv})
    else:
        sys.stdout.write(line.shell() + "\n")


def _of_run(state_dir: Path | None, metrics: str | None, *, once: bool, as_json: bool) -> list[str]:
    """Options of `run` in the command line."""
    options = ["--state-dir", str(state_dir)] if state_dir is not None else []
    options += ["--once"] if once else []
    options += ["--metrics", metrics] if metrics is not None else []
    return [*options, "--json"] if as_json else options


def _of_secrets(conf: dict[str, str]) -> dict[str, str]:
    """Variables that Kubernetes sets from its secrets, with a placeholder as value."""
    start = "spark.kubernetes.driver.secretKeyRef."
    return {name.removeprefix(start): "secret" for name in conf if name.startswith(start)}


def _refuse_relative_paths(pipeline: Pipeline, state_dir: Path | None) -> None:
    """Raise ConfigError for relative paths: the driver on another machine has another directory."""
    paths = {"--state-dir": str(state_dir or "penstock-pipelines")}
    paths |= {f"sink {sink.name!r}": sink.table.path for sink in pipeline.sinks if sink.table is not None}
    paths |= {f"source {name!r}": source.path for name, source in pipeline.inputs.items() if source.format == "files"}
    paths |= {} if pipeline.dead_letters is None else {"dead_letters": pipeline.dead_letters.path}
    for what, path in paths.items():
        if not Path(path).is_absolute():
            raise ConfigError(
                f"{what}: {path!r} is not an absolute path",
                option=what.removeprefix("--"),
                why="with --deploy-mode cluster the driver runs in a temporary directory of another machine",
                do="write a path on the file system that driver and executors share",
            )


def _check_files(master: str, wheel: str | None, archive: str | None) -> None:
    """Check files that spark-submit would report in a Java trace."""
    for option, path in (("wheel", wheel), ("archive", archive)):
        if path is not None and "://" not in path and not Path(path).is_file():
            raise ConfigError(f"--{option} {path!r} does not exist", option=option, do="correct the path")
    if master == "yarn" and not (os.environ.get("HADOOP_CONF_DIR") or os.environ.get("YARN_CONF_DIR")):
        raise ConfigError(
            "neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set",
            option="spark-master",
            why="that directory has the configuration of YARN",
            do="export HADOOP_CONF_DIR=DIRECTORY, the client configuration of the cluster",
        )


def _hand_over(line: Line) -> NoReturn:
    """Replace this process by the command line."""
    from penstock.spark.environment.compiled_pyspark import check_launcher

    check_launcher({name: value for name, value in os.environ.items() if value})
    if shutil.which(line.argv[0]) is None:
        raise ConfigError(
            f"there is no {shlex.quote(line.argv[0])}",
            do='pip install ".[spark]" in a clone of penstock, or put Spark on PATH',
        )
    os.execvpe(line.argv[0], line.argv, {**os.environ, **line.environment})  # noqa: S606 - the user's own Spark


def _spark_submit() -> str:
    """Path of spark-submit: of SPARK_HOME, on PATH, or of the Python package."""
    home = os.environ.get("SPARK_HOME")
    if home:
        return str(Path(home) / "bin" / "spark-submit")
    if shutil.which("spark-submit") is not None:
        return "spark-submit"
    spec = importlib.util.find_spec("pyspark")
    return str(Path(spec.origin).parent / "bin" / "spark-submit") if spec and spec.origin else "spark-submit"


def _variables(given: list[str]) -> dict[str, str]:
    variables = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--env {text!r} is not NAME=VALUE", option="env", do="write NAME=VALUE")
        variables[name] = value
    return variables
