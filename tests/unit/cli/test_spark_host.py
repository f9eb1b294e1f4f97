"""Properties of a machine with which Spark fails."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.cli.spark_host import HostProblem, Machine, host_problems, this_machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without problems."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "proc").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable:  8000000 kB\n", encoding="ascii")
    return Machine(tmp_path, {"JAVA_TOOL_OPTIONS": f"-Xss1m -Djava.io.tmpdir={tmp_path / 'tmp'}"}, "glibc", "UTF-8")


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the file system of temporary files reports."""
    found = SimpleNamespace(f_flag=0, f_frsize=1 << 20, f_blocks=9000, f_bavail=8000)
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    return found


def only(machine: Machine, java_source: str | None = "PATH") -> HostProblem:
    (found,) = host_problems(machine, java_source)
    return found


def test_a_machine_without_problems_has_none(machine: Machine) -> None:
    assert list(host_problems(machine, "PATH")) == []
    (machine.root / "proc" / "meminfo").unlink()  # not Linux
    assert list(host_problems(machine, None)) == []
    assert this_machine().root == Path("/")


def test_musl_next_to_glibc(machine: Machine) -> None:
    (machine.root / "lib" / "ld-musl-x86_64.so.1").touch()
    found = only(machine)
    assert found.what.startswith("/lib/ld-musl-x86_64.so.1 exists")
    assert "UnsatisfiedLinkError" in found.why
    assert "apt remove musl" in found.hint
    assert list(host_problems(machine._replace(libc=""), "PATH")) == []  # a system with musl alone
    options = machine.environ["JAVA_TOOL_OPTIONS"] + " -Dorg.xerial.snappy.lib.path=/opt/snappy"
    assert list(host_problems(machine._replace(environ={"JAVA_TOOL_OPTIONS": options}), "PATH")) == []


def test_a_java_home_that_is_not_used(machine: Machine) -> None:
    home = machine.root / "jdk"
    with_home = machine._replace(environ={**machine.environ, "JAVA_HOME": str(home)})
    assert f"{home}/bin/java does not exist; pipelines use the Java of PATH" in only(with_home).why
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").touch()
    assert "does not start, or is too old" in only(with_home).why
    assert list(host_problems(with_home, "JAVA_HOME")) == []
    assert list(host_problems(with_home, None)) == []  # then the error of the search names it


def test_a_directory_for_temporary_files(machine: Machine, disk: SimpleNamespace) -> None:
    disk.f_flag = os.ST_NOEXEC
    assert only(machine).what == f"{machine.root / 'tmp'} is mounted noexec"
    disk.f_flag, disk.f_bavail = 0, 900
    assert only(machine).what == f"{machine.root / 'tmp'} has 900 MiB free"
    (machine.root / "tmp").rmdir()
    assert only(machine).what == f"Java cannot write temporary files to {machine.root / 'tmp'}"
    disk.f_bavail = 8000
    other = {**machine.environ, "JDK_JAVA_OPTIONS": f"-Djava.io.tmpdir={machine.root}"}  # has precedence
    assert list(host_problems(machine._replace(environ=other), "PATH")) == []


def test_a_locale_without_utf_8(machine: Machine) -> None:
    ascii_only = machine._replace(codeset="ANSI_X3.4-1968")
    assert only(ascii_only).what == "the locale is not one with UTF-8 (no LANG: ANSI_X3.4-1968)"
    named = ascii_only._replace(environ={**machine.environ, "LANG": "de_DE.UTF-8", "LC_ALL": "C"})
    assert "(LC_ALL=C: ANSI_X3.4-1968)" in only(named).what
    assert list(host_problems(machine._replace(codeset="utf8"), "PATH")) == []


def test_too_little_memory(machine: Machine) -> None:
    (machine.root / "sys/fs/cgroup").mkdir(parents=True)
    limit = machine.root / "sys/fs/cgroup/memory.max"
    limit.write_text(f"{1 << 30}\n", encoding="ascii")
    assert only(machine).what == "the memory limit of this container is 1,024 MiB"
    limit.write_text("max\n", encoding="ascii")
    (machine.root / "proc" / "meminfo").write_text("MemAvailable: 1000000 kB\n", encoding="ascii")
    assert only(machine).what == "976 MiB of memory are available"
