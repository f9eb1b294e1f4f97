"""The plugin as a user's test run sees it: a run of its own, with and without pytest-asyncio."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = "penstock.testing.pytest_plugin"

THREE_LINES = """
def test_three_lines(penstock_statestore):
    penstock_statestore.set("setpoint", "21.5")
    assert penstock_statestore.get("setpoint").value == b"21.5"
"""

MORE = """
import pytest
from penstock.statestore import Client
from penstock.statestore.errors import QuotaExceededError

def test_isolated(penstock_statestore, penstock_broker):
    assert penstock_statestore.url == penstock_broker.url
    assert penstock_broker.keys == 0

@pytest.mark.penstock(max_keys=1)
class TestFull:
    @pytest.mark.penstock(durability="durable")
    def test_quota(self, penstock_statestore):
        penstock_statestore.set("a", "1")
        with pytest.raises(QuotaExceededError):
            penstock_statestore.set("b", "1")

@pytest.mark.penstock(faults=True)
async def test_coroutines(penstock_broker):
    async with Client.connect(penstock_broker.url) as store:
        assert (await store.set("k", "v")).applied
"""

WRONG = """
import pytest

@pytest.mark.penstock(colour="red")
def test_option(penstock_broker):
    pass

@pytest.mark.penstock("red")
def test_position(penstock_broker):
    pass

@pytest.mark.penstock(durability="red")
def test_value(penstock_broker):
    pass
"""


def run(folder: Path, text: str, *args: str) -> str:
    (folder / "test_application.py").write_text(text)
    # Loaded by name, so that this passes however penstock was installed.
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", *args]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_three_lines_under_plain_pytest(tmp_path: Path) -> None:
    assert re.search(r"^1 passed", run(tmp_path, THREE_LINES, "--strict-markers"), re.MULTILINE)


def test_with_asyncio(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    )
    output = run(tmp_path, THREE_LINES + MORE, "-p", "pytest_asyncio.plugin", "--strict-markers")
    assert re.search(r"^4 passed", output, re.MULTILINE), output


def test_wrong_options_are_explained(tmp_path: Path) -> None:
    output = run(tmp_path, WRONG)
    assert re.search(r"^3 errors", output, re.MULTILINE), output
    assert "unexpected keyword argument 'colour'" in output
    assert "accepts keyword arguments only, got ('red',)" in output
    assert "'red' is not a valid Durability" in output


def test_the_plugin_is_announced_to_pytest_and_imports_nothing_before_its_use() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"penstock": PLUGIN}
    code = f"import sys, {PLUGIN}; print(sorted(m for m in sys.modules if m.startswith('penstock')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    names = ["penstock", "penstock.compiled", "penstock.testing", "penstock.testing.pytest_plugin"]
    assert done.stdout.strip() == str(names)


@pytest.mark.parametrize("fixture", ["penstock_broker", "penstock_statestore"])
def test_the_fixtures_are_listed_with_what_they_are(tmp_path: Path, fixture: str) -> None:
    output = run(tmp_path, "", "--fixtures")
    assert re.search(rf"^{fixture} -- .*\n    An? ", output, re.MULTILINE), output
