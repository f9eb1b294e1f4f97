"""Clusters as an earlier version left them: how they are written, and what clients must find in them.

``python -m tests.interop.stored_cluster NAME [CHECKOUT]`` runs a node (of another checkout) with one member of etcd,
kills it directly after the last acknowledgement, and writes ``tests/vectors/clusters/NAME.tar.xz``: the data directory
``one``, the keys of etcd in ``etcd.json`` (base64, without those that have a lease) and ``content.json`` with what
clients were told. Write an archive before a change of a stored format; archives that exist are never written again.
"""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from penstock.cluster.client import EtcdClient
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.mqtt.client.client import MqttClient
from penstock.mqtt.codec.packets import Subscribe, Subscription
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.client import web
from penstock.tube.producer import Producer
from tests.interop.cluster_nodes import NodeProcess
from tests.interop.etcd import EtcdCluster
from tests.stored_directories import MqttConnection

__all__ = ["ARCHIVES", "CLIENT", "CLUSTER", "LARGE", "TOPIC", "extract"]

ARCHIVES = Path(__file__).resolve().parents[1] / "vectors" / "clusters"
CLUSTER = "stored"
PREFIX = f"/penstock/{CLUSTER}/"
CLIENT = "stored-client"
TOPIC = "events"
LARGE = b"large " * 100_000
"""A value whose commit has several parts in etcd."""
_MAIN = "import sys; from penstock.cli.main import main; sys.exit(main())"
_LEASED = ("leader", "node/", "member/")
"""Keys with a lease, which ends with its node."""


def extract(name: str, target: Path, etcd: EtcdCluster) -> dict[str, Any]:
    """Extract the data directory below ``target`` and put the keys into ``etcd``; returns what clients were told."""
    with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
        archive.extractall(target, filter="data")
    client = EtcdClient(etcd.endpoints)
    for key, value in json.loads((target / "etcd.json").read_text("utf-8")).items():
        put = pb.PutRequest(key=key.encode(), value=base64.b64decode(value))
        client.call("KV/Txn", pb.TxnRequest(success=[pb.RequestOp(request_put=put)]), pb.TxnResponse)
    client.close()
    content: dict[str, Any] = json.loads((target / "content.json").read_text("utf-8"))
    return content


def _keys(etcd: EtcdCluster) -> dict[str, str]:
    client = EtcdClient(etcd.endpoints)
    found: dict[str, str] = {}
    first, end = PREFIX.encode(), PREFIX[:-1].encode() + b"0"
    while True:
        answer = client.call("KV/Range", pb.RangeRequest(key=first, range_end=end, limit=16), pb.RangeResponse)
        for entry in answer.kvs:
            key = entry.key.decode()
            if not key.removeprefix(PREFIX).startswith(_LEASED):
                found[key] = base64.b64encode(entry.value).decode()
        if len(answer.kvs) < 16:
            client.close()
            return found
        first = answer.kvs[-1].key + b"\0"


async def _fill(node: NodeProcess) -> dict[str, Any]:
    """Give every replicated part something to keep."""
    login = web.WebLogin("administer")
    add = {"topicName": TOPIC, "numPartitions": "2", "createUser": "test"}
    await asyncio.to_thread(web.call, f"127.0.0.1:{node.http}", "admin_add_new_topic_record", add, login=login)
    async with Producer(f"127.0.0.1:{node.tube_master}") as producer:
        await producer.send(TOPIC, b"record")
    versions = {}
    async with StateStoreClient.connect(node.url) as store:
        for key, value in (("changed", b"first"), ("changed", b"second"), ("deleted", b"1"), ("large", LARGE)):
            versions[key] = str((await store.set(key, value)).version)
        await store.delete("deleted")
    await asyncio.to_thread(_subscribe, node)
    async with MqttClient(node.url) as client:
        await client.publish("plant/limit", b"retained", qos=1, retain=True)
        await client.publish("plant/1", b"queued", qos=2)
    return {"versions": versions}


def _subscribe(node: NodeProcess) -> None:
    with MqttConnection(f"127.0.0.1:{node.mqtt}", CLIENT) as connection:
        connection.send(Subscribe(1, [Subscription("plant/+", 1)]))
        connection.next()


async def _write(name: str, checkout: Path | None) -> None:
    target = ARCHIVES / f"{name}.tar.xz"
    assert not target.exists(), f"{target} exists"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "etcd").mkdir()
        etcd = EtcdCluster(folder / "etcd", 1)
        etcd.start()
        node = NodeProcess(folder, "one", CLUSTER, etcd, 1)
        if checkout is not None:
            node.program = ["env", f"PYTHONPATH={checkout / 'src'}", sys.executable, "-c", _MAIN]
        try:
            node.start()
            await node.until_active()
            content = await _fill(node)
            node.signal(signal.SIGKILL)
            node.wait()
            (folder / "content.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
            (folder / "etcd.json").write_text(json.dumps(_keys(etcd), indent=1), encoding="utf-8")
        finally:
            node.end()
            etcd.close()
        target.parent.mkdir(exist_ok=True)
        with tarfile.open(target, "w:xz") as archive:
            for part in ("content.json", "etcd.json", "one"):
                archive.add(folder / part, part, filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    asyncio.run(_write(sys.argv[1], Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None))
