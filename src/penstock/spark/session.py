"""A Spark session set up so that penstock's sources, sinks and pipelines work in it.

What a plain ``SparkSession.builder.getOrCreate()`` gets wrong for them, each found by running it:

* workers are started with ``python3`` of ``PATH``, not with the interpreter of the driver: an environment that is not
  activated dies with "Python worker exited unexpectedly";
* every Python process of a local session compiles pyspark anew, for a second;
* a local session listens on two ports of the machine's outer interface;
* the default checkpoint manager costs 60 to 70 ms a micro-batch on a local disk;
* each file that is made on a local disk starts the program ``chmod``: four times a micro-batch;
* 200 shuffle partitions make a micro-batch of a stateful query minutes long on two cores;
* timestamps follow the zone of the machine.

Only the environment and the configuration are set; the session is Spark's own."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, UnavailableError
from penstock.runtime.io.network import parse_address
from penstock.spark.environment.compiled_pyspark import check_launcher, spark_home
from penstock.spark.environment.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["REDACTED", "SUBMITTED", "check_master", "configuration", "is_local", "quiet_java_options", "session"]

SUBMITTED = "submitted"
"""Instead of a master: the process was started by ``spark-submit``, which has chosen it and started the JVM."""
_LOOPBACK = "127.0.0.1"
_LOCAL = re.compile(r"local(?:-cluster)?(?:\[(?P<threads>[^\],]*).*\])?", re.DOTALL)
_LOOPBACK_MASTER = re.compile(r"spark://(127(\.\d+){3}|localhost|\[::1\])(:|$)")
_LOG_LEVELS = ("OFF", "FATAL", "ERROR", "WARN", "INFO", "DEBUG", "TRACE", "ALL")
_CHECKPOINT_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
_JAR = Path(__file__).with_name("jvm") / "penstock.jar"
_CLASS_PATHS = ("spark.driver.extraClassPath", "spark.executor.extraClassPath")
REDACTED = r"(?i)secret|password|passwd|token|access[.]?key|credential|//[^/@\s]*:[^/@\s]*@"
"""Options whose name, or text whose part, matches are shown as redacted by Spark's pages and event logs: those of
Spark's default, and URLs with a password."""
_RENAMING_SCHEMES = frozenset({"", "file", "hdfs"})


def session(
    app_name: str,
    master: str = "local[2]",
    conf: Mapping[str, str] | None = None,
    *,
    checkpoint: str | None = None,
    log_level: str = "ERROR",
) -> SparkSession:
    """The Spark session of this process, made on the first call (4 to 12 s), for penstock's connectors.

    ``conf`` wins over everything set here. ``checkpoint`` is where the queries of this session will keep their
    checkpoints, a path or URI: it decides whether the cheaper checkpoint manager is safe (local and HDFS only, since
    it relies on an atomic rename); without it, local masters are taken to keep them on a local disk.

    With ``SUBMITTED`` as ``master`` only what a running session may still change is set.

    ``JAVA_HOME``, ``PYSPARK_PYTHON`` and, for masters on this machine, ``SPARK_LOCAL_IP`` and ``SPARK_HOME`` are set in
    ``os.environ``, because Spark's launcher reads them there; all but the first only where they are not set. A session
    that is already running is returned as Spark's own builder does: options of the session change, options of its JVM
    cannot.

    Raises:
        ConfigError: no Java, no pyspark, no bash, a SPARK_HOME without Spark, or an option that cannot work.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ConfigError(
            f"Spark is not installed: {error}",
            do='pip install ".[spark]" in a clone of penstock (and [java] where Java is missing)',
        ) from error

    settings = configuration(app_name, master, conf, checkpoint=checkpoint, log_level=log_level)
    if SparkSession.getActiveSession() is None and master != SUBMITTED:
        check_launcher(os.environ)
        os.environ["JAVA_HOME"] = str(find_java().home)
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        if is_local(master):
            os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
            if (home := spark_home()) is not None:
                os.environ["SPARK_HOME"] = str(home)
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def is_local(master: str) -> bool:
    """Return True if everything runs on this machine: ``local...``, or a standalone master on a loopback address."""
    return _LOCAL.fullmatch(master) is not None or _LOOPBACK_MASTER.match(master) is not None


def configuration(
    app_name: str,
    master: str,
    conf: Mapping[str, str] | None = None,
    *,
    checkpoint: str | None = None,
    log_level: str = "ERROR",
) -> dict[str, str]:
    """Every Spark option that :func:`session` sets, ``conf`` merged in.

    Raises:
        ConfigError: ``spark.jars.packages`` (see the message), or an unknown log level.
    """
    conf = dict(conf or {})
    if "spark.jars.packages" in conf:
        raise ConfigError(
            f"spark.jars.packages={conf['spark.jars.packages']!r} is not used with penstock",
            option="spark.jars.packages",
            why="it downloads at every start, and fails where the local Maven cache holds descriptions without jars",
            do="fetch the jars once (make jars) and name the files in spark.jars",
        )
    if log_level.upper() not in _LOG_LEVELS:
        raise ConfigError(
            f"log level {log_level!r} is not one of Spark's",
            option="log_level",
            do="use one of " + " ".join(_LOG_LEVELS),
        )
    if master == SUBMITTED:
        settings = {"spark.sql.session.timeZone": "UTC"}
        if _renames_atomically(checkpoint, master):
            settings["spark.sql.streaming.checkpointFileManagerClass"] = _CHECKPOINT_MANAGER
        return settings | conf
    settings = {
        "spark.app.name": app_name,
        "spark.master": master,
        "spark.sql.session.timeZone": "UTC",
        "spark.redaction.regex": REDACTED,
        "spark.driver.extraJavaOptions": quiet_java_options(
            conf.pop("spark.driver.extraJavaOptions", ""), log_level.upper()
        ),
    }
    if is_local(master):
        cores = _cores(master)
        settings |= {
            "spark.driver.bindAddress": _LOOPBACK,
            "spark.driver.host": _LOOPBACK,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": str(cores),
        }
        settings |= _local_files(conf)
    if _renames_atomically(checkpoint, master):
        settings["spark.sql.streaming.checkpointFileManagerClass"] = _CHECKPOINT_MANAGER
    return settings | conf


def _local_files(conf: dict[str, str]) -> dict[str, str]:
    """Options that let Spark set modes of local files without a process for each; none where that is not possible.

    Class paths of ``conf`` go into them.
    """
    if os.name != "posix" or os.pathsep in str(_JAR):
        return {}
    paths = {name: conf.pop(name, "") for name in _CLASS_PATHS}
    return {
        "spark.hadoop.fs.file.impl": "penstock.spark.LocalFiles",
        **{name: os.pathsep.join(filter(None, (given, str(_JAR)))) for name, given in paths.items()},
    }


def quiet_java_options(given: str, log_level: str) -> str:
    """``given`` options of the driver's JVM, and those that let it log no more than ``log_level``."""
    if "log4j2.configurationFile" in given:
        return given
    quiet = Path(__file__).with_name("log4j2.properties").as_uri()
    return f"{given} -Dlog4j2.configurationFile={quiet} -Dpenstock.spark.logLevel={log_level}".strip()


def _cores(master: str) -> int:
    match = _LOCAL.fullmatch(master)
    threads = (match["threads"] if match else None) or ("1" if match else "*")
    return int(threads) if threads.isdecimal() and threads != "0" else os.cpu_count() or 1


def _renames_atomically(checkpoint: str | None, master: str) -> bool:
    """The file-system-based manager writes a file and renames it; object stores have no atomic rename."""
    if checkpoint is None:
        return is_local(master)
    scheme, separator, _ = checkpoint.partition(":/")
    return (scheme.lower() if separator else "") in _RENAMING_SCHEMES


_STANDALONE = "spark://"
_ANSWER_S = 5.0


def check_master(master: str) -> None:
    """Look whether a standalone master, ``spark://HOST:PORT[,HOST:PORT]``, is there; any of them will do.

    Spark itself tries for a minute and a half, and then prints a Java stack.

    Raises:
        ConfigError: it is no address.
        UnavailableError: nobody listens.
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
        f"no Spark master answers at {master}",
        why="; ".join(failures),
        do="start it, or give --spark-master the address that its log and its page name (port 7077 by default)",
    )
