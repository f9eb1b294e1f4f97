"""``make release``: distributions that install from an index and run outside of a checkout, and what describes them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import penstock
from penstock import compiled
from tests.tools import skip_or_fail
from tools import console_libraries, release


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = compiled.cached_build(release.ROOT / "src" / "penstock")[1]
    if missing := missing or ("" if console_libraries.present() else console_libraries.problem()):
        skip_or_fail(missing)
    folder, version = tmp_path / "release", penstock.__version__
    assert release.main(["--draft", "--build", "cached", "--directory", str(folder)]) == 0, capsys.readouterr().err
    assert f"twine upload {folder}" in capsys.readouterr().out
    names = {file.name for file in folder.iterdir()}
    assert len([name for name in names if name.endswith(".whl")]) == 2
    assert f"penstock-{version}.tar.gz" in names
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", release.SUMS], cwd=folder, check=True)
    for part, wanted in (("node", {"lmdb", "uvicorn", "preact"}), ("pipeline", {"pyspark", "deltalake"})):
        inventory = json.loads((folder / f"penstock-{version}-{part}.cdx.json").read_text())
        components = {component["name"]: component for component in inventory["components"]}
        assert wanted <= components.keys()
        assert inventory["metadata"]["component"]["version"] == version
    assert "| lmdb " in (folder / f"penstock-{version}-licenses.md").read_text()
