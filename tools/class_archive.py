"""Archive the classes that a session of Spark loads, so that the Java processes of tests start faster.

Usage: python -m tools.class_archive

Java maps the archive (class data sharing) instead of reading, checking and linking ten thousand classes of Spark's
jars: a short session needs 11 instead of 20 s of processor time. The archive (190 MB) is made once for this checkout,
its Java and its jars, in the user's cache folder; Java ignores it for another class path.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zlib
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A driver of Spark that lives for seconds needs 12 instead of 22 s without Java's second compiler."""
MAKE_S = 600.0


def options(archive: Path | None) -> str:
    """Return options of Java for a session that uses ``archive``."""
    # Without messages: a Java for which the archive was not made would warn on standard output.
    return SMALL if archive is None else f"{SMALL} -XX:SharedArchiveFile={archive} -Xlog:disable"


def prepare() -> Path | None:
    """Return the archive, made if it does not exist; None, with a message: it cannot be made."""
    try:
        path = _path()
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                made = Path(scratch) / path.name
                environment = {
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
                    "SPARK_SUBMIT_OPTS": f"{SMALL} -XX:ArchiveClassesAtExit={made} -Xlog:disable",
                    "TMPDIR": scratch,
                }
                command = [sys.executable, "-m", "tools.class_archive", "--load", scratch]
                done = subprocess.run(
                    command, cwd=ROOT, env=environment, check=True, timeout=MAKE_S, capture_output=True
                )
                _await_end(int(done.stdout.split()[-1]))
                # Renamed, so that no process ever sees a part of it.
                made.rename(path)
            for other in path.parent.glob(f"{path.name.rpartition('-')[0]}-*.jsa"):
                if other != path:
                    other.unlink(missing_ok=True)
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        details = getattr(error, "stderr", None) or b""
        print(f"class_archive: Java starts without an archive: {error}\n{details.decode(errors='replace')[-2000:]}")
        return None
    return path


def _path() -> Path:
    """Return the archive's path, with digests of the checkout's path and of everything for which it is made."""
    from penstock.spark.environment.compiled_pyspark import spark_home
    from penstock.spark.environment.java import cache_directory, find_java

    home = spark_home()
    if home is None:
        raise OSError("Spark was not installed by pip")
    java = find_java()
    jars = [*sorted((home / "jars").glob("*.jar")), ROOT / "src" / "penstock" / "spark" / "jvm" / "penstock.jar"]
    files = [java.home / "bin" / "java", Path(__file__), *jars]
    made_for = "\n".join(f"{f} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)
    checkout = f"{ROOT.name}-{zlib.crc32(str(ROOT).encode()):08x}"
    return cache_directory("classes") / f"{checkout}-{hashlib.sha256(made_for.encode()).hexdigest()[:16]}.jsa"


def _await_end(process: int) -> None:
    """Wait for the Java process, which writes its archive as it ends, after its Python process."""
    deadline = time.monotonic() + MAKE_S
    with suppress(ProcessLookupError):
        while True:
            os.kill(process, 0)
            if time.monotonic() > deadline:
                raise OSError(f"process {process} does not end")
            time.sleep(0.05)


def load(folder: Path) -> None:
    """Do what most sessions of the tests do: queries with state, tables, JSON, Python workers."""
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as sf

    from penstock.pipelines.run.errors import STATE_SETTINGS
    from penstock.spark import session

    spark = session("classes", conf=STATE_SETTINGS, log_level="OFF")
    rows = spark.range(100).select("id", sf.timestamp_seconds("id").alias("at"), sf.col("id").cast("string").alias("s"))
    rows.write.parquet(f"{folder}/rows")
    rows.mapInArrow(lambda batches: batches, rows.schema).write.json(f"{folder}/json")
    spark.read.schema("id long, s string").json(f"{folder}/json").selectExpr("from_json(s, 'a int')").collect()

    def write(batch: DataFrame, _number: int) -> None:
        cached = batch.persist()
        cached.groupBy("s").count().orderBy("s").collect()
        cached.write.mode("append").parquet(f"{folder}/batch-{len(batch.columns)}")
        cached.unpersist()

    stream = spark.readStream.schema(rows.schema).parquet(f"{folder}/rows").withWatermark("at", "1 second")
    counts = stream.groupBy(sf.window("at", "10 seconds"), "s").agg(
        sf.count("*").alias("n"), sf.max("id").alias("last")
    )
    for query, name in ((stream.dropDuplicatesWithinWatermark(["id"]), "dedupe"), (counts, "windows")):
        writer = query.writeStream.option("checkpointLocation", f"{folder}/{name}").trigger(availableNow=True)
        writer.foreachBatch(write).start().awaitTermination()
    pid = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[union-attr] # noqa: SLF001
    spark.stop()
    print(pid)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--load"]:
        load(Path(sys.argv[2]))
    else:
        print(prepare() or "")
