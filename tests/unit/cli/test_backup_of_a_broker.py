"""`penstock backup` of a running broker in its own process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.node.tube_broker import BrokerSettings, ReadyBroker, serve_broker
from penstock.runtime.io.network import Address
from penstock.runtime.observability.audit import read_audit
from penstock.security.passwords import edit_passwords, make_credential
from penstock.tube.master.master import TubeMaster
from penstock.tube.producer import Producer
from penstock.tube.reader import RangeReader
from tests.unit.cli.conftest import Command, Done

ANY = Address("127.0.0.1", 0)
DEADLINE_S = 120
BOTH = [b"one", b"two"]
RIGHTS = "rules: [{principals: {usernames: [ann]}, tubeResources: [{method: Produce, topics: [demo]}%s]}]\n"


@asynccontextmanager
async def running(settings: BrokerSettings) -> AsyncIterator[ReadyBroker]:
    ready: asyncio.Future[ReadyBroker] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve_broker(settings, ready.set_result))
    try:
        async with asyncio.timeout(DEADLINE_S):
            first: set[asyncio.Future[Any]] = {task, ready}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            yield await ready
            os.kill(os.getpid(), signal.SIGTERM)
            await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def records(address: str) -> list[bytes]:
    host, _, port = address.partition(":")
    with RangeReader(host, int(port)) as reader:
        return [bytes(each) for batch in reader.read("demo", 0, *reader.bounds("demo", 0)) for each in batch.payloads]


async def test_a_broker_is_backed_up_while_it_runs_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, penstock: Command
) -> None:
    """By an administrator only; found by its data directory; the second backup has the new records; also encrypted."""
    monkeypatch.chdir(tmp_path)
    passwords, policies = tmp_path / "passwords", tmp_path / "policies.yaml"
    (tmp_path / "pw").write_text("pw")
    policies.write_text(RIGHTS % "")
    edit_passwords(passwords, lambda _: {"ann": make_credential("ann", b"pw")})
    (tmp_path / "key.pub").write_text(penstock("keygen", "key").out)
    master = TubeMaster(tmp_path / "master")
    _, port = await master.start("127.0.0.1", 0)
    secured = BrokerSettings(
        7, [Address("127.0.0.1", port)], Path("seven"), ANY, ANY,
        passwords=passwords, policies=policies,
    )  # fmt: skip

    async def command(*words: str) -> Done:
        return await asyncio.to_thread(penstock, *words)

    async def backed_up(*words: str) -> dict[str, object]:
        done = await command("backup", *words, "--json")
        assert done.status == 0, done.err
        row: dict[str, object] = json.loads(done.out)
        return row

    try:
        async with running(secured) as ready, Producer(f"127.0.0.1:{port}", username="ann", password="pw") as producer:
            as_ann = ("--http", ready.tube_broker_http, "--username", "ann", "--password-file", "pw")
            await master.create_topic("demo", partitions=1, ready_s=30)
            await producer.send("demo", b"one")
            refused = await command("backup", "backups", *as_ann)
            assert refused.status == 1
            assert "user 'ann' is not an administrator" in refused.err
            refused = await command("backup", "backups", "--http", ready.tube_broker_http, "--data-dir", "other")
            assert "this request needs credentials" in refused.err
            policies.write_text(RIGHTS % ", {method: Administer}")
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
            older = await backed_up("backups", *as_ann)
            await producer.send("demo", b"two")
            newer = await backed_up("backups", "--data-dir", "seven")
            encrypted = await backed_up("encrypted", "--data-dir", "seven", "--recipients-file", "key.pub")
        assert [bool(row["recipients"]) for row in (older, newer, encrypted)] == [False, False, True]
        audit = [row for row in read_audit(tmp_path / "seven" / "audit") if row["method"] == "backup"]
        assert [(row["server"], row["user"]) for row in audit] == [("broker", "ann"), ("broker", ""), ("broker", "")]
        for number, (backup, found) in enumerate(((older, [b"one"]), (newer, BOTH), (encrypted, BOTH))):
            done = await command("restore", str(backup["backup"]), f"restored-{number}", "--identity-file", "key")
            assert done.status == 0, done.err
            open_to_all = replace(secured, data_dir=tmp_path / f"restored-{number}", passwords=None, policies=None)
            async with running(open_to_all) as ready:
                assert await asyncio.to_thread(records, ready.tube_broker) == found
    finally:
        await master.close()
