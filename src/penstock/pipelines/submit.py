"""The ``spark-submit`` command of a pipeline for a standalone cluster, YARN or Kubernetes, as text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ConfigError

__all__ = ["Line", "SubmitRequest", "kind_of", "submit_line"]

ENVIRONMENT = "environment"
"""Name of the directory in which each executor unpacks the archive."""


_UPLOAD = "spark.kubernetes.file.upload.path"
_K8S = re.compile(r"k8s://(https?://)?[^/:]+:\d+/?")


class Line(NamedTuple):
    """A command: environment variables and arguments; an option and its value are one element."""

    environment: dict[str, str]
    pieces: list[list[str]]

    @property
    def argv(self) -> list[str]:
        """The words."""
        return [word for piece in self.pieces for word in piece]

    def shell(self) -> str:
        """As a line for a shell, a piece a line."""
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in self.environment.items())
        return variables + " \\\n  ".join(map(shlex.join, self.pieces))


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """Arguments of a submission. ``program``: the entry script; ``arguments`` follow the file in ``pipeline run``.

    ``wheel``: penstock's wheel with the extension .zip, for executors that lack it; ``archive``: a packed virtual
    environment with all packages; ``java_home``: Java in YARN's containers; ``driver_python`` and ``java_options``
    apply to a driver on this machine; ``environment``: variables of the pipeline file, for driver and executors.
    """

    spark_submit: str
    program: str
    file: Path
    name: str
    master: str
    deploy_mode: str = "client"
    python: str | None = None
    wheel: str | None = None
    archive: str | None = None
    image: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    java_home: str | None = None
    driver_python: str | None = None
    java_options: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()


def kind_of(master: str) -> str:
    """``standalone``, ``yarn``, ``kubernetes`` or ``local``.

    Raises:
        ConfigError: it is no master that a pipeline can be submitted to.
    """
    if master == "yarn":
        return "yarn"
    for start, kind in (("spark://", "standalone"), ("k8s://", "kubernetes"), ("local", "local")):
        if master.startswith(start):
            return kind
    raise ConfigError(
        f"{master!r} is no master of Spark's",
        option="spark-master",
        do="write spark://HOST:PORT, yarn, k8s://https://HOST:PORT or local[N]",
    )


def submit_line(request: SubmitRequest) -> Line:
    """The line of ``request``.

    Raises:
        ConfigError: what was asked for does not go together.
    """
    kind = kind_of(request.master)
    is_cluster = request.deploy_mode == "cluster"
    _check(request, kind)
    conf: dict[str, str] = {}
    python = request.python
    if request.archive is not None:
        python = python or f"./{ENVIRONMENT}/bin/python"
    if python is not None:
        conf["spark.pyspark.python"] = python
    if request.image is not None:
        conf["spark.kubernetes.container.image"] = request.image
    driver = {"yarn": "spark.yarn.appMasterEnv.", "kubernetes": "spark.kubernetes.driverEnv."}.get(kind, "")
    # Java looks for data sources with the Python that its environment names, whatever the settings say.
    variables: dict[str, str] = {}
    if is_cluster and python is not None:
        conf[f"{driver}PYSPARK_PYTHON"] = python
        if kind == "yarn":
            # Else that of this shell, where one is set, goes to the driver's machine.
            conf[f"{driver}PYSPARK_DRIVER_PYTHON"] = python
    elif not is_cluster and request.driver_python is not None:
        variables["PYSPARK_DRIVER_PYTHON"] = request.driver_python
    if request.java_home is not None:
        # The application master is a Java of its own, also where the driver runs here.
        conf |= {f"{driver}JAVA_HOME": request.java_home, "spark.executorEnv.JAVA_HOME": request.java_home}
    for name, value in request.environment.items():
        if is_cluster:
            conf[driver + name] = value
        conf[f"spark.executorEnv.{name}"] = value
    # Where penstock.spark.session would have set it: the JVM of the driver is started by spark-submit.
    conf["spark.sql.session.timeZone"] = "UTC"
    if not is_cluster:
        if request.driver_python is not None:
            conf["spark.pyspark.driver.python"] = request.driver_python
        if request.java_options is not None:
            conf["spark.driver.extraJavaOptions"] = request.java_options
    conf |= request.conf

    pieces = [[request.spark_submit], ["--master", request.master], ["--deploy-mode", request.deploy_mode]]
    pieces.append(["--name", _name(request, kind)])
    pieces += [["--conf", f"{name}={value}"] for name, value in conf.items()]
    if request.wheel is not None:
        pieces.append(["--py-files", request.wheel])
    if request.archive is not None:
        pieces.append(["--archives", f"{request.archive}#{ENVIRONMENT}"])
    file = str(request.file)
    if is_cluster:
        # The driver runs elsewhere: the file travels, and lies where the driver is started.
        pieces.append(["--files", file])
        file = request.file.name
    pieces.append([request.program, file, *request.arguments])
    return Line({} if is_cluster else variables | dict(request.environment), pieces)


def _name(request: SubmitRequest, kind: str) -> str:
    """The application's name, of which Kubernetes makes names of its own: no underscore in it, none at its end."""
    name = f"penstock-{request.name}"
    return name.replace("_", "-").rstrip("-") if kind == "kubernetes" else name


def _check(request: SubmitRequest, kind: str) -> None:
    is_cluster = request.deploy_mode == "cluster"
    if kind == "kubernetes" and not _K8S.fullmatch(request.master):
        raise ConfigError(
            f"{request.master!r} names no port",
            option="spark-master",
            why="Spark asks for the port of the API server, also where it is 443",
            do="write k8s://https://HOST:443",
        )
    if kind == "kubernetes" and is_cluster and _UPLOAD not in request.conf:
        raise ConfigError(
            "the pipeline file would not come to the driver",
            option="conf",
            why=f"Spark puts files for a driver on Kubernetes where {_UPLOAD} says",
            do=f"name a place that both can reach: --conf {_UPLOAD}=s3a://BUCKET/PATH",
        )
    if request.wheel is not None and not request.wheel.endswith((".zip", ".egg")):
        raise ConfigError(
            f"--wheel {request.wheel!r} would not be found by executors",
            option="wheel",
            why="of --py-files Spark puts only names that end in .zip or .egg on their path; a wheel is a zip file",
            do="copy it to a name that ends in .zip, and name that",
        )
    if is_cluster and kind in {"standalone", "local"}:
        raise ConfigError(
            f"--deploy-mode cluster does not go with {request.master!r}",
            option="deploy-mode",
            why="there Spark runs the driver of a Python program only where it was submitted",
            do="leave it out (client), and run the command on a machine near the cluster",
        )
    if request.java_home is not None and kind != "yarn":
        raise ConfigError(
            "--java-home is for YARN",
            option="java-home",
            why="elsewhere workers are started with their own Java, and images hold theirs",
            do="leave it out",
        )
    if request.image is not None and kind != "kubernetes":
        raise ConfigError("--image is for Kubernetes", option="image", do="leave it out, or name a k8s:// master")
    if kind == "kubernetes" and request.image is None and "spark.kubernetes.container.image" not in request.conf:
        raise ConfigError(
            "Kubernetes needs an image", option="image", do="name one that has Spark, Python and penstock: --image"
        )
    for name in request.environment:
        if not name.isidentifier() or not name.isascii():
            raise ConfigError(f"--env {name!r} is no name of a variable", option="env", do="write NAME=VALUE")
