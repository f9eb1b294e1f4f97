"""Processor time includes processes that nobody waits for, as Java of a session of Spark."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tools import suites
from tools.processor_time import processor_s

SPEND = "import time\nwhile time.process_time() < {}: pass"
LEAVE = (
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SPEND.format(0.3)!r}], start_new_session=True)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives a process the children of others")
def test_processes_that_outlive_their_parent_are_included(tmp_path: Path) -> None:
    file = tmp_path / "spent"
    program = f"{LEAVE}\nsys.exit(7)"
    command = [sys.executable, "-m", "tools.processor_time", str(file), sys.executable, "-c", program]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=60).returncode == 7
    assert 0.3 <= float(file.read_text()) < 30


def test_a_command_that_was_killed_has_a_status(tmp_path: Path) -> None:
    file = tmp_path / "spent"
    program = "import os; os.kill(os.getpid(), 9)"
    command = [sys.executable, "-m", "tools.processor_time", str(file), sys.executable, "-c", program]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=60).returncode == 128 + 9
    assert float(file.read_text()) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_running_processes_are_included() -> None:
    before = processor_s(os.getpid())
    program = f"{SPEND.format(0.2)}\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert processor_s(os.getpid()) >= before + 0.15
        child.communicate(b"\n")


def test_the_report_names_the_dearest_tests(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    root = ET.Element("testsuites")
    for name, spent in (("cheap", "0.3"), ("dear", "71.5")):
        case = ET.SubElement(root, "testcase", classname="tests.spark.test_x", name=name, time="1")
        ET.SubElement(ET.SubElement(case, "properties"), "property", name="processor_s", value=spent)
    ET.ElementTree(root).write(report)
    result = suites.Result("unit", processor_s=suites.USUAL_S["unit"] * 2)
    suites.read_report(report, result)
    lines = suites.close([result], 100.0)
    head = lines.index("dearest tests, in seconds of processor time")
    assert lines[head + 1 : head + 3] == [
        "    71.5 s  tests.spark.test_x::dear",
        "     0.3 s  tests.spark.test_x::cheap",
    ]
    assert "dearer than usual, on this machine or since a change: unit" in lines
