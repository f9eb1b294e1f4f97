"""Ports of tests that run at the same time."""

from __future__ import annotations

import ast
import subprocess
import sys

from tests.ports import BLOCK, free_ports


def test_a_port_comes_again_after_all_others() -> None:
    ports = free_ports(1) + [port for _ in range(BLOCK // 10) for port in free_ports(5)]
    assert len(set(ports)) == len(ports)


def test_two_processes_have_no_port_in_common() -> None:
    ours = free_ports(BLOCK // 2)
    command = [sys.executable, "-c", f"from tests.ports import free_ports; print(free_ports({BLOCK // 2}))"]
    theirs = ast.literal_eval(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert len(set(ours) | set(theirs)) == BLOCK // 2 * 2
