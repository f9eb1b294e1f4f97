"""A snapshot of the active node for a member: who gets it, what replaces the data of the member, and what does not."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import lmdb
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from penstock.errors import OutOfSpaceError, PenstockError, RefusedError, StorageError, UnavailableError
from penstock.node.backup import (
    Backups,
    BackupSource,
    Item,
    backup_items,
    checksum_of,
    encode_item,
    environment_kind,
    open_environment,
)
from penstock.node.cluster import snapshot
from penstock.node.cluster.snapshot import SnapshotLoader, SnapshotSource, snapshot_route
from penstock.node.config.client_tls import ClientTls
from penstock.node.config.cluster import ClusterSection
from penstock.node.http import HttpServer
from penstock.node.replacement import SNAPSHOT
from penstock.runtime.io.commit_log import LogPosition, decode_position
from penstock.runtime.io.files import Durability
from penstock.runtime.io.network import Address
from penstock.runtime.io.wal_frames import PUT
from penstock.runtime.observability.audit import AuditTrail, read_audit
from tests.certificates import Authority
from tests.http_server import Handler, HttpThread
from tests.ports import free_port

NAMES = ("statestore", "mqtt")
SECRET = "of this term"
POSITIONS = {name: LogPosition(b"identity", 0, 100 + number) for number, name in enumerate(NAMES)}
KEY, LATER = b"key", b"later"
Edit = Callable[[list[Item]], list[Item]]


def fill(path: Path, value: bytes) -> Path:
    """Environments with a row each, and the records of a broker."""
    for name in NAMES:
        environment = open_environment(path, name)
        environment.commit([(PUT, 1, KEY, value)], "filling")
        environment.close()
    (path / "tube" / "broker-1").mkdir(parents=True)
    (path / "tube" / "broker-1" / "records").write_bytes(value)
    (path / "tube" / "admin-token").write_bytes(value)
    return path


def look(tables: Mapping[str, Any], first: str, transaction: lmdb.Transaction[bytes]) -> list[bytes | None]:
    places = ((KEY, first), (LATER, first), (b"log", "meta"))
    return [transaction.get(key, db=tables[table]) for key, table in places]


def rows(path: Path) -> list[tuple[bytes | None, bytes | None, LogPosition | None]]:
    """The rows of each environment, and its position."""
    found = []
    for name in NAMES:
        kind = environment_kind(name)
        assert kind is not None
        environment = kind.environment_at(path / name, Durability.DURABLE)

        key, later, position = environment.open(partial(look, environment.tables, kind.tables[1]))
        environment.close()
        found.append((key, later, None if position is None else decode_position(position)))
    return found


@contextmanager
def source_of(path: Path) -> Iterator[BackupSource]:
    environments = {name: open_environment(path, name) for name in NAMES}
    try:
        yield BackupSource(path, environments, {}, [])
    finally:
        for environment in environments.values():
            environment.close()


async def items_of(source: BackupSource) -> list[Item]:
    """The snapshot, with a commit while its rows are read."""
    found = []
    async with aclosing(backup_items(source, {}, None, lambda: POSITIONS)) as items:
        async for item in items:
            found.append(item)
            if len(found) == 1:
                for environment in source.environments.values():
                    environment.commit([(PUT, 1, LATER, b"new")], "meanwhile")
    return found


def stream(tmp_path: Path) -> list[Item]:
    with source_of(fill(tmp_path / "active", b"new")) as source:
        return asyncio.run(items_of(source))


@contextmanager
def served(
    body: bytes, status: int = 200, *, tls: tuple[Path, Path] | None = None, then: Callable[[], object] = lambda: None
) -> Iterator[str]:
    """The address of a server that has ``body`` for every request, with ``tls`` of a certificate and its key. ``then``
    is called before it ends the response."""

    class _Handler(Handler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)
            then()

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with HttpThread(server) as thread:
        yield thread.address


def load(
    path: Path,
    address: str,
    check: Callable[[Mapping[str, LogPosition]], None] = lambda _: None,
    *,
    secret: str = SECRET,
    tls: ssl.SSLContext | None = None,
) -> PenstockError | None:
    """Load a snapshot to the end; returns the error."""
    loader = SnapshotLoader(SnapshotSource("one", address, secret, tls), path, NAMES, "two", check)
    loader.start()
    loader._thread.join(60)
    assert loader.ended
    assert not (path / SNAPSHOT).exists()
    assert "loading a snapshot from the active node one: " in loader.progress
    loader.close()
    return loader.failure


def is_old(path: Path) -> bool:
    return [row[:2] for row in rows(path)] == [(b"old", None)] * 2


def test_a_snapshot_replaces_the_environments_and_nothing_else(tmp_path: Path) -> None:
    items = stream(tmp_path)
    assert all(str(item.header.get("file", NAMES[0])).startswith(NAMES) for item in items), "no tokens, no records"
    member = fill(tmp_path / "member", b"old")
    checked: list[Mapping[str, LogPosition]] = []
    with served(b"".join(map(encode_item, items))) as address:
        assert load(member, address, checked.append) is None
    assert checked == [POSITIONS]
    assert rows(member) == [(b"new", b"new", POSITIONS[name]) for name in NAMES]
    assert (member / "tube" / "broker-1" / "records").read_bytes() == b"old"
    assert (member / "tube" / "admin-token").read_bytes() == b"old"


def test_a_truncated_or_changed_stream_replaces_nothing(tmp_path: Path) -> None:
    whole = b"".join(map(encode_item, stream(tmp_path)))
    member = fill(tmp_path / "member", b"old")
    for end in (0, 7, len(whole) // 2, len(whole) - 1):
        with served(whole[:end]) as address:
            assert isinstance(load(member, address), PenstockError), end
    end = whole.index(b'{"end"')
    for at in (*range(8, end, end // 6), whole.index(b"crc") + 1, end - 9, whole.index(b"positions") + 40):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        with served(bytes(damaged)) as address:
            assert isinstance(load(member, address), PenstockError), at
    assert is_old(member)


def edited(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(items: list[Item]) -> list[Item]:
        end = dict(items[-1].header["end"])
        change(end)
        return [*items[:-1], Item({"end": end, "crc": checksum_of(end)})]

    return edit


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (edited(lambda end: end.pop("positions")), "damaged, or not complete"),
        (edited(lambda end: end.update(positions={})), "lacks statestore, mqtt"),
        (edited(lambda end: end.update(positions={"mqtt": "00", "statestore": "x"})), "damaged, or not complete"),
        (edited(lambda end: end["environments"].pop("mqtt")), "lacks mqtt"),
        (edited(lambda end: end["environments"]["mqtt"].update(schema=99)), "schema 99"),
        (edited(lambda end: end["files"].update({"mqtt/rows": [1, 0, 0]})), "of 1 bytes"),
        (lambda items: [*items[:-1], Item({**items[-1].header, "crc": 0})], "damaged at its end"),
        (lambda items: [*items[:-1], Item({"end": items[-1].header["end"]})], "damaged, or not complete"),
        (lambda items: [*items[:-1], Item({"error": {"what": "commits wait"}})], "commits wait"),
        (lambda items: [Item({"file": "../../tube/admin-token", "at": 0, "crc": 0}), *items], "invalid name"),
    ],
)
def test_an_incomplete_snapshot_replaces_nothing(tmp_path: Path, edit: Edit, reason: str) -> None:
    items = edit(stream(tmp_path))
    member = fill(tmp_path / "member", b"old")
    with served(b"".join(map(encode_item, items))) as address:
        failure = load(member, address)
    assert reason in str(failure)
    assert is_old(member)
    assert (member / "tube" / "admin-token").read_bytes() == b"old"


def test_a_refused_check_no_server_and_no_space_replace_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = b"".join(map(encode_item, stream(tmp_path)))
    member = fill(tmp_path / "member", b"old")

    def refuse(_: object) -> None:
        raise StorageError("another log")

    failure = load(member, f"127.0.0.1:{free_port()}")
    assert isinstance(failure, UnavailableError)
    assert "cannot be read" in failure.what
    assert isinstance(load(member, "nowhere"), UnavailableError)
    with served(body) as address:
        assert str(load(member, address, refuse)) == "another log"
    with served(b"<html>", 404) as address:
        assert "upgrade the active node" in str(load(member, address))
    with served(body) as address, monkeypatch.context() as patched:

        def full(*_: object, **__: object) -> None:
            raise OutOfSpaceError("no space")

        patched.setattr(snapshot, "restore", full)
        assert str(load(member, address)) == "no space"

        def broken(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied", "/data")

        patched.setattr(snapshot, "begin_replacement", broken)
        patched.undo()
        patched.setattr(snapshot, "begin_replacement", broken)
        assert "/data cannot be written" in str(load(member, address))
        patched.setattr(snapshot, "begin_replacement", lambda *_: 1 // 0)
        assert "defect of penstock" in str(load(member, address))
    assert is_old(member)
    assert SECRET not in caplog.text


def test_certificates_are_verified(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "pki"), Authority(tmp_path / "other")
    body = b"".join(map(encode_item, stream(tmp_path)))
    member = fill(tmp_path / "member", b"old")
    requests: list[None] = []
    with served(body, tls=authority.issue("one", "127.0.0.1"), then=lambda: requests.append(None)) as address:
        section = ClusterSection(name="c", node="n", etcd=["127.0.0.1:1"], http_tls=ClientTls(ca=other.file))
        failure = load(member, address, tls=section.http_tls.options.context())
        assert isinstance(failure, UnavailableError)
        assert "cluster.http_tls.ca" in str(failure)
        assert load(member, address.replace("127.0.0.1", "localhost"), tls=authority.client_context()) is not None
        assert not requests, "the secret was not sent"
        assert is_old(member)
        assert load(member, address, tls=authority.client_context()) is None
    assert [key for key, _, _ in rows(member)] == [b"new", b"new"]


def test_closing_ends_a_load_that_waits_for_the_active_node(tmp_path: Path) -> None:
    whole = b"".join(map(encode_item, stream(tmp_path)))
    member = fill(tmp_path / "member", b"old")
    waits, ends = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        assert ends.wait(60)

    with served(whole[:-1], then=wait) as address:
        loader = SnapshotLoader(SnapshotSource("one", address, SECRET, None), member, NAMES, "two", lambda _: None)
        loader.start()
        assert waits.wait(60)
        loader.close()
        ends.set()
    assert loader.failure is not None
    assert is_old(member)


def test_closing_ends_a_load(tmp_path: Path) -> None:
    member = fill(tmp_path / "member", b"old")
    reached, go_on = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        reached.set()
        assert go_on.wait(60)

    with served(b"".join(map(encode_item, stream(tmp_path)))) as address:
        loader = SnapshotLoader(SnapshotSource("one", address, SECRET, None), member, NAMES, "two", wait)
        loader.start()
        assert reached.wait(60)
        loader._closing.set()
        go_on.set()
        loader.close()
    assert "the node is closing" in str(loader.failure)
    assert is_old(member)


async def test_a_member_that_reads_nothing_does_not_keep_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_STALL_S", 0.5)
    active = fill(tmp_path / "active", b"new")
    with source_of(active) as source:
        for number in range(200):  # more than the buffers of a connection
            source.environments["mqtt"].commit([(PUT, 1, b"%d" % number, bytes(64 << 10))], "filling")
        backups = Backups(source, list)
        route = snapshot_route(SECRET, AuditTrail(tmp_path / "audit"), lambda: POSITIONS, lambda: backups)
        server = HttpServer(Starlette(routes=[route]))
        try:
            address = await server.start("http", Address("127.0.0.1", 0))
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=1 << 10)
            head = (
                f"POST /api/v1/cluster/snapshot HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {SECRET}\r\n\r\n"
            )
            writer.write(head.encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert not backups._ended.is_set()
            async with asyncio.timeout(60):
                await backups._ended.wait()
            writer.close()
        finally:
            await server.close()


async def test_a_member_needs_the_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    member = fill(tmp_path / "member", b"old")
    trail = AuditTrail(tmp_path / "audit")
    with source_of(fill(tmp_path / "active", b"new")) as source:
        backups: list[Backups | None] = [None]
        route: Route = snapshot_route(SECRET, trail, lambda: POSITIONS, lambda: backups[0])
        server = HttpServer(Starlette(routes=[route]))
        try:
            address = str(await server.start("http", Address("127.0.0.1", 0)))
            for secret in ("", "another", "ä"):
                failure = await asyncio.to_thread(load, member, address, secret=secret)
                assert isinstance(failure, RefusedError)
                assert failure.code == 401
            failure = await asyncio.to_thread(load, member, address)
            assert isinstance(failure, RefusedError)
            assert failure.code == 503
            backups[0] = Backups(source, lambda: ["a part has failed"])
            failure = await asyncio.to_thread(load, member, address)
            assert isinstance(failure, RefusedError)
            assert failure.code == 409
            assert is_old(member)
            assert not list(read_audit(trail.directory))
            backups[0] = Backups(source, list)
            assert await asyncio.to_thread(load, member, address) is None
        finally:
            await server.close()
    assert [key for key, _, _ in rows(member)] == [b"new", b"new"]
    (entry,) = read_audit(trail.directory)
    assert (entry["method"], entry["user"], entry["credential"]) == ("snapshot", "two", "cluster")
    assert SECRET not in caplog.text
