"""Our clients where the cluster has users, and over TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from penstock.errors import PenstockError
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.consumer import Consumer
from penstock.tube.engine.access import ClientAccess
from penstock.tube.engine.master.master import MasterConfig
from penstock.tube.master.master import TubeMaster
from penstock.tube.producer import Producer
from tests.unit.tube.servers import keys_of

USERS = {"edge": "secret"}


async def test_users_sign_once_and_continue_with_a_token(tmp_path: Path) -> None:
    # Tokens are good for a second: both are renewed several times.
    master = TubeMaster(tmp_path / "master", access=ClientAccess(keys_of(USERS), token_ms=1000), config=MasterConfig())
    _, port = await master.start("127.0.0.1", 0)
    masters = f"127.0.0.1:{port}"
    broker = TubeBroker(
        tmp_path / "broker", masters=[masters], heartbeat_s=0.05, access=ClientAccess(keys_of(USERS), token_ms=1000),
        master_user=("edge", "secret"),
    )  # fmt: skip
    await broker.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(60):
            assert broker.registered is not None
            await broker.registered.wait()
            await master.create_topic("demo", ready_s=60)
            wrong: list[dict[str, Any]] = [
                {}, {"username": "edge", "password": "wrong"}, {"username": "nobody", "password": "secret"}
            ]  # fmt: skip
            for who in wrong:
                with pytest.raises(PenstockError, match="authentication"):
                    await Producer(masters, **who).start()
                with pytest.raises(PenstockError, match="authentication"):
                    await Consumer(masters, "lake", ["demo"], **who).start()
            known: dict[str, Any] = {"username": "edge", "password": "secret"}
            async with (
                Producer(masters, heartbeat_s=0.1, **known) as producer,
                Consumer(masters, "lake", ["demo"], heartbeat_s=0.1, **known) as consumer,
            ):
                for number in range(30):
                    await producer.send("demo", b"%d" % number)
                    # A session that ended on a slow machine is given again what it has not confirmed.
                    while (await anext(consumer)).data != b"%d" % number:
                        pass
                    await asyncio.sleep(0.1)
    finally:
        await broker.close()
        await master.close()


async def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    master = TubeMaster(tmp_path / "master")
    await master.start("127.0.0.1", 0, tls=server, tls_port=0)
    assert master.tls_bound is not None
    try:
        async with Producer(f"127.0.0.1:{master.tls_bound[1]}", tls=client) as producer:
            assert producer.topics == frozenset()
        with pytest.raises(PenstockError, match="no connection"):
            await Producer(f"127.0.0.1:{master.tls_bound[1]}", tls=ssl.create_default_context()).start()
    finally:
        await master.close()
