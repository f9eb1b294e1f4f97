"""etcd clusters as processes of their own: members on loopback that are killed, paused and started again."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.cluster.client import EtcdClient, EtcdStatus
from penstock.cluster.proto import etcd_pb2 as pb
from tests.ports import free_ports
from tests.tools import require_tool

__all__ = ["EtcdCluster"]

DEADLINE_S = 120.0


class EtcdCluster:
    """``members`` members in ``folder``; start it with :meth:`start`.

    ``tls``: certificate, key and file of the authority, for clients that must show a certificate of it.
    """

    def __init__(
        self,
        folder: Path,
        members: int = 3,
        *,
        tls: tuple[Path, Path, Path] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._options = [*options]
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self._options += ["--cert-file", str(tls[0]), "--key-file", str(tls[1])]
            self._options += ["--client-cert-auth", "--trusted-ca-file", str(tls[2])]
        ports = free_ports(2 * members)
        self._ports, self._peers = ports[:members], ports[members:]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def endpoints(self) -> list[str]:
        """``host:port`` of every member."""
        return [f"127.0.0.1:{port}" for port in self._ports]

    def start(self) -> None:
        """Start the members that do not run, and wait until each serves clients."""
        for member in range(len(self._ports)):
            if member not in self._processes:
                self._processes[member] = self._run(member)
        for member in range(len(self._ports)):
            self._until_served(member)

    def _until_served(self, member: int) -> None:
        end = time.monotonic() + DEADLINE_S
        while not _accepts(self._ports[member]):
            assert self._processes[member].poll() is None, self._log(member).read_text()[-3000:]
            assert time.monotonic() < end, self._log(member).read_text()[-3000:]
            time.sleep(0.05)

    def add(self, successor_of: int, administer: Callable[..., str]) -> None:
        """Replace a dead member by a new one with other addresses, as the documentation describes; ``administer`` runs
        etcdctl. Wait until it serves clients."""
        listed = administer("member", "list")
        (dead,) = [line.split(",")[0] for line in listed.splitlines() if f" m{successor_of}," in line]
        administer("member", "remove", dead)
        member = len(self._ports)
        for ports in zip((self._ports, self._peers), free_ports(2), strict=True):
            ports[0].append(ports[1])
        peer = f"http://127.0.0.1:{self._peers[member]}"
        printed = administer("member", "add", f"m{member}", f"--peer-urls={peer}")
        (cluster,) = re.findall(r'ETCD_INITIAL_CLUSTER="(.*)"', printed)
        self._processes[member] = self._run(member, cluster, "existing")
        self._until_served(member)

    def _run(self, member: int, cluster: str = "", state: str = "new") -> subprocess.Popen[bytes]:
        if not cluster:
            cluster = ",".join(f"m{other}=http://127.0.0.1:{port}" for other, port in enumerate(self._peers))
        client, peer = f"{self._scheme}://127.0.0.1:{self._ports[member]}", f"http://127.0.0.1:{self._peers[member]}"
        command = [
            require_tool("etcd"),
            *("--name", f"m{member}", "--data-dir", str(self._folder / f"m{member}")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster, "--initial-cluster-token", self._folder.name),
            *("--initial-cluster-state", state),
            *("--snapshot-count", "10000", *self._options),
        ]
        with self._log(member).open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _log(self, member: int) -> Path:
        return self._folder / f"m{member}.log"

    def kill(self, *members: int) -> None:
        """End members as a power loss ends them, as far as processes can tell."""
        for member in members:
            process = self._processes.pop(member)
            process.kill()
            process.wait()

    def pause(self, member: int) -> None:
        """SIGSTOP, and wait until it stands still: its connections stay open and silent."""
        process = self._processes[member]
        process.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{process.pid}/status")
        while "State:\tT" not in status.read_text(encoding="ascii"):
            time.sleep(0.01)

    def resume(self, member: int) -> None:
        """SIGCONT."""
        self._processes[member].send_signal(signal.SIGCONT)

    def member(self, endpoint: str) -> int:
        """The number of the member at ``endpoint``."""
        return self.endpoints.index(endpoint)

    def leader(self) -> int:
        """The number of the member that leads."""
        client = EtcdClient(self.endpoints)
        end = time.monotonic() + DEADLINE_S
        try:
            while True:
                statuses = client.statuses()
                for member, status in enumerate(statuses):
                    if isinstance(status, EtcdStatus) and status.leads:
                        return member
                assert time.monotonic() < end, statuses
                time.sleep(0.05)
        finally:
            client.close()

    def back_up(self) -> Path:
        """Copy the databases of all members, which are restarted."""
        self.kill(*self._processes)
        copy = self._folder / "backup"
        shutil.rmtree(copy, ignore_errors=True)
        for member in range(len(self._ports)):
            shutil.copytree(self._folder / f"m{member}", copy / f"m{member}")
        self.start()
        return copy

    def restore(self, copy: Path) -> None:
        """Continue with a copy of :meth:`back_up`."""
        self.kill(*self._processes)
        for member in range(len(self._ports)):
            shutil.rmtree(self._folder / f"m{member}")
            shutil.copytree(copy / f"m{member}", self._folder / f"m{member}")
        self.start()

    def set_full(self, *, full: bool) -> None:
        """Begin the alarm of a full database, or end it, as an operator does who has made space."""
        client = EtcdClient(self.endpoints)
        try:
            members = [client.call("Maintenance/Status", pb.StatusRequest(), pb.StatusResponse).header.member_id]
            if not full:
                alarms = client.call("Maintenance/Alarm", pb.AlarmRequest(), pb.AlarmResponse).alarms
                members = [alarm.memberID for alarm in alarms]
            action = pb.AlarmRequest.ACTIVATE if full else pb.AlarmRequest.DEACTIVATE
            for member in members:
                request = pb.AlarmRequest(action=action, memberID=member, alarm=pb.NOSPACE)
                client.call("Maintenance/Alarm", request, pb.AlarmResponse)
        finally:
            client.close()

    def close(self) -> None:
        """End all members."""
        for member in list(self._processes):
            self.resume(member)
            self.kill(member)


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
