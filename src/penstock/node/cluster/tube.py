"""TubeMQ in a node of a cluster: a broker that runs in every role, and the master of a standby.

The records are not replicated, so the broker runs from the start of the process to its end, and the elected node
continues with it. It registers at the master of the active node, whose address is in the leadership key. The master of
a standby refuses every request.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final

from penstock.cluster.client import EtcdClient
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.errors import RefusedError, UnavailableError
from penstock.node.client_warnings import TubeDenials
from penstock.node.cluster.snapshot_recovery import line_of
from penstock.node.config.node import NodeConfig
from penstock.node.config.tube import TubeCertificates, tube_limits
from penstock.node.http import audited, broker_app, names_of
from penstock.node.metric_help import add_metrics
from penstock.node.node_broker import node_broker
from penstock.node.security import NodeSecurity
from penstock.runtime.io.disk_space import DiskSpace, Writer
from penstock.runtime.io.network import bind_error
from penstock.runtime.observability.audit import AuditTrail
from penstock.runtime.observability.metrics import Metrics
from penstock.tube.admin import broker as broker_admin
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.master.standby import StandbyMaster

__all__ = ["MemberTube"]

_RETRY_S: Final = 0.2


class MemberTube:
    """The broker and the standby master of a node in a cluster.

    ``client`` and ``prefix``: where the nodes find the password of the brokers. ``closing`` ends the wait for etcd,
    whose reason is passed to ``tell``.
    """

    def __init__(
        self,
        config: NodeConfig,
        client: EtcdClient,
        prefix: str,
        closing: threading.Event,
        tell: Callable[[str], None],
    ) -> None:
        self.broker: TubeBroker | None = None
        """The broker; None without TubeMQ."""
        self.user = ("penstock-broker", "")
        """Name and password with which the brokers of the cluster sign."""
        self.denials = TubeDenials()
        """Denials of the broker's clients, for the node's warnings."""
        self.certificates = TubeCertificates(config.tube.tls)
        """Certificates of the TLS listeners of the broker, and of the master in any role."""
        self._masters: list[str] = []
        """Address of the active master, for the broker; empty if there is none."""
        self._config = config
        self._client = client
        self._prefix = prefix
        self._closing = closing
        self._tell = tell
        self._loop: asyncio.AbstractEventLoop

    async def start(
        self, security: NodeSecurity, parts: AsyncExitStack, metrics: Metrics, token: str, trail: AuditTrail
    ) -> None:
        """Start the broker, and what a standby has besides it; ``parts`` ends the latter. ``token``: that of the
        administration, whose changes are added to ``trail``.

        Raises:
            ConfigError: a file of a listener cannot be used.
            UnavailableError: an address is in use.
        """
        config = self._config
        self._loop = asyncio.get_running_loop()
        if security.access_rules.users is not None or security.access_rules.policy is not None:
            self.user = (self.user[0], await asyncio.to_thread(self._password))
        broker = node_broker(
            config,
            lambda: self._masters,
            web=config.tube_broker_http.bind,
            token=token,
            access=security.tube_access(config.tube_broker, self.user),
            user=self.user,
        )
        bind, tls = config.tube_broker.bind, config.tube.tls
        certificates = self.certificates
        start = broker.start if tls is None else certificates.beside(broker.start, tls.broker_port)
        try:
            await start(bind.host, bind.port)
        except OSError as error:
            raise bind_error(error, "tube-broker", bind) from error
        self.broker = broker  # close() ends it
        add_metrics(metrics, "tube", lambda: broker.stats)
        disk = DiskSpace(config.data_dir, config.disk.max_bytes, config.disk.min_free_bytes)
        parts.push_async_callback(disk.close)
        await disk.start()
        disk.add(Writer("TubeMQ sends", broker.refuse_growth, lambda: 0))
        listener = config.tube_broker_http
        identify = security.http_access(token, listener)
        administer = audited(broker.webapi, "broker", trail, token, broker_admin.is_protected)
        pages = broker_app(administer, names=names_of(listener.bind, listener.advertise), identify=identify)
        http = security.http_server("tube_broker_http", pages)
        parts.push_async_callback(http.close)
        await http.start("tube-broker-http", listener.bind)
        master = StandbyMaster(tube_limits(config.tube.limits))
        parts.push_async_callback(master.close)
        start = master.start if tls is None else certificates.beside(master.start, tls.master_port)
        try:
            await start(config.tube_master.bind.host, config.tube_master.bind.port)
        except OSError as error:
            raise bind_error(error, "tube-master", config.tube_master.bind) from error

    async def close(self) -> None:
        """Close the broker."""
        if self.broker is not None:
            await self.broker.close()

    def use_masters(self, masters: list[str]) -> None:
        """Let the broker register at another master, or at none; in any thread."""
        if masters != self._masters:
            self._masters = masters
            if self.broker is not None:
                self._loop.call_soon_threadsafe(self.broker.masters_changed)

    def _password(self) -> str:
        """Return the password of the brokers, which the first node puts into etcd; waits for etcd."""
        key = f"{self._prefix}broker-password".encode()
        put = pb.PutRequest(key=key, value=secrets.token_urlsafe(24).encode())
        found = pb.RequestOp(request_range=pb.RangeRequest(key=key))
        request = pb.TxnRequest(
            compare=[pb.Compare(target=pb.Compare.CREATE, key=key, create_revision=0)],
            success=[pb.RequestOp(request_put=put), found],
            failure=[found],
        )
        while not self._closing.is_set():
            try:
                answer = self._client.call("KV/Txn", request, pb.TxnResponse, within_s=1.0)
                return answer.responses[-1].response_range.kvs[0].value.decode()
            except (UnavailableError, RefusedError) as error:
                self._tell(f"etcd does not answer: {line_of(error)}")
                self._closing.wait(_RETRY_S)
        return ""
