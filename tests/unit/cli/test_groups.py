"""Groups of commands: their lists say what each command does, to the end of the sentence."""

from __future__ import annotations

import pytest

from penstock.cli import main as cli


@pytest.mark.parametrize("group", ["kv", "mqtt", "user", "pipeline", "tube"])
def test_lists_are_not_cut(group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([group, "-h"]) == 0
    commands = capsys.readouterr().out.partition("Commands:\n")[2]
    assert commands.rstrip().endswith(".")
    assert "..." not in commands
    assert all(len(line) <= 80 for line in commands.splitlines())
