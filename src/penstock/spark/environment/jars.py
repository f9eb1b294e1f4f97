"""Additional jars for Spark, downloaded once into the user's cache directory.

``python -m penstock.spark.environment.jars`` (or ``make jars``) downloads them with Maven; a run only checks that they
exist. ``spark.jars.packages`` is not used: it downloads at every start, and fails if the local Maven cache has
descriptions without jars.

Delta Lake is for tables at a URI; ``s3a`` for checkpoints in a bucket. Hadoop's own dependency of ``s3a`` is a bundle
of 700 MB with all services of AWS; these are the parts of the SDK that it uses, 12 MB, with the sum of each file.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.errors import ConfigError, UnavailableError
from penstock.spark.environment.java import cache_directory

__all__ = [
    "DELTA",
    "delta_artefact",
    "delta_jars",
    "delta_settings",
    "folder",
    "is_s3a_set_up",
    "is_set_up",
    "main",
    "resolve",
    "resolve_s3a",
    "s3a_jars",
    "s3a_settings",
]

DELTA = {"4.1": "io.delta:delta-spark_4.1_2.13:4.4.0", "4.2": "io.delta:delta-spark_4.2_2.13:4.4.0"}
"""Delta Lake for each version of Spark."""
_GROUPS = "io.delta,io.unitycatalog"
"""Groups of artefacts that are downloaded; other dependencies are part of Spark."""
_RESOLVE_S = 600.0
_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>penstock</groupId><artifactId>jars</artifactId><version>1</version>
  <dependencies>
{dependencies}
  </dependencies>
</project>
"""
_DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>{}</dependency>"
_ALONE = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
S3A = "org.apache.hadoop:hadoop-aws:3.5.0"
"""``s3a`` for the Hadoop that is part of Spark 4.2 and 4.3."""
_S3A_SPARK = ("4.2", "4.3")
_AWS_SDK = "2.35.4"
"""Version of AWS's SDK with which this Hadoop was built."""
_S3A_DEPENDENCIES = (
    (*S3A.split(":"), _ALONE),
    *(("software.amazon.awssdk", name, _AWS_SDK, "") for name in ("s3", "s3-transfer-manager", "sts")),
    ("software.amazon.s3.analyticsaccelerator", "analyticsaccelerator-s3", "1.3.1", _ALONE),
)
_S3A_GROUPS = (
    "org.apache.hadoop,org.reactivestreams,software.amazon.awssdk,software.amazon.eventstream,"
    "software.amazon.s3.analyticsaccelerator"
)
_S3A_SUMS = Path(__file__).with_name("s3a-jars.sha256")
_PARTITIONS = "spark.databricks.delta.snapshotPartitions"
_SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Default: 50 tasks that compute the state of a table in every batch, which takes minutes on two busy cores.
    _PARTITIONS: "2",
}


def folder(artefact: str) -> Path:
    """Return the directory of the jars of ``artefact`` (group:name:version)."""
    return cache_directory("jars") / artefact.replace(":", "_")


def delta_jars(spark: str | None = None) -> list[Path]:
    """Return the jars of Delta Lake for Spark ``spark`` (default: the installed version).

    Raises:
        ConfigError: no Delta Lake exists for this version, or it was not downloaded.
    """
    artefact = delta_artefact(spark)
    found = sorted(folder(artefact).glob("*.jar"))
    if not found:
        raise ConfigError(
            "Delta Lake is not set up",
            option="format",
            why=f"{str(folder(artefact))!r} has no jars",
            hint="run `make jars`, or `python -m penstock.spark.environment.jars`, once; it needs Maven (mvn)",
        )
    return found


def is_set_up() -> bool:
    """Return True if the Delta Lake jars for the installed Spark exist."""
    try:
        return bool(delta_jars())
    except ConfigError:
        return False


def delta_settings(given: dict[str, str] | None = None, spark: str | None = None) -> dict[str, str]:
    """Return the Spark options for ``format("delta")``, merged with the ``given`` ones; raises as ``delta_jars``."""
    before = given or {}
    jars = ",".join(map(str, delta_jars(spark)))
    settings = _SETTINGS | {"spark.jars": jars}
    settings |= {name: value for name, value in before.items() if name == _PARTITIONS}
    for name in ("spark.jars", "spark.sql.extensions"):
        if before.get(name):
            settings[name] = f"{before[name]},{settings[name]}"
    return settings


def s3a_jars(spark: str | None = None) -> list[Path]:
    """Return the jars of ``s3a`` for Spark ``spark`` (default: the installed version).

    Raises:
        ConfigError: this version of Spark has another Hadoop, or they were not downloaded.
    """
    _check_hadoop(spark)
    found = sorted(folder(S3A).glob("*.jar"))
    if not found:
        raise ConfigError(
            "the jars for checkpoints in a bucket (s3a) are not set up",
            option="state-dir",
            why=f"{str(folder(S3A))!r} has no jars",
            hint="run `make jars`, or `python -m penstock.spark.environment.jars`, once; it needs Maven (mvn)",
        )
    return found


def _check_hadoop(spark: str | None = None) -> None:
    installed = _installed(spark)
    if _line(installed) not in _S3A_SPARK:
        raise ConfigError(
            f"there are no jars of s3a for Spark {installed}",
            option="state-dir",
            why=f"{S3A} works with the Hadoop of Spark {' and '.join(_S3A_SPARK)} only",
            hint="use one of these, or a state directory in a local or mounted file system",
        )


def is_s3a_set_up() -> bool:
    """Return True if the jars of ``s3a`` for the installed Spark exist."""
    try:
        return bool(s3a_jars())
    except ConfigError:
        return False


def s3a_settings(endpoint: str | None, region: str, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the Spark options for checkpoints in a bucket, merged with the ``given`` ones; raises as ``s3a_jars``.

    They contain no credentials: the SDK reads them where those of tables are: the environment, the files of the AWS
    command line, or the role of the machine.
    """
    before = given or {}
    settings = {
        "spark.hadoop.fs.s3a.aws.credentials.provider": _CREDENTIALS,
        "spark.hadoop.fs.s3a.endpoint.region": region,
        # A checkpoint is read by one driver, which must learn soon that the storage does not answer.
        "spark.hadoop.fs.s3a.attempts.maximum": "5",
        "spark.hadoop.fs.s3a.retry.limit": "3",
    }
    if endpoint is not None:
        settings |= {
            "spark.hadoop.fs.s3a.endpoint": endpoint,
            "spark.hadoop.fs.s3a.path.style.access": "true",
            "spark.hadoop.fs.s3a.connection.ssl.enabled": str(endpoint.startswith("https://")).lower(),
        }
    settings = {name: value for name, value in settings.items() if name not in before}
    jars = ",".join(map(str, s3a_jars()))
    settings["spark.jars"] = f"{before['spark.jars']},{jars}" if before.get("spark.jars") else jars
    return settings


_CREDENTIALS = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"


def resolve_s3a() -> Path:
    """Download the jars of ``s3a`` as :func:`resolve`, and compare them with their sums.

    Raises:
        ConfigError: as :func:`resolve`, and the installed Spark has another Hadoop.
        UnavailableError: as :func:`resolve`, and a file differs.
    """
    _check_hadoop()
    sums = {name: digest for digest, name in map(str.split, _S3A_SUMS.read_text(encoding="ascii").splitlines())}
    return _fetch(folder(S3A), _S3A_DEPENDENCIES, _S3A_GROUPS, sums)


def resolve(artefact: str) -> Path:
    """Download ``artefact`` with Maven into its directory, which never exists incomplete.

    Raises:
        ConfigError: Maven is not installed.
        UnavailableError: Maven failed; the error contains its output.
    """
    return _fetch(folder(artefact), [(*artefact.split(":"), "")], _GROUPS, {})


def _fetch(target: Path, dependencies: Sequence[Sequence[str]], groups: str, sums: Mapping[str, str]) -> Path:
    """Download ``dependencies`` of ``groups`` to ``target``; ``sums``: SHA-256 of each file, or empty."""
    if list(target.glob("*.jar")):
        return target
    maven = shutil.which("mvn")
    if maven is None:
        raise ConfigError("Maven (mvn) is not installed", hint="install it (make system), then run this again")
    target.parent.mkdir(parents=True, exist_ok=True)
    named = ":".join(dependencies[0][:3])
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".draft-") as draft:
        pom = Path(draft) / "pom.xml"
        pom.write_text(
            _POM.format(dependencies="\n".join(_DEPENDENCY.format(*each) for each in dependencies)), encoding="utf-8"
        )
        goal = "dependency:copy-dependencies"
        options = [f"-DoutputDirectory={draft}/lib", f"-DincludeGroupIds={groups}", "-DincludeScope=runtime"]
        try:
            done = subprocess.run(  # noqa: S603 - Maven with constant arguments
                [maven, "-q", "-B", "-f", str(pom), *options, goal],
                capture_output=True,
                text=True,
                timeout=_RESOLVE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(
                f"Maven did not download {named} within {_RESOLVE_S:g} s", hint="try again"
            ) from error
        if done.returncode:
            raise UnavailableError(
                f"Maven cannot download {named}",
                why=(done.stdout or done.stderr).strip()[-2_000:],
                hint="check the network and Maven's settings (~/.m2/settings.xml), then run this again",
            )
        if sums:
            _compare(Path(draft) / "lib", sums)
        try:
            (Path(draft) / "lib").rename(target)
        except OSError:
            # Another process has downloaded the same meanwhile: a directory with files is not replaced.
            if not list(target.glob("*.jar")):
                raise
    return target


def _compare(directory: Path, sums: Mapping[str, str]) -> None:
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.glob("*.jar")}
    wrong = sorted(name for name in {**found, **sums} if found.get(name) != sums.get(name))
    if wrong:
        raise UnavailableError(
            f"Maven downloaded other jars than expected: {', '.join(wrong)}",
            why=f"their sums are not those in {_S3A_SUMS.name}",
            hint="check the repositories in Maven's settings (~/.m2/settings.xml), remove these files from ~/.m2, and "
            "run this again",
        )


def _installed(spark: str | None) -> str:
    try:
        return spark or version("pyspark")
    except PackageNotFoundError:
        raise ConfigError("Spark is not installed", hint='pip install "penstock[spark]"') from None


def _line(installed: str) -> str:
    return ".".join(installed.split(".")[:2])


def delta_artefact(spark: str | None = None) -> str:
    """Return the Maven coordinates of Delta Lake for ``spark``, a version; default: the installed one.

    Raises:
        ConfigError: there is none, or Spark is not installed.
    """
    installed = _installed(spark)
    artefact = DELTA.get(_line(installed))
    if artefact is None:
        raise ConfigError(
            f"there is no Delta Lake for Spark {installed}",
            option="format",
            why="a Delta Lake built for another version of Spark does not work",
            hint=f"use Spark {' or '.join(DELTA)}, or `format: parquet`",
        )
    return artefact


def main() -> int:
    """Download the jars for the installed Spark; return the exit status."""
    downloads: dict[str, Callable[[], Path]] = {"Delta Lake": lambda: resolve(delta_artefact()), "s3a": resolve_s3a}
    failed = False
    for what, download in downloads.items():
        try:
            sys.stdout.write(f"jars: {what} is in {download()}\n")
        except (ConfigError, UnavailableError) as error:
            sys.stderr.write(f"jars: {error}\n")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
