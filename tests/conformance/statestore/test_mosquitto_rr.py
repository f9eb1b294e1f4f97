"""The document's own examples, sent by a client that is not ours: mosquitto_rr."""

from __future__ import annotations

import asyncio
import time

from penstock.statestore.binding import INVOKE
from tests.conformance.statestore.node import StoreNode
from tests.tools import require_tool


async def request(node: StoreNode, payload: str, *user: str) -> tuple[str, str]:
    """User properties and payload of the answer. The payload goes by -m: version 2.0 sends nothing for -f."""
    properties = [word for name in user for word in ("-D", "publish", "user-property", *name.split("=", 1))]
    process = await asyncio.create_subprocess_exec(
        require_tool("mosquitto_rr"),
        *("-h", "127.0.0.1", "-p", str(node.port), "-V", "5", "-q", "1", "-i", "rr1", "-W", "10", "-t", INVOKE),
        *("-e", "clients/rr1/services/statestore/_any_/command/invoke/response"),
        *("-D", "publish", "correlation-data", "abc", *properties, "-F", "%D|%P|%p", "-N", "-m", payload),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    assert process.returncode == 0
    correlation, found, answer = output.decode().split("|", 2)
    assert correlation == "abc"
    return found, answer


async def test_the_examples_of_the_document(node: StoreNode) -> None:
    now = time.time_ns() // 1_000_000
    version, answer = await request(
        node, "*3\r\n$3\r\nset\r\n$7\r\nSETKEY2\r\n$6\r\nVALUE5\r\n", f"__ts={now}:0:CLIENT"
    )
    assert answer == "+OK\r\n"
    assert version.startswith("__ts:")
    assert version.endswith(":StateStore")
    assert await request(node, "*2\r\n$3\r\nget\r\n$7\r\nSETKEY2\r\n") == (version, "$6\r\nVALUE5\r\n")
    assert (await request(node, "*3\r\n$4\r\nvdel\r\n$7\r\nSETKEY2\r\n$3\r\nABC\r\n"))[1] == "-1\r\n"
    assert await request(node, "*2\r\n$3\r\ndel\r\n$7\r\nSETKEY2\r\n") == (version, ":1\r\n")
    assert await request(node, "*2\r\n$3\r\nget\r\n$7\r\nSETKEY2\r\n") == ("", "$-1\r\n")
    assert (await request(node, "get SETKEY2\r\n"))[1] == "-ERR syntax error\r\n"


async def test_the_sdk_form(node: StoreNode) -> None:
    found, answer = await request(node, "*2\r\n$3\r\nGET\r\n$1\r\nk\r\n", "__protVer=1.0")
    assert (found, answer) == ("__stat:200 __protVer:1.0", "$-1\r\n")
    found, answer = await request(node, "*2\r\n$3\r\nGET\r\n$1\r\nk\r\n", "__protVer=2.0")
    assert "__stat:505" in found
    assert answer == ""
