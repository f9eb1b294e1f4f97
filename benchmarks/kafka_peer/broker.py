"""A Kafka broker and Spark's own connector for it: downloaded once with Maven into the user's cache folder.

``python -m benchmarks.kafka_peer.broker`` prepares them. Otherwise a benchmark prepares them before it measures.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.servers import ended, wait_for
from penstock.errors import PenstockError
from penstock.spark.environment.java import find_java
from tests.ports import free_port

__all__ = ["KafkaPeer", "kafka", "kafka_process", "prepare"]

HERE = Path(__file__).parent
# The token provider of the connector's own version is not published; the one of 4.0.0 has the same classes.
CONNECTOR = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)
RESOLVE_S = 600
HEAP = "1g"


class KafkaPeer(NamedTuple):
    """Folders with the jars of the broker and of Spark's connector."""

    broker: Path
    connector: Path

    @property
    def spark_jars(self) -> str:
        """Return the value for ``spark.jars``."""
        return ",".join(str(path) for path in sorted(self.connector.glob("*.jar")))


def prepare() -> KafkaPeer:
    """Return the jars, from the cache or from Maven.

    Raises:
        PenstockError: there is no Maven, or it cannot resolve them.
    """
    digest = hashlib.sha256((HERE / "pom.xml").read_bytes() + "".join(CONNECTOR).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "kafka"
    peer = KafkaPeer(cache / digest / "broker", cache / digest / "connector")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not peer.broker.parent.exists():
            mvn = shutil.which("mvn")
            if mvn is None:
                raise PenstockError("Maven is not installed", hint="install mvn, or leave the Kafka peer out")
            draft = cache / f"{digest}.{os.getpid()}"
            try:
                target = f"-DoutputDirectory={draft / 'broker'}"
                _run([mvn, "-q", "-B", target, "-f", str(HERE / "pom.xml"), "dependency:copy-dependencies"])
                for artifact in CONNECTOR:
                    target = f"-DoutputDirectory={draft / 'connector'}"
                    _run([mvn, "-q", "-B", target, f"-Dartifact={artifact}", "dependency:copy"])
                draft.rename(peer.broker.parent)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return peer


@contextmanager
def kafka(peer: KafkaPeer) -> Iterator[str]:
    """Run Kafka like :func:`kafka_process`; yields host:port."""
    with kafka_process(peer) as (address, _):
        yield address


@contextmanager
def kafka_process(peer: KafkaPeer) -> Iterator[tuple[str, int]]:
    """Run one node, broker and controller, on loopback; yields its address as host:port and the process id. It
    acknowledges from the page cache."""
    port, controller = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "server.properties"
        settings.write_text(
            f"process.roles=broker,controller\nnode.id=1\ncontroller.quorum.bootstrap.servers=127.0.0.1:{controller}\n"
            f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}\n"
            "controller.listener.names=CONTROLLER\ninter.broker.listener.name=PLAINTEXT\n"
            f"log.dirs={folder}/data\nnum.partitions=3\noffsets.topic.replication.factor=1\n"
            "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n",
            encoding="utf-8",
        )
        java = [str(find_java().home / "bin" / "java"), f"-Xmx{HEAP}", f"-Xms{HEAP}", "-cp", f"{peer.broker}/*"]
        number = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        # After a space, an id that begins with a dash would be an option.
        id_ = f"--cluster-id={number}"
        _run([*java, "kafka.tools.StorageTool", "format", "--standalone", id_, "-c", str(settings)])
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(
                [*java, "kafka.Kafka", str(settings)], cwd=folder, stdout=log, stderr=subprocess.STDOUT
            )
        with ended(process):
            wait_for(port, process, 90)
            yield f"127.0.0.1:{port}", process.pid


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=RESOLVE_S, check=False)
    if done.returncode != 0:
        name = Path(command[0]).name
        raise PenstockError(f"{name} failed: {(done.stdout + done.stderr)[-2000:]}", hint="look at what it says")


def main() -> int:
    """Prepare the jars."""
    sys.stdout.write(f"{prepare().broker.parent}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
