"""`penstock reload` against a running node."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.mqtt.client import MqttClient
from penstock.node.config.node import NodeConfig
from penstock.node.node import Node
from penstock.runtime.io.network import parse_address
from penstock.runtime.observability.audit import read_audit
from penstock.security.passwords import edit_passwords
from tests.unit.node.test_node import config
from tests.unit.node.test_security import put_user


async def test_a_reload_returns_with_its_result(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, passwords = tmp_path / "data", tmp_path / "passwords"
    for user in ("ann", "bob"):
        put_user(passwords, user, b"pw")
    start = config(data, security={"passwords": passwords})
    wanted = start

    async def run(*args: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = await asyncio.to_thread(main, ["reload", *args, "--data-dir", str(data)])
        out, err = capfd.readouterr()
        return status, out, "".join(line for line in err.splitlines(keepends=True) if not line[:4].isdigit())

    node = Node(start, on_reload=lambda: node.reload(lambda: wanted))
    ready = await node.start()
    try:
        address = parse_address(ready.mqtt)
        async with MqttClient(*address, client_id="press", username="bob", password=b"pw") as client:
            assert await run() == (0, "", "reloaded\n")
            edit_passwords(passwords, lambda users: {"ann": users["ann"]})
            assert await run() == (0, "", "reloaded, 1 client disconnected\n")
            while client.connected:
                await asyncio.sleep(0.01)

        wanted = NodeConfig.model_validate(start.model_dump() | {"log_level": "error"})
        status, out, _ = await run("--json")
        warning = "log_level was changed after the start: the previous setting applies; hint: restart the node"
        assert (status, json.loads(out)) == (0, {"disconnected": 0, "warnings": [warning]})
        assert await run() == (0, "", f"reloaded\nwarning: {warning}\n")

        passwords.write_text("ann\n")
        status, out, err = await run()
        assert (status, out) == (1, "")
        assert f"nothing changed: {passwords}" in err
        assert node.security.failure is not None
    finally:
        await node.close()
    rows = list(read_audit(data / "audit"))
    assert [(row["method"], row["result"]) for row in rows] == [("reload", True)] * 4 + [("reload", False)]
    assert str(passwords) in rows[-1]["failed"][0]
