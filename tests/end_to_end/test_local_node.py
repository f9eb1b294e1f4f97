"""Commands in the working directory of a node find it by themselves, on any port."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.end_to_end.nodes import PENSTOCK, RunningNode, environment


def test_commands_find_a_node_on_other_ports(tmp_path: Path) -> None:
    def penstock(*args: str) -> str:
        done = subprocess.run(
            [*PENSTOCK, *args], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    with RunningNode(tmp_path, "tube: {topics: {line3: {}}}\n"):
        penstock("kv", "set", "plant/limit", "90")
        assert penstock("kv", "get", "plant/limit") == "90"
        penstock("tube", "produce", "line3", "a record")
        (row,) = [json.loads(line) for line in penstock("tube", "topic", "list", "--json").splitlines()]
        assert row["topic"] == "line3"
        assert "a record" in penstock("tube", "consume", "line3")
