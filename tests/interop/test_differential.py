"""The same bytes to our broker and to Mosquitto's: the answers of the file, and no difference without its reason."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from penstock.mqtt.server import MqttServer
from tests.interop.differential import Case, answer, load
from tests.interop.mosquitto import Mosquitto
from tests.tools import require_tool, skip_or_fail

VERSION, CASES = load()


async def answers(host: str, port: int, expected: dict[str, str]) -> dict[str, str]:
    got = await asyncio.gather(*(answer(host, port, case, expected[case.name]) for case in CASES))
    return {case.name: text for case, text in zip(CASES, got, strict=True)}


async def test_our_answers() -> None:
    server = MqttServer()
    host, port = await server.start("127.0.0.1", 0)
    expected = {case.name: case.penstock for case in CASES}
    try:
        assert await answers(host, port, expected) == expected
    finally:
        await server.close()


@pytest.fixture
def recorded_version() -> None:
    """Skips where Mosquitto is another than the one whose answers were recorded."""
    told = subprocess.run([require_tool("mosquitto"), "-h"], capture_output=True, text=True, check=False).stdout
    if VERSION not in told.splitlines()[0]:
        skip_or_fail(f"the recorded answers are of Mosquitto {VERSION}, here is {told.splitlines()[0]!r}")


@pytest.mark.usefixtures("recorded_version")
async def test_mosquittos_answers(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path)
    await broker.start()
    expected = {case.name: case.mosquitto for case in CASES}
    try:
        assert await answers("127.0.0.1", broker.port, expected) == expected
    finally:
        await broker.stop()


def test_the_file_explains_itself() -> None:
    def problem(case: Case) -> bool:
        return (case.penstock != case.mosquitto) != bool(case.why)

    assert [case.name for case in CASES if problem(case)] == []
    assert len({case.name for case in CASES}) == len(CASES) >= 100
