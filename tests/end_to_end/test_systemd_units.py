"""The systemd units of deploy/: systemd accepts them, and their commands run under their system call filter and notify
a service manager."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.end_to_end.nodes import DEADLINE_S, LISTENERS, RunningNode, environment
from tests.tools import require_tool

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
PROGRAM = "/opt/penstock/.venv/bin/penstock"
INSTALLED = str(Path(sys.executable).with_name("penstock"))
TOLERATED = {"mbind"}
"""Calls outside the filter whose failure is harmless: OpenBLAS prefers memory of its NUMA node."""


def settings(name: str) -> dict[str, list[str]]:
    """The settings of a unit, all sections together, with the values of each."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@cache
def calls_of(group: str) -> frozenset[str]:
    """The system calls of a group such as ``@system-service``, as this machine's systemd defines it."""
    shown = subprocess.run(
        [require_tool("systemd-analyze"), "syscall-filter", group], capture_output=True, text=True, check=True
    ).stdout
    found: frozenset[str] = frozenset()
    for line in map(str.strip, shown.splitlines()[1:]):
        if line and not line.startswith("#"):
            found |= calls_of(line) if line.startswith("@") else {line}
    return found


def permitted(unit: dict[str, list[str]]) -> frozenset[str]:
    """The system calls that the unit permits."""
    found: frozenset[str] = frozenset()
    for value in unit["SystemCallFilter"]:
        calls = frozenset[str]().union(*map(calls_of, value.removeprefix("~").split()))
        found = found - calls if value.startswith("~") else found | calls
    return found | calls_of("@default")


@pytest.mark.parametrize("name", ["penstock.service", "penstock-broker@.service"])
def test_systemd_accepts_the_unit_and_finds_it_hardened(name: str, tmp_path: Path) -> None:
    analyze = require_tool("systemd-analyze")
    for unit in UNITS.iterdir():  # verify wants the executable to exist
        (tmp_path / unit.name).write_text(unit.read_text(encoding="utf-8").replace(PROGRAM, INSTALLED))
    file = str(tmp_path / name.replace("@", "@2"))
    Path(file).write_text((tmp_path / name).read_text())
    done = subprocess.run([analyze, "verify", file], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        [analyze, "security", "--offline=true", "--threshold=15", file], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout  # an exposure of 1.5 of 10


class Service:
    """The command of a unit, started as systemd starts it, in ``folder`` instead of /var/lib and /etc."""

    def __init__(self, name: str, folder: Path, instance: str, change: Callable[[list[str]], list[str]]) -> None:
        unit = settings(name)
        assert unit["Type"] == ["notify"]
        (command,) = unit["ExecStart"]
        words = shlex.split(command.replace("%i", instance).replace("/etc/penstock", str(folder)))
        assert words[0] == PROGRAM
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(folder / "notify"))
        self.manager.settimeout(DEADLINE_S)
        self.refused = folder / "refused"
        kept = "!" + ",".join(f"?{call}" for call in sorted(permitted(unit)))
        strace = [
            *(require_tool("strace"), "-f", "--seccomp-bpf", "-e", "signal=none", "-o", str(self.refused)),
            *("-e", f"trace={kept}", "-e", f"inject={kept}:error={unit['SystemCallErrorNumber'][0]}"),
        ]
        own = dict(value.split("=", 1) for value in unit["Environment"])
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [*strace, INSTALLED, *change(words[1:])],
                cwd=folder,
                env=environment(NOTIFY_SOCKET=str(folder / "notify"), WATCHDOG_USEC="200000", **own),
                stderr=log,
                stdout=subprocess.DEVNULL,
            )

    def message(self) -> str:
        """The next message that is not of the watchdog."""
        while (text := self.manager.recv(4096).decode()) == "WATCHDOG=1":
            pass
        return text

    def child(self) -> int:
        """The process that systemd would start: strace waits for it."""
        pid = self.process.pid
        (found,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(found)

    def check(self, reload: str) -> None:
        """Ready, alive, reloaded by ``reload``, stopped by SIGTERM; nothing was refused but what is harmless."""
        try:
            assert self.message().startswith("READY=1\nSTATUS=")
            for _ in range(2):
                assert self.manager.recv(4096) == b"WATCHDOG=1"
            kill, option, pid = reload.split()
            assert (kill, pid) == ("/bin/kill", "$MAINPID")
            os.kill(self.child(), signal.Signals[f"SIG{option[1:]}"])
            assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", self.message())
            assert self.message() == "READY=1\nSTATUS=reloaded"
            os.kill(self.child(), signal.SIGTERM)
            assert self.message().startswith("STOPPING=1")
            assert self.process.wait(DEADLINE_S) == 0
        finally:
            if self.process.poll() is None:
                os.kill(self.child(), signal.SIGKILL)
                self.process.wait(DEADLINE_S)
            self.manager.close()
        refused = set(re.findall(r"^\d+ +(\w+)\(", self.refused.read_text(), re.MULTILINE))
        assert refused <= TOLERATED


def test_the_node_notifies_systemd_under_its_system_call_filter(tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text("data_dir: penstock-data\n")
    listen = [part for name in LISTENERS for part in (f"--{name}", "127.0.0.1:0")]
    service = Service("penstock.service", tmp_path, "", lambda words: [*words, *listen])
    service.check(settings("penstock.service")["ExecReload"][0])


def test_a_broker_notifies_systemd_when_a_master_has_accepted_it(tmp_path: Path) -> None:
    with RunningNode(tmp_path) as node:
        (tmp_path / "penstock-data").symlink_to(tmp_path / "data")

        def without_users(words: list[str]) -> list[str]:
            for option in ("--passwords", "--username", "--password-file", "--tube-broker-http"):
                at = words.index(option)
                del words[at : at + 2]
            return [*words, "--tube-master", node.ready["tube_master"]]

        service = Service("penstock-broker@.service", tmp_path, "2", without_users)
        service.check(settings("penstock-broker@.service")["ExecReload"][0])
