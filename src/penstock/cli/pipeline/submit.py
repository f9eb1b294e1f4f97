"""`penstock pipeline submit` and `package`: run a pipeline with spark-submit, on machines with or without penstock."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn

import typer

from penstock.cli.options import DryRun, Json
from penstock.cli.output import note, print_json
from penstock.cli.parameters import completes
from penstock.cli.pipeline.options import Conf, File, Metrics, Once, StateDir, Traces, options_of_spark, state_path
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.pipelines.spec.pipeline import Pipeline
    from penstock.spark.files.object_storage import ObjectPath

__all__ = ["SubmitCommand", "SubmitRequest", "kind_of", "package", "submit", "submit_line"]

ENVIRONMENT = "environment"
"""Name of the directory in which each executor unpacks the archive."""


_UPLOAD = "spark.kubernetes.file.upload.path"
_PASSWORD = re.compile(r"//[^/@\s]*:[^/@\s]+@")
_K8S = re.compile(r"k8s://(https?://)?[^/:]+:\d+/?")


class SubmitCommand(NamedTuple):
    """A command: environment variables and arguments; an option and its value are one element."""

    environment: dict[str, str]
    pieces: list[list[str]]

    @property
    def argv(self) -> list[str]:
        """Return the arguments as a list."""
        return [word for piece in self.pieces for word in piece]

    def shell(self) -> str:
        """Return the command as text for a shell, with an option and its value per line."""
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in self.environment.items())
        return variables + " \\\n  ".join(map(shlex.join, self.pieces))


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """Arguments of a submission. ``program``: the entry script; ``arguments`` follow the file in ``pipeline run``.

    ``wheel``: penstock's wheel with the extension .zip, for executors that lack it; ``archive``: a packed virtual
    environment with all packages; ``java_home``: Java in YARN's containers; ``driver_python`` and ``java_options``
    apply to a driver on this machine; ``environment``: variables of the pipeline file, for driver and executors;
    ``files``: names of the files next to the pipeline file that it reads; ``bucket``: the state directory, if it is in
    a bucket, for which the jars of s3a are sent; ``delta``: send Delta's jars; ``is_packaged``: the archive,
    unpacked in the working directory, contains the pipeline file, ``files`` and the jars.
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
    files: Sequence[str] = ()
    bucket: ObjectPath | None = None
    delta: bool = False
    is_packaged: bool = False


def kind_of(master: str) -> str:
    """Return the kind of the master: ``standalone``, ``yarn``, ``kubernetes`` or ``local``.

    Raises:
        ConfigError: a pipeline cannot be submitted to this master.
    """
    if master == "yarn":
        return "yarn"
    for start, kind in (("spark://", "standalone"), ("k8s://", "kubernetes"), ("local", "local")):
        if master.startswith(start):
            return kind
    raise ConfigError(
        f"{master!r} is not a Spark master",
        option="spark-master",
        hint="write spark://HOST:PORT, yarn, k8s://https://HOST:PORT or local[N]",
    )


def submit_line(request: SubmitRequest) -> SubmitCommand:
    """Return the command line for ``request``.

    Raises:
        ConfigError: the options cannot be combined.
    """
    from penstock.spark.environment.jars import delta_settings, s3a_settings
    from penstock.spark.session import REDACTED, WORKER_DAEMON

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
    # Java looks up data sources with the Python of its environment, regardless of the settings.
    variables: dict[str, str] = {}
    if is_cluster and python is not None:
        conf[f"{driver}PYSPARK_PYTHON"] = python
        if kind == "yarn":
            # Otherwise the value of this shell, if set, would be sent to the driver's machine.
            conf[f"{driver}PYSPARK_DRIVER_PYTHON"] = python
    elif not is_cluster and request.driver_python is not None:
        variables["PYSPARK_DRIVER_PYTHON"] = request.driver_python
    if request.java_home is not None:
        # The application master is a separate Java process, also if the driver runs here.
        conf |= {f"{driver}JAVA_HOME": request.java_home, "spark.executorEnv.JAVA_HOME": request.java_home}
    for name, value in request.environment.items():
        if is_cluster:
            conf[driver + name] = value
        conf[f"spark.executorEnv.{name}"] = value
    # Otherwise penstock.spark.session sets these options; here spark-submit starts the JVM of the driver.
    conf["spark.sql.session.timeZone"] = "UTC"
    conf["spark.redaction.regex"] = REDACTED
    if request.wheel is None:  # --py-files are found by workers, and not by the daemon that starts them
        conf |= WORKER_DAEMON
    if not is_cluster:
        if request.driver_python is not None:
            conf["spark.pyspark.driver.python"] = request.driver_python
        if request.java_options is not None:
            conf["spark.driver.extraJavaOptions"] = request.java_options
    conf |= request.conf
    if request.delta:
        conf |= delta_settings(conf)
    if request.bucket is not None:
        conf |= s3a_settings(request.bucket.endpoint, request.bucket.region, conf)
    if request.is_packaged and "spark.jars" in conf:
        packaged = {str(jar): f"{ENVIRONMENT}/jars/{jar.name}" for jar in _jars(request)}
        conf["spark.jars"] = ",".join(packaged.get(jar, jar) for jar in conf["spark.jars"].split(","))

    pieces = [[request.spark_submit], ["--master", request.master], ["--deploy-mode", request.deploy_mode]]
    pieces.append(["--name", _name(request, kind)])
    pieces += [["--conf", f"{name}={value}"] for name, value in conf.items()]
    if request.wheel is not None:
        pieces.append(["--py-files", request.wheel])
    if request.archive is not None:
        pieces.append(["--archives", f"{request.archive}#{ENVIRONMENT}"])
    file = str(request.file)
    if is_cluster and not request.is_packaged:
        # The driver runs on another machine: the files are shipped to its working directory.
        pieces.append(["--files", ",".join([file, *(str(request.file.parent / name) for name in request.files)])])
        file = request.file.name
    pieces.append([request.program, file, *request.arguments])
    return SubmitCommand({} if is_cluster else variables | dict(request.environment), pieces)


def _jars(request: SubmitRequest) -> list[Path]:
    """Return the jars of this machine that the pipeline needs."""
    from penstock.spark.environment.jars import delta_jars, s3a_jars

    return [*(delta_jars() if request.delta else ()), *(s3a_jars() if request.bucket is not None else ())]


def _name(request: SubmitRequest, kind: str) -> str:
    """Return the application's name, from which Kubernetes derives names: without underscores."""
    name = f"penstock-{request.name}"
    return name.replace("_", "-").rstrip("-") if kind == "kubernetes" else name


def _check(request: SubmitRequest, kind: str) -> None:
    is_cluster = request.deploy_mode == "cluster"
    if kind == "kubernetes" and not _K8S.fullmatch(request.master):
        raise ConfigError(
            f"{request.master!r} has no port",
            option="spark-master",
            why="Spark requires the port of the API server, even if it is 443",
            hint="write k8s://https://HOST:443",
        )
    if kind == "kubernetes" and is_cluster and _UPLOAD not in request.conf:
        raise ConfigError(
            "the pipeline file is not available to the driver",
            option="conf",
            why=f"Spark uploads files for a driver on Kubernetes to the location in {_UPLOAD}",
            hint=f"set a location that both can access: --conf {_UPLOAD}=s3a://BUCKET/PATH",
        )
    if request.wheel is not None and not request.wheel.endswith((".zip", ".egg")):
        raise ConfigError(
            f"executors would not find --wheel {request.wheel!r}",
            option="wheel",
            why="Spark adds only --py-files with the extension .zip or .egg to the path; a wheel is a zip file",
            hint="copy it to a file with the extension .zip, and use that",
        )
    if is_cluster and kind in {"standalone", "local"}:
        raise ConfigError(
            f"--deploy-mode cluster cannot be combined with {request.master!r}",
            option="deploy-mode",
            why="with this master Spark runs the driver of a Python program only on the submitting machine",
            hint="omit it (client), and run the command on a machine near the cluster",
        )
    if request.java_home is not None and kind != "yarn":
        raise ConfigError(
            "--java-home is for YARN",
            option="java-home",
            why="other cluster managers start workers with their own Java, or with that of the image",
            hint="omit it",
        )
    if request.image is not None and kind != "kubernetes":
        raise ConfigError("--image is for Kubernetes", option="image", hint="omit it, or use a k8s:// master")
    if kind == "kubernetes" and request.image is None and "spark.kubernetes.container.image" not in request.conf:
        raise ConfigError(
            "Kubernetes needs an image", option="image", hint="use one with Spark, Python and penstock: --image IMAGE"
        )
    for name in request.environment:
        if not name.isidentifier() or not name.isascii():
            raise ConfigError(f"--env {name!r} is not the name of a variable", option="env", hint="write NAME=VALUE")
    for name, value in {**request.environment, **request.conf}.items():
        if _PASSWORD.search(value):
            raise ConfigError(
                f"{name} has a URL with a password",
                option="env" if name in request.environment else "conf",
                why="it would be an argument of spark-submit, which every user of the machine can see",
                hint="write the password to a file, and ${file:PATH} into the pipeline file",
            )


SparkMaster = Annotated[
    str, typer.Option(help="spark://HOST:PORT, yarn, k8s://https://HOST:PORT or local[N].", metavar="MASTER")
]
DeployMode = Annotated[
    str,
    typer.Option(
        help="Location of the driver: client or cluster.",
        metavar="MODE",
        autocompletion=completes(["client", "cluster"]),
    ),
]
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
    traces: Traces = None,
    as_json: Json = False,
) -> None:
    """Submit a pipeline to a Spark cluster with spark-submit.

    The file is checked first. Every machine needs Python with penstock's packages: installed, in the image, or shipped
    with --archive. State and tables must be in a bucket, or on a file system that driver and executors share.
    --dry-run prints the command line.
    """
    from penstock.spark.session import quiet_java_options

    pipeline, request = _request(
        file, spark_master, deploy_mode, env or [], conf or [], state_dir, java_home=java_home, image=image
    )
    files = _files_to_ship(pipeline, file) if deploy_mode == "cluster" else []
    line = submit_line(
        replace(
            request,
            spark_submit=_spark_submit(),
            python=python,
            wheel=wheel,
            archive=archive,
            # Otherwise Spark uses python3 on PATH, or the path for executors.
            driver_python=sys.executable,
            java_options=quiet_java_options("", "FATAL"),
            arguments=_run_options(state_dir, metrics, traces, once=once, as_json=as_json and not dry_run),
            files=files,
        )
    )
    if not dry_run:
        _check_files(spark_master, wheel, archive)
        _hand_over(line)
    elif as_json:
        print_json({"environment": line.environment, "argv": line.argv})
    else:
        sys.stdout.write(line.shell() + "\n")


def _request(
    file: Path,
    spark_master: str,
    deploy_mode: str,
    env: list[str],
    conf: list[str],
    state_dir: str | None,
    *,
    java_home: str | None,
    image: str | None,
) -> tuple[Pipeline, SubmitRequest]:
    """Return the pipeline in ``file``, and what the options say about its submission.

    Raises:
        ConfigError: the file or an option is not valid.
    """
    from penstock.cli.pipeline import spark_submit_main as submitted
    from penstock.pipelines.spec.loader import load

    variables, spark_conf = _variables(env), options_of_spark(conf)
    pipeline = load(file, {**os.environ, **_secret_variables(spark_conf), **variables})
    if deploy_mode not in {"client", "cluster"}:
        raise ConfigError(
            f"--deploy-mode {deploy_mode!r} is not known", option="deploy-mode", hint="choose client or cluster"
        )
    if deploy_mode == "cluster":
        _refuse_relative_paths(pipeline, state_dir)
    return pipeline, SubmitRequest(
        spark_submit="spark-submit",
        program=str(Path(submitted.__file__)),
        file=file,
        name=pipeline.name,
        master=spark_master,
        deploy_mode=deploy_mode,
        java_home=java_home,
        image=image,
        conf=spark_conf,
        environment=variables,
        bucket=_bucket_of(state_dir, variables),
        delta=pipeline.has_remote_table,
    )


NewArchive = Annotated[
    Path | None,
    typer.Option("--archive", help="Archive to create. Default: NAME.tar.gz.", metavar="PATH", show_default=False),
]


def package(
    file: File,
    spark_master: SparkMaster,
    deploy_mode: DeployMode = "client",
    archive: NewArchive = None,
    java_home: JavaHome = None,
    image: Image = None,
    env: Env = None,
    conf: Conf = None,
    state_dir: StateDir = None,
    once: Once = False,
    metrics: Metrics = None,
    traces: Traces = None,
    as_json: Json = False,
) -> None:
    """Write a pipeline and all that it needs to an archive for Spark clusters, and print the commands that run it.

    The archive contains the pipeline file, the files that it names, penstock with the Python packages that it requires,
    and jars for object storage if needed. Machines need Spark, Java, the same version of Python and the same platform,
    but neither penstock nor a network to install it. Secrets are refused; an existing file is not overwritten.
    """
    from penstock.pipelines.export import archive as archives

    pipeline, request = _request(
        file, spark_master, deploy_mode, env or [], conf or [], state_dir, java_home=java_home, image=image
    )
    target = archive or Path(f"{pipeline.name}.tar.gz")
    _check_shipped("the archive", str(target), "archive")
    contents = archives.pipeline_files(file, pipeline)
    program = Path(request.program)
    line = submit_line(
        replace(
            request,
            program=f"{ENVIRONMENT}/main.py",
            file=Path(ENVIRONMENT, "pipeline", file.name),
            archive=str(target),
            driver_python=f"{ENVIRONMENT}/bin/python",
            java_options=f"-Dlog4j2.configurationFile={_LOG_SETTINGS} -Dpenstock.spark.logLevel=FATAL",
            arguments=_run_options(state_dir, metrics, traces, once=once, as_json=as_json),
            is_packaged=True,
        )
    )
    extras = ["spark"]
    extras += ["postgresql"] if any(sink.postgresql is not None for sink in pipeline.sinks) else []
    is_kafka = any(sink.kafka is not None for sink in pipeline.sinks)
    extras += ["kafka"] if is_kafka or any(s.format == "kafka" for s in pipeline.inputs.values()) else []
    extras += ["otel"] if traces is not None else []
    packages = archives.distributions(extras)
    size = archives.write_archive(
        target,
        [
            *contents,
            *archives.program_files(pipeline.name, program, packages),
            *archives.package_files(packages.values()),
            *(archives.ArchiveFile(f"jars/{jar.name}", jar) for jar in _jars(request)),
        ],
    )
    unpack = f"mkdir {ENVIRONMENT} && tar -xzf {shlex.quote(str(target))} -C {ENVIRONMENT}"
    if as_json:
        print_json(
            {
                "pipeline": pipeline.name,
                "archive": str(target),
                "bytes": size,
                "packages": {name: found.version for name, found in sorted(packages.items())},
                "unpack": unpack,
                "environment": line.environment,
                "argv": line.argv,
            }
        )
        return
    note(f"wrote {target}: {size / 1e6:.0f} MB, {len(packages)} packages, {archives.PYTHON}, {archives.PLATFORM}")
    sys.stdout.write(f"{unpack}\n{line.shell()}\n")


_LOG_SETTINGS = f"{ENVIRONMENT}/packages/penstock/spark/log4j2.properties"


def _run_options(
    state_dir: str | None, metrics: str | None, traces: str | None, *, once: bool, as_json: bool
) -> list[str]:
    """Return the options of `run` for the command line."""
    options = ["--state-dir", state_dir] if state_dir is not None else []
    options += ["--once"] if once else []
    options += ["--metrics", metrics] if metrics is not None else []
    options += ["--traces", traces] if traces is not None else []
    return [*options, "--json"] if as_json else options


def _bucket_of(state_dir: str | None, variables: Mapping[str, str]) -> ObjectPath | None:
    """Return the state directory if it is in a bucket, with endpoint and region of the driver's ``variables``."""
    from penstock.spark.files.object_storage import ObjectPath, storage_path

    if state_dir is None or not isinstance(state_path(state_dir), ObjectPath):
        return None
    endpoint = variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL")
    found = storage_path(state_dir, endpoint, variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION"))
    assert isinstance(found, ObjectPath)
    return found


def _secret_variables(conf: dict[str, str]) -> dict[str, str]:
    """Return the variables that Kubernetes sets from its secrets, with a placeholder as value."""
    start = "spark.kubernetes.driver.secretKeyRef."
    return {name.removeprefix(start): "secret" for name in conf if name.startswith(start)}


def _refuse_relative_paths(pipeline: Pipeline, state_dir: str | None) -> None:
    """Raise ConfigError for relative paths: the driver on another machine has another directory."""
    from penstock.pipelines.spec.values import is_uri

    paths = {"--state-dir": state_dir or "penstock-pipelines"}
    paths |= {f"sink {sink.name!r}": sink.path for sink in pipeline.sinks if sink.path is not None}
    paths |= {f"source {name!r}": source.path for name, source in pipeline.inputs.items() if source.format == "files"}
    paths |= {} if pipeline.dead_letters is None else {"dead_letters": pipeline.dead_letters.path}
    for what, path in paths.items():
        if not Path(path).is_absolute() and not is_uri(path):
            raise ConfigError(
                f"{what}: {path!r} is not an absolute path",
                option=what.removeprefix("--"),
                why="with --deploy-mode cluster the driver runs in a temporary directory of another machine",
                hint="write a path on the file system that driver and executors share",
            )


def _files_to_ship(pipeline: Pipeline, file: Path) -> list[str]:
    """Return the names of the schema and Python files that the driver needs next to the pipeline file.

    Files with an absolute path are on a shared file system, like tables.

    Raises:
        ConfigError: one is in another directory, which the driver does not have, or cannot be shipped.
    """
    from penstock.pipelines.spec.pipeline import named_files

    found: dict[str, None] = {}
    for part, option, path in named_files(pipeline):
        if Path(path).is_absolute():
            continue
        if Path(path).name != str(Path(path)):
            raise ConfigError(
                f"{part}: {path!r} would not be available to the driver",
                option=option,
                why="with --deploy-mode cluster Spark ships files to one directory",
                hint=f"put the file next to {str(file)!r}, or write an absolute path on a file system that driver and "
                "submitting machine share",
            )
        found[str(Path(path))] = None
    for name in (file.name, *found):
        _check_shipped("the pipeline file" if name == file.name else "the file", str(file.parent / name))
    return list(found)


def _check_shipped(what: str, path: str, option: str = "file") -> None:
    """Refuse a path that Spark would not ship as it is: it splits lists at commas, and expands patterns.

    Raises:
        ConfigError: the path has such a character.
    """
    special = sorted(set(path) & _SPLIT_OR_EXPANDED)
    if special:
        raise ConfigError(
            f"{what} {path!r} cannot be shipped",
            option=option,
            why=f"spark-submit interprets {' '.join(special)} in names of files: it ships other files, or none",
            hint=f"rename the file, or its directory, to a name without {' '.join(sorted(_SPLIT_OR_EXPANDED))}",
        )


_SPLIT_OR_EXPANDED = frozenset(",#*?[]{}\\")
"""Characters that separate files and their names in lists of spark-submit, and those of patterns of Hadoop's paths."""


def _check_files(master: str, wheel: str | None, archive: str | None) -> None:
    """Check files that spark-submit would report in a Java trace."""
    for option, path in (("wheel", wheel), ("archive", archive)):
        if path is None:
            continue
        _check_shipped(f"--{option}", path, option)
        if "://" not in path and not Path(path).is_file():
            raise ConfigError(f"--{option} {path!r} does not exist", option=option, hint="correct the path")
    if master == "yarn" and not (os.environ.get("HADOOP_CONF_DIR") or os.environ.get("YARN_CONF_DIR")):
        raise ConfigError(
            "neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set",
            option="spark-master",
            why="that directory has the configuration of YARN",
            hint="export HADOOP_CONF_DIR=DIRECTORY, the client configuration of the cluster",
        )


def _hand_over(line: SubmitCommand) -> NoReturn:
    """Replace this process by the command line."""
    from penstock.spark.environment.compiled_pyspark import check_launcher

    check_launcher({name: value for name, value in os.environ.items() if value})
    if shutil.which(line.argv[0]) is None:
        raise ConfigError(
            f"{shlex.quote(line.argv[0])} does not exist",
            hint='pip install "penstock[spark]", or put Spark on PATH',
        )
    os.execvpe(line.argv[0], line.argv, {**os.environ, **line.environment})  # noqa: S606 - the user's own Spark


def _spark_submit() -> str:
    """Return the path of spark-submit: of SPARK_HOME, on PATH, or of the Python package."""
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
            raise ConfigError(f"--env {text!r} is not NAME=VALUE", option="env", hint="write NAME=VALUE")
        variables[name] = value
    return variables
