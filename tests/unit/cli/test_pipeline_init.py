from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.pipelines.spec.loader import load


@pytest.mark.parametrize("source", ["tubemq", "mqtt", "files"])
def test_generated_pipelines_and_cases_are_valid(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "7_My.Plant" / "p.yaml"
    assert main(["pipeline", "init", str(file), "--source", source]) == 0
    assert load(file).name == "my-plant"
    assert load(file).inputs["source"].format == source
    cases = file.with_name("p.test.yaml")
    assert capsys.readouterr().out.startswith(f"wrote {file} and {cases}\n")
    assert main(["pipeline", "validate", str(file), str(cases)]) == 0
    before = file.read_bytes()
    assert main(["pipeline", "init", str(file)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_an_invalid_name_creates_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "init", str(tmp_path / "p.yaml"), "--name", "A b"]) == 2
    assert "expected a name: a lowercase letter" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
