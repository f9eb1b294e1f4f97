"""Every command, program and file of the documentation, run in the order in which a reader meets them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.docs.pages import ROOT, Block, blocks, commands, matches, page_paths
from tests.ports import free_ports
from tests.tools import require_tool

SYSTEM = ("operations", "pipelines", "spark")
"""Folders of pages that test_system_pages.py follows: half of the time, so that two jobs follow all pages."""
READY_SECONDS = 60
NIGHTLY = "<!-- test: nightly -->\n"
WELL_KNOWN = ("8883", "18883", "8083", "8084", "1884", "1885", "8086", "8087", "2379", "2380", "2381", "2382", "4318")
"""Ports that pages name where there is no setting with a variable: MQTT over TLS and over WebSocket, a second node,
etcd, OTLP."""


def reader_environment() -> dict[str, str]:
    """The reader's shell, with the default ports moved to free ones so that pages can use no port at all."""
    mqtt, master, broker, broker_http, http = (f"127.0.0.1:{port}" for port in free_ports(5))
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PENSTOCK_MQTT": mqtt,
        "PENSTOCK_TUBE_MASTER": master,
        "PENSTOCK_TUBE_BROKER": broker,
        "PENSTOCK_TUBE_BROKER_HTTP": broker_http,
        "PENSTOCK_HTTP": http,
        "PENSTOCK_BROKER": f"mqtt://{mqtt}",
        "NO_COLOR": "1",
        "COLUMNS": "120",
    }


@contextmanager
def background(command: str, folder: Path, environment: dict[str, str], *, killed: bool = False) -> Iterator[None]:
    """Run a server during the rest of the page. ``killed``: a command of the page kills it."""
    etcd = command.startswith("etcd ")
    if etcd:
        require_tool("etcd")
    if "faketime" in command:
        require_tool("faketime")
    with tempfile.NamedTemporaryFile("wb", prefix=".background-", suffix=".log", dir=folder, delete=False) as out:
        log = Path(out.name)
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + READY_SECONDS
        while b"ready" not in log.read_bytes():
            assert process.poll() is None, f"{command}: ended\n{log.read_text()}"
            assert time.monotonic() < deadline, f"{command}: not ready\n{log.read_text()}"
            time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(30)
        # etcd ends by the signal, and so does a node that has just handed over and starts its process again.
        by_signal = etcd or "restarts as a standby" in log.read_text()
        ended = status == -signal.SIGKILL if killed else status == 0
        assert ended or (by_signal and status == -signal.SIGTERM), f"status {status}\n{log.read_text()}"


def moved(block: Block, ports: dict[str, str]) -> Block:
    """The block with the well-known ports that it names moved to free ones."""
    text = block.text
    for known, free in ports.items():
        text = re.sub(rf"(?<=:){known}\b|(?<=, ){known}\b", free, text)
    return replace(block, text=text)


def run_block(block: Block, where: str, folder: Path, environment: dict[str, str]) -> None:
    expected = int(block.directive.removeprefix("fails ")) if block.directive.startswith("fails ") else 0
    if block.language == "python":
        program = [sys.executable, "-W", "error", "-c", block.text]
        programs: list[tuple[list[str], str, tuple[str, ...]]] = [(program, "program", ())]
    else:
        programs = [(["bash", "-c", c.text], c.text, c.output) for c in commands(block)]
    for argv, text, shown in programs:
        done = subprocess.run(
            argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == expected, f"{where}: {text}\nexit {done.returncode}\n{done.stdout}{done.stderr}"
        printed = done.stdout + (done.stderr if expected else "")
        assert matches(shown, printed), f"{where}: {text}\nshown:\n" + "\n".join(shown) + f"\nprinted:\n{printed}"


def check_covered(block: Block, where: str) -> None:
    path = ROOT / block.directive.removeprefix("covered by ")
    assert path.exists(), f"{where}: {path} does not exist"
    # A command is known by its second word, a piece of a program by the format that it names.
    word = (
        commands(block)[0].text.split()[1]
        if block.language == "console"
        else re.findall(r'format\(".+?"\)', block.text)[0]
    )
    assert word in path.read_text(encoding="utf-8"), f"{where}: {path} does not run it"


def test_nothing_says_that_penstock_is_on_pypi() -> None:
    """An installation names a clone (``./penstock``) until a version is published; with an extra, the penstock that is
    installed."""
    texts = [*page_paths(), *(ROOT / "src").rglob("*.py"), *ROOT.glob("*.md"), ROOT / "Makefile"]
    from_pypi = re.compile(r"pip3? install (?:-\S+ )*[\"']?penstock\b(?!\[)")
    assert not [text for text in texts if from_pypi.search(text.read_text(encoding="utf-8"))]


def test_the_index_has_every_decision_with_status_and_reason() -> None:
    folder = ROOT / "docs" / "decisions"
    records = {
        path.name: path.read_text(encoding="utf-8").removeprefix("# ").partition(".")[0]
        for path in sorted(folder.glob("0*.md"))
    }
    index = (folder / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\) \| (\S.*?) \| (\S.*?) \|$", index, re.MULTILINE)
    assert {name: title.partition(".")[0] for title, name, _, _ in rows} == records
    assert len(rows) == len(records) >= 30


def pages(*, system: bool) -> list[ParameterSet]:
    """The pages in the folders of ``SYSTEM``, or all others; one that says so at its top is followed every night only,
    as it starts Spark or several nodes."""
    return [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=[pytest.mark.nightly] if NIGHTLY in page.read_text(encoding="utf-8") else [],
        )
        for page in page_paths()
        if (page.parent.name in SYSTEM) == system
    ]


def follow(page: Path, folder: Path) -> None:
    """Run what a page says, in ``folder``."""
    environment = reader_environment() | {"XDG_CONFIG_HOME": str(folder / "config")}
    with ExitStack() as servers:
        ports = dict(zip(WELL_KNOWN, map(str, free_ports(len(WELL_KNOWN))), strict=True))
        for original in blocks(page):
            block = moved(original, ports)
            where = f"{page.relative_to(ROOT)}:{block.line}"
            if block.directive.startswith("file "):
                target = folder / block.directive.removeprefix("file ")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.text, encoding="utf-8")
            elif block.directive.startswith("covered by "):
                check_covered(block, where)
            elif block.directive in {"background", "background killed"}:
                killed = block.directive.endswith("killed")
                servers.enter_context(background(commands(block)[0].text, folder, environment, killed=killed))
            elif block.language in {"console", "python"}:
                run_block(block, where, folder, environment)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", pages(system=False))
def test_page(page: Path, tmp_path: Path) -> None:
    follow(page, tmp_path)
