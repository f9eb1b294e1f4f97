"""A snapshot of the active node for a member of its cluster that lacks commits which etcd has deleted.

It is the stream of a backup with the replicated environments only, and with their positions in the logs, from which the
member continues. Members trust each other through etcd: each active node puts a secret there, for the duration of its
term, and a member sends it as bearer token.

The member writes the stream to files, verifies it, and creates new environments from it. Its old ones are replaced when
the new ones are complete and on disk: see :mod:`penstock.node.replacement`. Until then an error changes nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import logging
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import PenstockError, RefusedError, RemoteProtocolError, StorageError, UnavailableError
from penstock.node.api_access import API, ApiFailure, number_of, respond_to, streamed
from penstock.node.backup import Backups, Positions, environment_kind, read_items
from penstock.node.backup_directory import BackupReceiver, Manifest, restore
from penstock.node.http import write_audit_entry
from penstock.node.replacement import SNAPSHOT, begin_replacement, complete_replacement, new_environments
from penstock.runtime.io.commit_log import LogPosition, decode_position
from penstock.runtime.io.files import DirectFiles, Durability
from penstock.runtime.io.network import ConnectionFailure, connection_failure, parse_address
from penstock.runtime.observability.audit import AuditTrail

__all__ = ["SnapshotLoader", "SnapshotSource", "snapshot_route"]

_log = logging.getLogger("penstock.cluster")

RATE: Final = 64 << 20
"""Bytes per second, so that the active node has processor time for its clients."""
_SILENCE_S: Final = 30.0
"""Maximum seconds without a byte from the active node, whose commits may take ten at the point of a backup."""
_STALL_S = 60.0
"""Maximum seconds without progress, for a member whose machine has disappeared: another one waits for the end. Not
Final: a test shortens it."""
_CONNECT_S: Final = 5.0
"""Time limit for the connection, for which the end of this node waits."""
_MOST_ERROR: Final = 64 << 10
_MOST_NAME: Final = 64


def snapshot_route(
    secret: str, trail: AuditTrail, positions: Positions, backups: Callable[[], Backups | None]
) -> Route:
    """The path of the snapshot, for members; ``backups`` returns None before the node is ready."""
    expected = f"Bearer {secret}".encode()

    async def respond(request: Request) -> Response:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), expected):
            raise ApiFailure(
                401, "unauthorized", "this request needs the secret of the term, which members of the cluster have"
            )
        if (node := backups()) is None:
            raise ApiFailure(503, "starting", "the active node has not started yet", "wait: the member tries it again")
        response = await streamed(node.snapshot(positions, number_of(request, "rate", 0) or None), _STALL_S)
        entry = {
            "server": "node",
            "method": "snapshot",
            "credential": "cluster",
            "address": request.client.host if request.client is not None else "",
            "user": request.query_params.get("node", "")[:_MOST_NAME],
            "parameters": {},
            "result": True,
        }
        await write_audit_entry(trail, entry)
        return response

    async def snapshot(request: Request) -> Response:
        return await respond_to(request, respond)

    return Route(f"{API}/cluster/snapshot", snapshot, methods=["POST"])


class SnapshotSource(NamedTuple):
    """The active ``node``: its HTTP address, its secret, and TLS of the connection; None: plain HTTP."""

    node: str
    address: str
    secret: str
    tls: ssl.SSLContext | None


class SnapshotLoader:
    """Loads a snapshot from ``source`` into the data directory ``path``, in a thread. Call :meth:`close` at the end.

    ``names``: the environments to replace, which are not open. ``member``: name of this node. ``check`` is called with
    the positions of the snapshot before the old environments are replaced, and raises PenstockError if they may not be.
    """

    def __init__(
        self,
        source: SnapshotSource,
        path: Path,
        names: Sequence[str],
        member: str,
        check: Callable[[Mapping[str, LogPosition]], None],
    ) -> None:
        self.failure: PenstockError | None = None
        """The reason why the snapshot was not loaded, after the end."""
        self._source = source
        self._path = path
        self._names = names
        self._member = member
        self._check = check
        self._received = self._written = 0
        self._size = 0
        """Bytes to verify and to write, when all were received."""
        self._closing = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="cluster snapshot", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True when the snapshot was loaded, or cannot be."""
        return not self._thread.is_alive()

    @property
    def progress(self) -> str:
        """The progress, as a phrase for people."""
        done = f"{self._received / (1 << 20):.1f} MiB received"
        if self._size:
            done += f", {100 * self._written // self._size} % verified and written"
        return f"loading a snapshot from the active node {self._source.node}: {done}"

    def close(self) -> None:
        """Stop, and wait for the end of the thread; environments that are being replaced are replaced first."""
        self._closing.set()
        if (connection := self._socket) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            try:
                # Removes what an earlier attempt has left.
                complete_replacement(self._path)
                self._load()
            finally:
                complete_replacement(self._path)
        except PenstockError as error:
            self.failure = error
        except OSError as error:
            self.failure = StorageError(
                f"{error.filename or self._path} cannot be written: {error.strerror or error}",
                path=str(error.filename or self._path),
                hint="check the disk of this node",
            )
        except Exception as bug:  # noqa: BLE001 - reported by the node, which continues
            _log.exception("a snapshot was not loaded")
            self.failure = StorageError(f"a defect of penstock: {bug!r}", hint="report it with the log of this node")

    def _load(self) -> None:
        received = self._path / SNAPSHOT / "received"
        with BackupReceiver(received) as receiver:
            positions = self._receive(receiver)
            manifest = receiver.finish().manifest
        missing = [name for name in self._names if name not in positions or name not in manifest.environments]
        if missing:
            raise RemoteProtocolError(
                f"the snapshot lacks {', '.join(missing)}", hint="give all nodes the same `cluster.tubemq`"
            )
        self._size = 2 * manifest.size
        self._write(manifest)
        shutil.rmtree(received)
        target = new_environments(self._path)
        for name in self._names:
            _set_position(target, name, positions[name])
            DirectFiles().sync_dir(target / name)
        self._check({name: positions[name] for name in self._names})
        if self._closing.is_set():
            raise UnavailableError("the node is closing", applied=False)
        begin_replacement(self._path, self._names)

    def _write(self, manifest: Manifest) -> None:
        def progress(size: int) -> None:
            if self._closing.is_set():
                raise UnavailableError("the node is closing", applied=False)
            self._written += size

        restore(manifest, new_environments(self._path), progress=progress)

    def _receive(self, receiver: BackupReceiver) -> dict[str, LogPosition]:
        """Write the stream to files; returns the positions of the environments."""
        source = self._source
        try:
            host, port = parse_address(source.address)
        except ValueError as error:
            raise UnavailableError(f"the address of the active node, {source.address!r}: {error}") from error
        # Not urllib, which would send the secret to a proxy set in the environment.
        connection = http.client.HTTPConnection(host, port, timeout=_CONNECT_S)
        if source.tls is not None:
            connection = http.client.HTTPSConnection(host, port, timeout=_CONNECT_S, context=source.tls)
        try:
            connection.connect()
            self._socket = connection.sock
            connection.sock.settimeout(_SILENCE_S)
            if self._closing.is_set():
                raise UnavailableError("the node is closing", applied=False)
            query = urlencode({"node": self._member, "rate": RATE})
            connection.request(
                "POST", f"{API}/cluster/snapshot?{query}", headers={"Authorization": f"Bearer {source.secret}"}
            )
            # A response without keep-alive owns the socket: closing the connection does not close it.
            with connection.getresponse() as response:
                return self._read(response, receiver)
        except (OSError, http.client.HTTPException) as error:
            failure = ConnectionFailure("the connection broke")
            if isinstance(error, OSError):
                failure = connection_failure(error, host, tls=source.tls is not None)
            raise UnavailableError(
                f"the active node at {source.address} cannot be read",
                why=failure.why,
                hint="set its authority: cluster.http_tls.ca" if isinstance(error, ssl.SSLError) else failure.hint,
            ) from error
        finally:
            self._socket = None
            connection.close()

    def _read(self, response: http.client.HTTPResponse, receiver: BackupReceiver) -> dict[str, LogPosition]:
        if response.status != http.client.OK:
            raise _refusal(response, self._source.address)
        end: Mapping[str, Any] = {}
        try:
            for item in read_items(response.read):
                receiver.take(item)
                self._received += len(item.payload)
                if "end" in item.header:
                    end = item.header["end"] if "crc" in item.header else {}
            positions = {str(name): decode_position(bytes.fromhex(text)) for name, text in end["positions"].items()}
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise RemoteProtocolError("the snapshot is damaged, or not complete", why=repr(error)) from error
        return {name: position for name, position in positions.items() if position is not None}


def _refusal(response: http.client.HTTPResponse, address: str) -> PenstockError:
    try:
        problem = json.loads(response.read(_MOST_ERROR))["error"]
        what, why, hint = str(problem["what"]), problem.get("why"), problem.get("hint")
    except (ValueError, TypeError, KeyError, AttributeError):
        what, why, hint = response.reason, "it may be of an earlier version", "upgrade the active node"
    return RefusedError(
        f"the active node at {address} refused it: {what}", code=response.status, peer=address, why=why, hint=hint
    )


def _set_position(directory: Path, name: str, position: LogPosition) -> None:
    """Store the position of an environment in the log of the cluster, durably."""
    kind = environment_kind(name)
    assert kind is not None, "restored before"
    environment = kind.environment_at(directory / name, Durability.DURABLE)
    environment.open(lambda _: None)
    try:
        environment.transact(
            lambda transaction: transaction.put(b"log", position.encode(), db=environment.tables["meta"]),
            "loading a snapshot",
            sync=True,
        )
    finally:
        environment.close()
