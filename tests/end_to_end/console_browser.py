"""Chromium with a page of the console of a node.

A test fails on an error or warning in the browser's console (a violation of the Content Security Policy is one), on a
failed request and on a request to another host. With ``PENSTOCK_SCREENSHOTS=DIR`` the pages are saved there.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import cbor2
import pytest

from penstock.mqtt.client import MqttClient
from penstock.node.config.node import RuleSection
from penstock.node.node import Node, ReadyNode
from penstock.node.web import WebConsole
from penstock.runtime.io.network import parse_address
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.consumer import Consumer
from tests.tools import require_tool, skip_or_fail
from tests.unit.node.test_node import config, token_of

__all__ = ["LOOKS", "ONE_LOOK", "STATUS", "Browser", "browsing", "console_node", "filled"]


def _node(name: str, role: str, kind: str, reads: str = "", **more: Any) -> dict[str, Any]:
    key = f"sink:{name}" if role == "sink" else name
    return {"id": key, "name": name, "role": role, "kind": kind, "reads": reads.split(), "late": False,
            "dead_letters": False} | more  # fmt: skip


STATUS = {
    "graph": [
        _node("source", "source", "tubemq"),
        _node("parsed", "step", "parse", "source", dead_letters=True),
        _node("checked", "step", "expect", "parsed"),
        _node("levels", "step", "window", "checked", dead_letters=True),
        _node("bottles", "sink", "delta table", "checked"),
        _node("alarms", "sink", "statestore", "levels"),
        _node("late", "sink", "parquet table", "levels", late=True),
    ],
    "run": "run-7", "host": "line-3", "pid": 711, "since": "2026-11-26T10:00:00Z", "state": "running", "why": "",
    "spark_ui": "http://line-3:4040",
    "progress": {
        "sinks": {
            "bottles": {"batch": 41, "batches": 42, "read": 12_400, "out": 12_380, "dead": 20, "rows_per_s": 310.5,
                        "written_per_s": 124.2, "restarts": 1,
                        "batch_s": 0.41, "lag_records": 155, "lag_s": 0.9,
                        "expectations": {"checked.pressure": {"rows": 12_400, "violations": 3}}},
            "alarms": {"batch": 12, "batches": 13, "read": 12_400, "out": 37, "rows_per_s": 280.0, "lag_records": 2_300,
                       "lag_s": 8.2, "behind_s": 60.0, "state_rows": 48, "state_bytes": 24_576,
                       "state_disk_bytes": 4_096, "failing_s": 0.0,
                       "state_by_kind": {"window": {"rows": 48, "bytes": 24_576}}},
        }
    },
}  # fmt: skip
"""Status of a pipeline."""
LOOKS: dict[str, tuple[int, Literal["light", "dark"]]] = {
    "light": (1280, "light"),
    "dark": (1280, "dark"),
    "narrow": (400, "light"),
}
ONE_LOOK = ["light", *(pytest.param(look, marks=pytest.mark.nightly) for look in ("dark", "narrow"))]
"""Parameters of a test of actions; the other looks at night, since ``test_every_page_in_every_look`` has all pages."""


class Browser:
    """A page of the console of ``ready``, and what went wrong in it."""

    def __init__(self, page: Any, ready: ReadyNode) -> None:
        self.page = page
        self.ready = ready
        self.problems: list[str] = []
        self.allowed: tuple[str, ...] = ()
        page.on("console", self._told)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("request", self._requested)

    def _told(self, message: Any) -> None:
        if message.type in {"error", "warning"} and not any(text in message.text for text in self.allowed):
            self.problems.append(f"{message.type}: {message.text}")

    def _requested(self, request: Any) -> None:
        if not request.url.startswith((f"http://{self.ready.http}/", "data:")):
            self.problems.append(f"request to {request.url}")

    async def open(self, route: str = "") -> None:
        await self.page.goto(f"http://{self.ready.http}/{f'#/{route}' if route else ''}")

    async def sign_in(self) -> None:
        await self.page.get_by_label("Password or token").fill(token_of(Path(self.ready.data_dir)))
        await self.page.get_by_role("button", name="Sign in").click()

    async def look(self, name: str) -> None:
        """Check that nothing is wider than the window, and save a picture if that was requested."""
        wider = await self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0, f"{name} is {wider} pixels too wide"
        if folder := os.environ.get("PENSTOCK_SCREENSHOTS"):
            await self.page.screenshot(path=str(Path(folder) / f"{name.replace('%2F', '-').replace('/', '-')}.png"))


@asynccontextmanager
async def browsing(
    ready: ReadyNode, width: int = 1280, scheme: Literal["light", "dark"] = "light"
) -> AsyncIterator[Browser]:
    from playwright.async_api import async_playwright, expect

    expect.set_options(timeout=60_000)  # the default of 5 s is too short on a busy machine
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=require_tool("chromium"))
        context = await chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(60_000)  # of actions, as of `expect`; the default is 30 s
        found = Browser(await context.new_page(), ready)
        try:
            yield found
        finally:
            await context.close()
            await chromium.close()
        assert found.problems == []


async def console_node(tmp_path: Path, **more: Any) -> AsyncIterator[Node]:
    """A node with a rule, which is not started; for a fixture."""
    if not WebConsole().available:
        skip_or_fail("the libraries of the console are not fetched: python tools/console_libraries.py")
    pytest.importorskip("playwright")
    node = Node(config(tmp_path, rules=[RuleSection(filter="plant/#", topic="water")], **more))
    try:
        yield node
    finally:
        await node.close()


async def filled(node: Node) -> ReadyNode:
    """A node with a client that is away, keys, records, a group that has stopped, and pipelines."""
    ready = await node.start()
    host, port = parse_address(ready.mqtt)
    async with StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
        for number in range(120):
            await store.set(f"line/{number:03}", '{"value": 1}')
        await store.set("plant/a", '{"value": [1, 2]}')
        await store.set("penstock/pipeline/bottling/run", json.dumps(STATUS))
        await store.set("penstock/pipeline/bottling/lease", "run-7", ttl_ms=600_000)
        await store.set("penstock/pipeline/packing/run", json.dumps(STATUS | {"state": "failed", "why": "disk full"}))
        await store.set("penstock/pipeline/sorting/run", json.dumps(STATUS))  # without a lease
    async with MqttClient(host, port, client_id="meter/1", session_expiry_s=600) as client:
        await client.subscribe("plant/#")
    async with (
        Consumer(ready.tube_master, "lake", ["water"]) as consumer,
        MqttClient(host, port, client_id="gateway") as client,
    ):
        await client.publish("plant/a", b"1")
        async for _ in consumer:
            break
    async with MqttClient(host, port, client_id="gateway") as client:
        for _ in range(30):
            await client.publish("plant/a", b"1")
        await client.publish("plant/b", cbor2.dumps({"bar": 4.5, "valves": [1, 2]}), retain=True)
    return ready
