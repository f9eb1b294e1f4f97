"""Checks of machine, configuration and data directory."""

from __future__ import annotations

import os
import resource
import socket
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.node import doctor
from penstock.node.doctor import CheckResult, Level, diagnose, mount_of
from penstock.runtime.io.disk_space import FileSystem
from penstock.security.passwords import edit_passwords, make_credential
from tests.certificates import Authority
from tests.ports import free_ports

PORTS = ("mqtt", "tube_master", "tube_broker", "tube_broker_http", "http")


def changed(file: Path, **settings: str) -> None:
    """Write these settings to the configuration, in place of those with the same names."""
    old = dict(line.split(": ", 1) for line in file.read_text(encoding="utf-8").splitlines())
    file.write_text("".join(f"{name}: {text}\n" for name, text in {**old, **settings}.items()), encoding="utf-8")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration with free addresses, in an own data directory."""
    path = tmp_path / "penstock.yaml"
    path.write_text("data_dir: data\n", encoding="utf-8")
    changed(path, **{name: f"127.0.0.1:{port}" for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True)})
    return path


def found(file: Path, part: str, level: Level) -> list[CheckResult]:
    findings = list(diagnose(file, {}, {}))
    for finding in findings:
        assert finding.level is Level.OK or finding.hint, finding
    return [finding for finding in findings if finding.part == part and finding.level is level]


def test_a_machine_without_problems(file: Path) -> None:
    findings = list(diagnose(file, {}, {}))
    assert not [finding for finding in findings if finding.level is Level.PROBLEM]
    assert {finding.part for finding in findings} >= {"host", "configuration", "limits", "data directory", "listeners"}


def test_an_invalid_configuration_ends_the_checks(file: Path) -> None:
    file.write_text("mqtt: {bindd: 1}\n", encoding="utf-8")
    findings = list(diagnose(file, {}, {}))
    assert findings[-1].level is Level.PROBLEM
    assert "mqtt.bindd" in findings[-1].what


def test_every_address_in_use_is_reported(file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (one, two)]
        changed(file, mqtt=addresses[0], http=addresses[1])
        shown = found(file, "listeners", Level.PROBLEM)
    assert [finding.what for finding in shown] == [
        f"{addresses[0]} (mqtt) is in use",
        f"{addresses[1]} (http) is in use",
    ]


def test_durability_that_can_lose_data(file: Path) -> None:
    changed(file, durability="memory")
    assert "durability is memory" in found(file, "configuration", Level.WARNING)[0].what


def test_passwords_without_encryption(file: Path, tmp_path: Path) -> None:
    edit_passwords(tmp_path / "passwords", lambda users: {**users, "ann": make_credential("ann", b"secret")})
    changed(file, mqtt=f"0.0.0.0:{free_ports(1)[0]}", security="{passwords: passwords}")
    assert "without encryption" in found(file, "listeners", Level.WARNING)[0].what


def test_a_certificate_that_ends_soon(file: Path, tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue("node", "localhost", until=datetime.now(UTC) + timedelta(days=3))
    changed(file, http=f"{{bind: 127.0.0.1:{free_ports(1)[0]}, tls: {{certificate: {certificate}, key: {key}}}}}")
    assert str(certificate) in found(file, "certificates", Level.WARNING)[0].what


def test_limits_of_the_machine(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (1024, 1024))
    monkeypatch.setattr(os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 1 << 18)
    shown = found(file, "limits", Level.WARNING)
    assert [finding.what.split(",")[0] for finding in shown] == [
        "at most 1024 file descriptors",
        "data limits of 2",
    ]


def test_the_memory_of_a_container_is_its_limit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_limit", lambda: 1 << 28)
    (shown,) = [finding for finding in found(file, "limits", Level.WARNING) if "memory" in finding.what]
    assert shown.what.endswith("and the container has 256 MiB")


def test_a_data_directory_that_others_can_read(file: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o755)
    (tmp_path / "data").chmod(0o755)
    assert "can be read by all users" in found(file, "data directory", Level.WARNING)[0].what


@pytest.mark.parametrize(
    ("free", "level"), [(100 << 20, Level.PROBLEM), (300 << 20, Level.WARNING), (1 << 30, Level.OK)]
)
def test_free_space(file: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: Level) -> None:
    monkeypatch.setattr(doctor, "file_system_of", lambda _path: FileSystem(100 << 30, free))
    assert any("the node refuses writes below 256 MiB" in each.what for each in found(file, "data directory", level))


def test_a_slow_disk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fdatasync", lambda _fd: time.sleep(0.03))
    assert "each durable commit waits" in str(found(file, "data directory", Level.WARNING)[-1].why)


MOUNTS = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:40 / /var rw - overlay overlay rw
31 30 0:41 / /var/lib/edge\\040data rw - nfs4 server:/x rw
"""


def test_the_file_system_of_a_path() -> None:
    assert mount_of(Path("/home/edge"), MOUNTS) == ("/", "ext4")
    assert mount_of(Path("/var/lib/penstock"), MOUNTS) == ("/var", "overlay")
    assert mount_of(Path("/var/lib/edge data/penstock"), MOUNTS) == ("/var/lib/edge data", "nfs4")


def test_a_directory_of_another_user_is_a_problem_without_false_ones(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = file.parent / "data"
    data.mkdir(mode=0o700)
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: may(path, mode) and (path != data or mode == os.F_OK))
    (problem,) = found(file, "data directory", Level.PROBLEM)
    assert problem.hint == f"change the permissions: ls -ld {data}; or set data_dir (--data-dir) to another one"
    # A node may use the directory, and the addresses.
    assert not [each for each in diagnose(file, {}, {}) if each.part == "listeners"]


def test_a_file_system_that_is_mounted_read_only_is_a_problem(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file.parent / "data"
    data.mkdir(mode=0o700)
    may, flags = os.access, SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "access", lambda path, mode: may(path, mode) and (path != data or not mode & os.W_OK))
    monkeypatch.setattr(os, "statvfs", lambda _: flags)
    (problem,) = found(file, "data directory", Level.PROBLEM)
    assert problem.why == f"the file system of {data} is mounted read-only"


def test_a_directory_that_the_node_would_refuse_is_a_problem(file: Path) -> None:
    data = file.parent / "data"
    data.mkdir(mode=0o700)
    assert not found(file, "data directory", Level.PROBLEM)
    (data / "format.json").write_text('{"format": 2}')
    (problem,) = found(file, "data directory", Level.PROBLEM)
    assert (problem.why, "has format 2" in problem.what) == ("a newer version of penstock wrote it", True)


def test_a_lost_environment_of_a_cluster_is_loaded_from_it(file: Path) -> None:
    data = file.parent / "data"
    data.mkdir(mode=0o700)
    (data / "format.json").write_text('{"format": 1, "environments": ["mqtt"]}')
    (problem,) = found(file, "data directory", Level.PROBLEM)
    assert str(problem.hint).startswith("restore the whole directory from one backup")
    changed(file, cluster='{name: plant, node: one, etcd: ["127.0.0.1:1"]}')
    (problem,) = found(file, "data directory", Level.PROBLEM)
    assert str(problem.hint).endswith("the node then loads its content from the cluster")
