"""Apache TubeMQ's jars and our program over its client, resolved and compiled once into the user's cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tools import require_tool

__all__ = ["JAVA_OPTIONS", "Jars", "prepare"]

HERE = Path(__file__).parent
SERVER = "org.apache.inlong:tubemq-server:2.4.0"
RESOLVE_S = 300
# What the server's BDB and Netty of that age want from a newer JDK; the rest makes a JVM start quickly and stay small.
JAVA_OPTIONS = [
    "-Djava.net.preferIPv4Stack=true",
    "-Djava.awt.headless=true",
    *("--add-exports", "java.base/sun.nio.ch=ALL-UNNAMED"),
    *("--add-opens", "java.base/java.nio=ALL-UNNAMED"),
    *("--add-opens", "java.base/java.lang=ALL-UNNAMED"),
    *("--add-opens", "java.base/sun.nio.ch=ALL-UNNAMED"),
    "-XX:+UseSerialGC",
    f"-Dlog4j.configurationFile={HERE / 'log4j2.xml'}",
]


class Jars:
    """A prepared folder: ``lib`` with the jars, ``classes`` with our program, the library that keeps binds local."""

    def __init__(self, folder: Path, java: str) -> None:
        self.java = java
        self.loopback = folder / "loopback.so"
        self.class_path = f"{folder / 'classes'}:{folder / 'lib'}/*"

    def command(self, main: str, *arguments: str, heap: str = "256m", options: tuple[str, ...] = ()) -> list[str]:
        """The command line that runs the class ``main``."""
        sizes = (f"-Xms{heap}", f"-Xmx{heap}")
        return [self.java, *JAVA_OPTIONS, *sizes, *options, "-cp", self.class_path, main, *arguments]


def prepare() -> Jars:
    """Everything ready to run; skips the test where a tool is missing or Maven cannot resolve the jars."""
    java, javac, mvn, cc = (require_tool(name) for name in ("java", "javac", "mvn", "cc"))
    sources = [HERE / "pom.xml", HERE / "TubePeer.java", HERE / "loopback.c"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources) + SERVER.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "tube_java"
    folder = cache / digest
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once: one prepares
        if not folder.exists():
            draft = cache / f"{digest}.{os.getpid()}"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            try:
                lib = draft / "lib"
                copy = [mvn, "-q", "-B", f"-DoutputDirectory={lib}"]
                _run([*copy, "-f", str(HERE / "pom.xml"), "dependency:copy-dependencies"], draft)
                _run([*copy, f"-Dartifact={SERVER}", "dependency:copy"], draft)
                classes = ["-d", str(draft / "classes"), "-cp", f"{lib}/*", str(HERE / "TubePeer.java")]
                _run([javac, *classes], draft)
                library = [
                    "-shared",
                    "-fPIC",
                    "-O2",
                    "-o",
                    str(draft / "loopback.so"),
                    str(HERE / "loopback.c"),
                    "-ldl",
                ]
                _run([cc, *library], draft)
                draft.rename(folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return Jars(folder, java)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RESOLVE_S, check=False)
    if done.returncode != 0:
        # No tool is missing: most likely the registry cannot be reached.
        pytest.skip(f"{Path(command[0]).name} cannot prepare the Java peer: {(done.stdout + done.stderr)[-2000:]}")
