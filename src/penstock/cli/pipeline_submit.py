"""`penstock pipeline submit`: a pipeline handed to spark-submit."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import print_json
from penstock.cli.pipeline_options import Conf, File, Json, StateDir, options_of_spark
from penstock.errors import ConfigError

__all__ = ["submit"]


def submit(
    file: File,
    spark_master: Annotated[
        str, typer.Option(help="spark://HOST:PORT, yarn, k8s://https://HOST:PORT or local[N].", metavar="MASTER")
    ],
    deploy_mode: Annotated[
        str, typer.Option(help="Where the driver runs: client or cluster.", metavar="MODE")
    ] = "client",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the line and run nothing.")] = False,
    python: Annotated[
        str | None, typer.Option(help="Python on the executors' machines.", metavar="PATH", show_default=False)
    ] = None,
    wheel: Annotated[
        str | None,
        typer.Option(help="Ship penstock's wheel to executors that lack it.", metavar="PATH", show_default=False),
    ] = None,
    archive: Annotated[
        str | None,
        typer.Option(help="Ship a packed virtual environment (venv-pack).", metavar="PATH", show_default=False),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Kubernetes: image of driver and executors.", metavar="IMAGE", show_default=False)
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A variable for the pipeline file; repeatable.",
            show_default=False,
        ),
    ] = None,
    conf: Conf = None,
    state_dir: StateDir = None,
    once: Annotated[bool, typer.Option("--once", help="Process what the log holds now, then end.")] = False,
    metrics: Annotated[str | None, typer.Option(help="As of run.", metavar="HOST:PORT", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Hand a pipeline to spark-submit, or print the line that does.

    The file is checked first. Every machine needs Python with penstock's packages: installed, in the image, or shipped
    with --archive. State and tables are paths that driver and executors all see.
    """
    from penstock.cli import submitted
    from penstock.pipelines.model import load
    from penstock.pipelines.running.submit import Request, submit_line
    from penstock.spark.session import quiet_java_options

    pipeline = load(file)
    if deploy_mode not in {"client", "cluster"}:
        raise ConfigError(
            f"--deploy-mode {deploy_mode!r} is not known", option="deploy-mode", do="choose client or cluster"
        )
    arguments = ["--state-dir", str(state_dir)] if state_dir is not None else []
    arguments += ["--once"] if once else []
    arguments += ["--metrics", metrics] if metrics is not None else []
    arguments += ["--json"] if as_json and not dry_run else []
    line = submit_line(
        Request(
            spark_submit=_spark_submit(),
            program=str(Path(submitted.__file__)),
            file=file,
            name=pipeline.name,
            master=spark_master,
            deploy_mode=deploy_mode,
            python=python,
            wheel=wheel,
            archive=archive,
            image=image,
            conf=options_of_spark(conf or []),
            # Spark would take the python3 of the search path, or one that only executors have.
            driver_python=sys.executable,
            java_options=quiet_java_options("", "FATAL"),
            environment=_variables(env or []),
            arguments=arguments,
        )
    )
    if dry_run:
        if as_json:
            print_json({"environment": line.environment, "argv": line.argv})
        else:
            sys.stdout.write(line.shell() + "\n")
        return
    if shutil.which(line.argv[0]) is None:
        raise ConfigError(
            f"there is no {shlex.quote(line.argv[0])}", do='pip install "penstock[spark]", or put Spark on PATH'
        )
    os.execvpe(line.argv[0], line.argv, {**os.environ, **line.environment})  # noqa: S606 - the user's own Spark


def _spark_submit() -> str:
    """The program of the Spark that is chosen by SPARK_HOME, on PATH, or beside the Python package."""
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
