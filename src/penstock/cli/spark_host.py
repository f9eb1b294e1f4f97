"""Properties of a machine with which Spark fails or is unreliable, for ``penstock doctor``.

Everything is read from files, system calls and the environment, all of which are arguments: a test needs no such
machine.
"""

from __future__ import annotations

import locale
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from penstock.runtime.io.container import memory_limit
from penstock.runtime.io.disk_space import file_system_of

__all__ = ["HostProblem", "Machine", "host_problems", "this_machine"]

NEEDED_BYTES: Final = 3 << 29
"""Memory of Spark's driver: 1 GiB of heap (``spark.driver.memory``), and Java's own, classes and threads."""
TEMPORARY_BYTES: Final = 1 << 30
"""Free space for temporary files below which shuffles and the state of windows may fail."""
_MUSL: Final = "lib/ld-musl-x86_64.so.1"
"""The file by which snappy-java recognises a system with musl, such as Alpine; below the root directory."""
_TMPDIR: Final = re.compile(r"-Djava\.io\.tmpdir=(\S+)")
_OPTIONS: Final = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")
"""Variables with options of Java, the later one with precedence."""


class HostProblem(NamedTuple):
    """A property of the machine, why it is a problem for Spark, and what to do."""

    what: str
    why: str
    hint: str


class Machine(NamedTuple):
    """A machine to check. ``libc``: name of the C library of Python, "" if unknown; ``codeset``: of its locale.

    ``root``: the directory with ``proc``, ``sys`` and ``lib``.
    """

    root: Path
    environ: Mapping[str, str]
    libc: str
    codeset: str

    @property
    def java_options(self) -> str:
        """The options of every Java program of this environment."""
        return " ".join(self.environ.get(name, "") for name in _OPTIONS)


def this_machine() -> Machine:
    """Return the machine on which this process runs."""
    return Machine(Path("/"), os.environ, platform.libc_ver()[0], locale.nl_langinfo(locale.CODESET))


def host_problems(machine: Machine, java_source: str | None) -> Iterator[HostProblem]:
    """Yield what breaks Spark on ``machine``; ``java_source`` is the place where its Java was found, None: nowhere.

    Nothing is started, and nothing is changed.
    """
    yield from _java_home(machine, java_source)
    yield from _musl(machine)
    yield from _temporary(machine)
    yield from _locale(machine)
    yield from _memory(machine)


def _java_home(machine: Machine, java_source: str | None) -> Iterator[HostProblem]:
    home = machine.environ.get("JAVA_HOME")
    if home and java_source not in (None, "JAVA_HOME"):
        exists = (Path(home) / "bin" / "java").is_file()
        why = "its bin/java does not start, or is too old" if exists else f"{home}/bin/java does not exist"
        yield HostProblem(
            f"JAVA_HOME={home} is not used",
            f"{why}; pipelines use the Java of {java_source}, but other programs of Spark fail",
            "set JAVA_HOME to a Java runtime of version 17 or later, or unset it",
        )


def _musl(machine: Machine) -> Iterator[HostProblem]:
    chosen = "-Dorg.xerial.snappy.lib.path=" in machine.java_options
    if machine.libc == "glibc" and (machine.root / _MUSL).exists() and not chosen:
        yield HostProblem(
            f"/{_MUSL} exists, although this system has glibc",
            "snappy-java takes the system for one with musl and loads the wrong library: Parquet files with Snappy "
            "fail with UnsatisfiedLinkError (libc.musl-x86_64.so.1)",
            "remove musl (Debian: apt remove musl), or extract org/xerial/snappy/native/Linux/x86_64/libsnappyjava.so "
            "of Spark's snappy-java jar to a DIRECTORY, and set JAVA_TOOL_OPTIONS="
            '"-Dorg.xerial.snappy.lib.path=DIRECTORY -Dorg.xerial.snappy.lib.name=libsnappyjava.so"',
        )


def _temporary(machine: Machine) -> Iterator[HostProblem]:
    options = _TMPDIR.findall(machine.java_options)
    path = Path(options[-1] if options else "/tmp")  # noqa: S108 - Java's default, which is not TMPDIR
    set_it = 'set JAVA_TOOL_OPTIONS="-Djava.io.tmpdir=DIRECTORY"'
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        yield HostProblem(
            f"Java cannot write temporary files to {path}",
            "the directory does not exist, or this user may not write to it",
            f"correct its permissions, or {set_it}",
        )
        return
    if os.statvfs(path).f_flag & os.ST_NOEXEC:
        yield HostProblem(
            f"{path} is mounted noexec",
            "Java loads native libraries of Snappy, Zstandard and RocksDB from there: tables and the state of windows "
            "fail with UnsatisfiedLinkError",
            set_it,
        )
    free = file_system_of(path).free
    if free < TEMPORARY_BYTES:
        yield HostProblem(
            f"{path} has {free >> 20:,} MiB free",
            "Spark writes shuffles and the state of windows and joins there: queries fail once it is full",
            f"free disk space, or {set_it}",
        )


def _locale(machine: Machine) -> Iterator[HostProblem]:
    if machine.codeset.upper().replace("-", "") != "UTF8":
        names = ("LC_ALL", "LC_CTYPE", "LANG")
        found = next((f"{name}={machine.environ[name]}" for name in names if machine.environ.get(name)), "no LANG")
        yield HostProblem(
            f"the locale is not one with UTF-8 ({found}: {machine.codeset})",
            "Java cannot open files whose names have other characters than ASCII, such as partitions of a table",
            "set LC_ALL=C.UTF-8",
        )


def _memory(machine: Machine) -> Iterator[HostProblem]:
    limit = memory_limit(machine.root)
    try:
        text = (machine.root / "proc/meminfo").read_text(encoding="ascii")
    except OSError:  # not Linux
        return
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        return
    available = int(found[1]) << 10
    if limit is not None and limit < NEEDED_BYTES:
        what, hint = f"the memory limit of this container is {limit >> 20:,} MiB", "raise the limit"
    elif available < NEEDED_BYTES:
        what, hint = f"{available >> 20:,} MiB of memory are available", "end other programs"
    else:
        return
    yield HostProblem(
        what,
        f"Spark's driver needs about {NEEDED_BYTES >> 20:,} MiB with its default heap, and the kernel ends it without "
        "a message if there is less",
        f"{hint}, or run pipelines on another machine",
    )
