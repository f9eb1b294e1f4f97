"""Checks of a machine, a configuration and a data directory, for ``penstock doctor``.

Nothing is changed, except that one file of the data directory is written, synced and deleted to measure the disk.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import penstock
from penstock import compiled
from penstock.errors import PenstockError, StorageError
from penstock.mqtt.transport.listener_settings import Transport
from penstock.node.config.mqtt import broker_limits
from penstock.node.config.node import NodeConfig, load_config, setting_of
from penstock.node.config.tube import tube_limits
from penstock.node.data_dir import check_format, is_in_use, running_node
from penstock.node.extras import check_extras
from penstock.node.pipeline_commands import missing_files
from penstock.node.replacement import SNAPSHOT
from penstock.node.security import NodeSecurity, expiring
from penstock.runtime.io.container import memory_limit
from penstock.runtime.io.disk_space import default_floor, file_system_of
from penstock.runtime.io.files import Durability
from penstock.runtime.io.network import in_use
from penstock.runtime.io.permissions import permission_hint

__all__ = ["CheckResult", "Level", "diagnose", "mount_of"]

RESERVED_DESCRIPTORS: Final = 200
"""File descriptors of the node itself: segments, LMDB, listeners."""

SLOW_SYNC_S: Final = 0.02
"""Median time of fdatasync from which every durable commit is slow: disks with a cache need 0.1 to 10 ms."""

_SYNCS: Final = 5
_TIME_ERROR: Final = 5
"""Result of adjtimex for a clock that is not synchronized (adjtimex(2))."""
_TIMEX_BYTES: Final = 256
"""More than ``struct timex`` has on any platform."""

_REMOTE: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "fuse.sshfs", "fuse.glusterfs"})
_VOLATILE: Final = {
    "tmpfs": "the data are lost when the machine restarts",
    "ramfs": "the data are lost when the machine restarts",
    "overlay": "the data are lost with the container",
}


class Level(StrEnum):
    """Result of a check. ``problem``: the node does not start or loses data; ``warning``: it works, but not well."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class CheckResult(NamedTuple):
    """Result of a check of ``part``, with cause and action unless all is well."""

    level: Level
    part: str
    what: str
    why: str | None = None
    hint: str | None = None


def diagnose(
    file: Path | None, flags: Mapping[str, str | None], environment: Mapping[str, str], *, addresses: bool = True
) -> Iterator[CheckResult]:
    """Check this machine for a node with this configuration, as in :func:`~penstock.node.config.node.load_config`.

    Checks that need a valid configuration follow only if it is valid. ``addresses``: those of the configuration must be
    free, unless a node uses the data directory.
    """
    yield _version()
    yield from _clock()
    try:
        config = load_config(file, flags, environment)
        check_extras(config)
        ends = {} if config.creates_files else NodeSecurity(config).check_certificates()
    except PenstockError as error:
        yield _failed_check(Level.PROBLEM, "configuration", error)
        return
    missing = missing_files(config.pipelines)
    files = (
        "and the profile aio creates its files at the first start"
        if config.creates_files
        else "and the files that it names can be read"
    )
    yield CheckResult(Level.OK, "configuration", "valid" if missing else f"valid, {files}")
    yield from (_failed_check(Level.WARNING, "configuration", error) for error in missing)
    yield from (_failed_check(Level.WARNING, "certificates", warning) for warning in expiring(ends, time.time()))
    if config.durability is not Durability.DURABLE:
        yield CheckResult(
            Level.WARNING,
            "configuration",
            f"durability is {config.durability.value}: acknowledged data can be lost",
            "acknowledgements do not wait for the disk",
            "set durability: durable, unless the data may be lost",
        )
    yield from _plain_text(config)
    yield from _descriptors(config)
    yield from _memory(config)
    yield from _directory(config)
    denied = os.access(config.data_dir, os.F_OK) and not os.access(config.data_dir, os.R_OK | os.X_OK)
    if addresses and not denied and running_node(config.data_dir) is None:  # denied: a node may use it
        yield from _addresses(config)


def mount_of(path: Path, mounts: str) -> tuple[str, str]:
    """Return mount point and type of the file system of ``path``; ``mounts`` is the text of /proc/self/mountinfo."""
    best = ("", "")
    for line in mounts.splitlines():
        fields, _, source = line.partition(" - ")
        point = fields.split(" ")[4].replace("\\040", " ")
        # Of several mounts on one point, the last one is visible.
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, source.split(" ")[0])
    return best


def _failed_check(level: Level, part: str, error: PenstockError) -> CheckResult:
    return CheckResult(level, part, error.what, error.why, error.hint)


def _version() -> CheckResult:
    text = (
        f"penstock {penstock.__version__}, core {compiled.form()}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}, {os.cpu_count()} processors"
    )
    why = compiled.why_interpreted()
    if not why:
        return CheckResult(Level.OK, "host", text)
    return CheckResult(
        Level.WARNING,
        "host",
        text,
        f"the core is interpreted, so that a request takes about five times the processor time: {why}",
        "install a wheel for this platform; in a clone, install a C compiler and Python's headers and run `make core`",
    )


def _clock() -> Iterator[CheckResult]:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "adjtimex"):
        return
    state = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # modes = 0: only a query
    if state == _TIME_ERROR:
        yield CheckResult(
            Level.WARNING,
            "host",
            "the system clock is not synchronized",
            "versions of keys and expiry times are those of this clock, and requests of clients whose clock differs "
            "by more than a minute are refused",
            "run an NTP client, such as chrony or systemd-timesyncd",
        )
    elif state >= 0:
        yield CheckResult(Level.OK, "host", "the system clock is synchronized")


def _plain_text(config: NodeConfig) -> Iterator[CheckResult]:
    if config.security.passwords is None:
        return
    for name, entry in {"mqtt": config.mqtt, **config.mqtt.listeners}.items():
        if not entry.bind.is_loopback and entry.transport in {Transport.TCP, Transport.WS}:
            yield CheckResult(
                Level.WARNING,
                "listeners",
                f"{name} ({entry.bind}) accepts passwords without encryption",
                f"its transport is {entry.transport.value}, and other machines can connect",
                "set the transport tls or wss with certificates, or listen on 127.0.0.1",
            )


def _descriptors(config: NodeConfig) -> Iterator[CheckResult]:
    mqtt = broker_limits(config.mqtt.limits).max_connections
    tube = tube_limits(config.tube.limits).max_connections
    wanted = mqtt + tube + RESERVED_DESCRIPTORS
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        yield CheckResult(
            Level.OK, "limits", f"enough file descriptors for {wanted - RESERVED_DESCRIPTORS} connections"
        )
        return
    yield CheckResult(
        Level.WARNING,
        "limits",
        f"at most {hard} file descriptors, fewer than {wanted}",
        f"mqtt.limits.max_connections ({mqtt}) and tube.limits.max_connections ({tube}) permit more connections",
        "raise the hard limit (LimitNOFILE of the unit, ulimit -n), or lower max_connections",
    )


def _memory(config: NodeConfig) -> Iterator[CheckResult]:
    mqtt = broker_limits(config.mqtt.limits)
    limits = {
        "statestore.max_bytes": config.statestore.max_bytes,
        "mqtt.limits.max_total_queued_bytes": mqtt.max_total_queued_bytes,
        "mqtt.limits.max_retained_bytes": mqtt.max_retained_bytes,
    }
    total, holder = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "machine"
    if (limit := memory_limit()) is not None and limit < total:
        total, holder = limit, "container"
    wanted = sum(limits.values())
    shown = f"data limits of {_mib(wanted)} in memory, and the {holder} has {_mib(total)}"
    if wanted <= total:
        yield CheckResult(Level.OK, "limits", shown)
        return
    yield CheckResult(
        Level.WARNING,
        "limits",
        shown,
        "keys, queued and retained messages are in memory: at the limits the node would be ended by the kernel",
        "lower " + ", ".join(limits),
    )


def _directory(config: NodeConfig) -> Iterator[CheckResult]:
    path = config.data_dir.absolute()
    existing = next(each for each in (path, *path.parents) if os.access(each, os.F_OK))
    if not os.access(existing, os.W_OK | os.X_OK):
        why, hint = f"user {os.geteuid()} may not write to {existing}", "set data_dir (--data-dir) to another one"
        if os.statvfs(existing).f_flag & os.ST_RDONLY:
            why, hint = f"the file system of {existing} is mounted read-only", f"mount it writable, or {hint}"
        elif existing == path:
            hint = f"{permission_hint(path)}; or {hint}"
        yield CheckResult(Level.PROBLEM, "data directory", f"{path} cannot be written", why, hint)
        return
    if existing == path and path.stat().st_mode & 0o007:
        yield CheckResult(
            Level.WARNING,
            "data directory",
            f"{path} can be read by all users of the machine",
            "it has messages, keys and the administration token",
            f"chmod o-rwx {path}",
        )
    # A running node has checked it, and a replacement is completed by the next start.
    if existing == path and not is_in_use(path) and not (path / SNAPSHOT).exists():
        try:
            check_format(path, _replicated(config))
        except StorageError as error:
            yield _failed_check(Level.PROBLEM, "data directory", error)
    yield from _file_system(existing)
    space = file_system_of(existing)
    floor = default_floor(space.total) if config.disk.min_free_bytes is None else config.disk.min_free_bytes
    free = f"{_mib(space.free)} free, the node refuses writes below {_mib(floor)}"
    if space.free < 2 * floor:
        yield CheckResult(
            Level.PROBLEM if space.free < floor else Level.WARNING,
            "data directory",
            free,
            "the file system is nearly full",
            "free disk space, lower tube.topics.NAME.retention, or set data_dir to another disk",
        )
    else:
        yield CheckResult(Level.OK, "data directory", free)
    yield _disk(existing)


def _replicated(config: NodeConfig) -> list[str]:
    """Return the names of the environments that the cluster of the node has as well."""
    if config.cluster is None:
        return []
    from penstock.node.cluster.state import LOGS, logs_of  # needs the extra `cluster`

    return [LOGS[name] for name in logs_of(config.cluster)]


def _file_system(path: Path) -> Iterator[CheckResult]:
    try:
        point, kind = mount_of(path.resolve(), Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
    except OSError:  # not Linux
        return
    if kind in _REMOTE:
        yield CheckResult(
            Level.PROBLEM,
            "data directory",
            f"{path} is on a network file system ({kind}, mounted at {point})",
            "LMDB needs memory maps and locks of a local file system: data could be damaged",
            "set data_dir to a local disk",
        )
    elif kind in _VOLATILE:
        yield CheckResult(
            Level.WARNING,
            "data directory",
            f"{path} is on {kind}, mounted at {point}",
            _VOLATILE[kind],
            "set data_dir to a disk or a volume",
        )


def _disk(directory: Path) -> CheckResult:
    """Measure fdatasync of 4 KiB, which each durable commit needs."""
    times = []
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            for _ in range(_SYNCS):
                file.write(bytes(4096))
                file.flush()
                started = time.perf_counter()
                os.fdatasync(file.fileno())
                times.append(time.perf_counter() - started)
    except OSError as error:
        return CheckResult(
            Level.PROBLEM,
            "data directory",
            f"a file in {directory} cannot be written",
            error.strerror,
            "free disk space, or check the disk and its mount options",
        )
    median = statistics.median(times)
    text = f"a synced write of 4 KiB takes {median * 1000:.2f} ms"
    if median < SLOW_SYNC_S:
        return CheckResult(Level.OK, "data directory", text)
    return CheckResult(
        Level.WARNING,
        "data directory",
        text,
        "each durable commit waits for one: a client that waits for its answers gets at most "
        f"{1 / median:.0f} of them in a second",
        "use a disk with a protected write cache, or reduce other writes to it",
    )


def _addresses(config: NodeConfig) -> Iterator[CheckResult]:
    taken = {name: address for name, address in config.addresses().items() if address.port and in_use(address)}
    if not taken:
        yield CheckResult(Level.OK, "listeners", "all addresses are free")
    for name, address in taken.items():
        yield CheckResult(
            Level.PROBLEM,
            "listeners",
            f"{address} ({name}) is in use",
            "another process listens there, perhaps a node with another data directory",
            f"stop it, or set another address in `{setting_of(name)}`",
        )


def _mib(count: int) -> str:
    return f"{count >> 20:,} MiB"
