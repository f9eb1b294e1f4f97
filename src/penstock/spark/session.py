"""Creation of a Spark session that is configured for penstock's sources, sinks and pipelines.

Problems of a session from ``SparkSession.builder.getOrCreate()`` without this configuration:

* workers use ``python3`` from ``PATH``, not the interpreter of the driver: in a virtual environment that is not
  activated, they fail with "Python worker exited unexpectedly";
* every Python process of a local session compiles pyspark again, which takes a second;
* a local session listens on two ports of an external interface;
* each file created on a local disk starts the program ``chmod``, about ten times per micro-batch;
* a task in Python may wait 40 ms for an acknowledgement of TCP;
* of two drivers with the same checkpoint on a local disk, both may write the file of the same batch;
* with 200 shuffle partitions, a micro-batch of a stateful query takes minutes on two cores;
* timestamps are in the time zone of the machine.

This module sets the environment and the configuration only; the session is a standard Spark session."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, UnavailableError
from penstock.runtime.extras import needs_extra
from penstock.runtime.io.network import parse_address
from penstock.spark.environment.class_archive import installation, java_options
from penstock.spark.environment.compiled_pyspark import check_launcher
from penstock.spark.environment.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "REDACTED",
    "SUBMITTED",
    "WORKER_DAEMON",
    "check_master",
    "configuration",
    "is_local",
    "quiet_java_options",
    "refuse_connect",
    "session",
    "start_java",
]

SUBMITTED = "submitted"
"""Value of ``master`` if the process was started by ``spark-submit``, which has chosen the master and started the
JVM."""
_LOOPBACK = "127.0.0.1"
_LOCAL = re.compile(r"local(?:-cluster)?(?:\[(?P<threads>[^\],]*).*\])?", re.DOTALL)
_LOOPBACK_MASTER = re.compile(r"spark://(127(\.\d+){3}|localhost|\[::1\])(:|$)")
_LOG_LEVELS = ("OFF", "FATAL", "ERROR", "WARN", "INFO", "DEBUG", "TRACE", "ALL")
_WITH_STACKS = frozenset(("INFO", "DEBUG", "TRACE", "ALL"))
"""Log levels at which exceptions are logged with their Java stack."""
_JAR = Path(__file__).with_name("jvm") / "penstock.jar"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_CLASS_PATHS = ("spark.driver.extraClassPath", "spark.executor.extraClassPath")
WORKER_DAEMON = {"spark.python.daemon.module": "penstock.spark.environment.worker_daemon"}
"""Option with which Python workers do not delay the tasks that they get; the workers need penstock."""
REDACTED = r"(?i)secret|password|passwd|token|access[.]?key|credential|//[^/@\s]*:[^/@\s]*@"
"""Spark redacts options with a matching name or value in its web pages and event logs: Spark's default pattern, and
URLs with a password."""


_java_started = threading.Event()
"""Whether :func:`start_java` has started the JVM of this process, which later sessions use."""


def session(
    app_name: str,
    master: str = "local[2]",
    conf: Mapping[str, str] | None = None,
    *,
    log_level: str = "ERROR",
    vector: bool = True,
) -> SparkSession:
    """Return the Spark session of this process for penstock's connectors; the first call creates it (4 to 12 s).

    ``conf`` overrides all options set here. ``vector``: False starts Java without the module for vector instructions,
    which only MLlib uses, and without the warning about it.

    With ``SUBMITTED`` as ``master``, only options that a running session can change are set.

    ``JAVA_HOME``, ``PYSPARK_PYTHON`` and, for a local master, ``SPARK_LOCAL_IP`` and ``SPARK_HOME`` are set in
    ``os.environ``, where Spark's launcher reads them; all except ``JAVA_HOME`` only if they are not set. If a session
    is already running, it is returned with changed options, as by Spark's builder; options of its JVM do not change.

    Raises:
        ConfigError: Java, pyspark or bash is missing, SPARK_HOME is not a Spark installation, an option is invalid, or
            Spark Connect is selected.
    """
    refuse_connect(conf or {})
    with needs_extra("spark", "Spark is not installed"):
        from pyspark.sql import SparkSession

    settings = configuration(app_name, master, conf, log_level=log_level)
    if SparkSession.getActiveSession() is None and master != SUBMITTED:
        _prepare_java(master, settings, vector=vector)
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def start_java(
    app_name: str, master: str, conf: Mapping[str, str] | None = None, *, log_level: str = "ERROR", vector: bool = True
) -> None:
    """Start the JVM of this process, if none runs, and wait for it (1 to 5 s); :func:`session` then uses it.

    For a process that has other work before it needs the session: call it in a thread, with the arguments of the
    session. The JVM ends with the process.

    Raises:
        ConfigError: see :func:`session`.
    """
    refuse_connect(conf or {})
    with needs_extra("spark", "Spark is not installed"):
        from pyspark import SparkConf, SparkContext

    settings = configuration(app_name, master, conf, log_level=log_level)
    if master != SUBMITTED:
        _prepare_java(master, settings, vector=vector)
    # As the first session does. There is no public function for it.
    SparkContext._ensure_initialized(conf=SparkConf().setAll(list(settings.items())))  # noqa: SLF001
    _java_started.set()


def _prepare_java(master: str, settings: dict[str, str], *, vector: bool) -> None:
    """Set the environment of a session, and the options with which Spark's launcher starts the JVM, if it has not."""
    check_launcher(os.environ)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    home = installation() if is_local(master) else None
    if is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
        if home is not None:
            os.environ["SPARK_HOME"] = str(home)
    if _java_started.is_set():
        return
    java = find_java(vector=vector)
    os.environ["JAVA_HOME"] = str(java.home)
    if is_local(master):
        given = settings[_JAVA_OPTIONS]
        # First, so that logging that is given is not disabled.
        settings[_JAVA_OPTIONS] = f"{java_options(java.runtime, home, given)} {given}".lstrip()


def refuse_connect(conf: Mapping[str, str]) -> None:
    """Refuse the settings of Spark Connect in ``conf`` and in the environment, before anything is started.

    Raises:
        ConfigError: the environment or an option selects a Spark Connect server.
    """
    # Only the name is shown: the value may contain a token.
    if os.environ.get("SPARK_REMOTE"):
        remote = "SPARK_REMOTE"
    elif conf.get("spark.remote"):
        remote = "spark.remote"
    else:
        remote = "spark.api.mode" if conf.get("spark.api.mode", "classic").lower() != "classic" else ""
    if remote:
        raise ConfigError(
            f"{remote} selects Spark Connect, which pipelines and penstock.spark.session() do not support",
            option=remote,
            why="a Connect server processes batches in another process, without the lease and the ledger of the run",
            hint=f"unset {remote}; to use a cluster, set its master with --spark-master, or submit the pipeline to it "
            "(penstock pipeline submit)",
        )


def is_local(master: str) -> bool:
    """Return True for ``local...`` and for a standalone master on a loopback address."""
    return _LOCAL.fullmatch(master) is not None or _LOOPBACK_MASTER.match(master) is not None


def configuration(
    app_name: str,
    master: str,
    conf: Mapping[str, str] | None = None,
    *,
    log_level: str = "ERROR",
) -> dict[str, str]:
    """Return all Spark options that :func:`session` sets, including ``conf``.

    Raises:
        ConfigError: ``conf`` has ``spark.jars.packages``, or the log level is unknown.
    """
    conf = dict(conf or {})
    if "spark.jars.packages" in conf:
        raise ConfigError(
            f"spark.jars.packages={conf['spark.jars.packages']!r} is not supported with penstock",
            option="spark.jars.packages",
            why="it downloads at every start, and fails if the local Maven cache has descriptions without jars",
            hint="download the jars once (make jars) and list the files in spark.jars",
        )
    if log_level.upper() not in _LOG_LEVELS:
        raise ConfigError(
            f"log level {log_level!r} is not a log level of Spark",
            option="log_level",
            hint="use one of " + " ".join(_LOG_LEVELS),
        )
    if master == SUBMITTED:
        return {"spark.sql.session.timeZone": "UTC"} | conf
    settings = {
        "spark.app.name": app_name,
        "spark.master": master,
        "spark.sql.session.timeZone": "UTC",
        "spark.redaction.regex": REDACTED,
        _JAVA_OPTIONS: quiet_java_options(conf.pop(_JAVA_OPTIONS, ""), log_level.upper()),
    }
    if is_local(master):
        cores = _cores(master)
        settings |= {
            "spark.driver.bindAddress": _LOOPBACK,
            "spark.driver.host": _LOOPBACK,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": str(cores),
            _JAVA_OPTIONS: f"{_COMPILE_ALL} {settings[_JAVA_OPTIONS]}",
        }
        settings |= _local_files(conf)
        if hasattr(socket, "TCP_QUICKACK"):  # Linux
            settings |= WORKER_DAEMON
    return settings | conf


_COMPILE_ALL = "-XX:-DontCompileHugeMethods"
"""Java does not compile methods of more than 8,000 bytes. Spark's code for a batch with several sinks is longer:
interpreted, a row of three tables takes 1.3 times the processor time of compiled code in the whole run."""


def _local_files(conf: dict[str, str]) -> dict[str, str]:
    """Return the options for files on a local disk: modes without ``chmod``, and checkpoints of one driver only.

    Empty if this is not possible.

    The class paths in ``conf`` are moved into the result.
    """
    if os.name != "posix" or os.pathsep in str(_JAR):
        return {}
    paths = {name: conf.pop(name, "") for name in _CLASS_PATHS}
    return {
        "spark.hadoop.fs.file.impl": "penstock.spark.LocalFiles",
        "spark.hadoop.fs.AbstractFileSystem.file.impl": "penstock.spark.LocalFileContext",
        **{name: os.pathsep.join(filter(None, (given, str(_JAR)))) for name, given in paths.items()},
    }


def quiet_java_options(given: str, log_level: str) -> str:
    """Add options to ``given`` options of the driver's JVM that limit its logging to ``log_level``."""
    if "log4j2.configurationFile" in given:
        return given
    quiet = Path(__file__).with_name("log4j2.properties").as_uri()
    stacks = " -Dpenstock.spark.exceptions=%ex" if log_level in _WITH_STACKS else ""
    return f"{given} -Dlog4j2.configurationFile={quiet}{stacks} -Dpenstock.spark.logLevel={log_level}".strip()


def _cores(master: str) -> int:
    match = _LOCAL.fullmatch(master)
    threads = (match["threads"] if match else None) or ("1" if match else "*")
    return int(threads) if threads.isdecimal() and threads != "0" else os.cpu_count() or 1


_STANDALONE = "spark://"
_ANSWER_S = 5.0


def check_master(master: str) -> None:
    """Check that one of the standalone masters in ``spark://HOST:PORT[,HOST:PORT]`` is reachable.

    Spark itself would retry for 90 s and then print a Java stack trace.

    Raises:
        ConfigError: an address is invalid.
        UnavailableError: no master accepts a connection.
    """
    if not master.startswith(_STANDALONE):
        return
    failures = []
    for text in master.removeprefix(_STANDALONE).split(","):
        try:
            socket.create_connection(parse_address(text), _ANSWER_S).close()
        except ValueError as error:
            raise ConfigError(f"--spark-master: {text!r}: {error}", option="spark-master") from None
        except OSError as error:
            failures.append(f"{text}: {error.strerror or error}")
        else:
            return
    raise UnavailableError(
        f"no Spark master is reachable at {master}",
        why="; ".join(failures),
        hint="start it, or set --spark-master to the address in the master's log or web page (default port: 7077)",
    )
