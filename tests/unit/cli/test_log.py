"""`penstock log level` against a running node."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.node.node import Node
from tests.unit.node.test_node import config


async def test_levels_are_listed_and_changed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def run(*args: str) -> tuple[int, str, str]:
        status = await asyncio.to_thread(main, ["log", "level", *args, "--data-dir", str(tmp_path)])
        return status, *capfd.readouterr()

    node = Node(config(tmp_path))
    await node.start()
    try:
        capfd.readouterr()
        assert await run("mqtt.bridge", "error") == (0, "PART         LEVEL\nmqtt.bridge  error\n", "")
        assert logging.getLogger("penstock.mqtt.bridge").level == logging.ERROR
        status, out, _ = await run("--json")
        rows = [json.loads(line) for line in out.splitlines()]
        assert status == 0
        assert {"part": "mqtt.bridge", "level": "error"} in rows
        assert rows[0]["part"] == "all"
        for wrong, text in ((("nothing",), "there is no part"), (("mqtt", "loud"), "use one of debug, info")):
            status, _, err = await run(*wrong)
            assert status != 0
            assert text in err
    finally:
        logging.getLogger("penstock.mqtt.bridge").setLevel(logging.NOTSET)
        await node.close()
