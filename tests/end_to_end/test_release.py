"""``make release``: distributions that install from an index and run outside of a checkout, and what describes them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock import compiled
from tests.tools import skip_or_fail
from tools import console_libraries, release


def other_interpreters() -> dict[str, Path]:
    """The other supported versions of Python of this machine, on PATH or installed by pyenv: version to path."""
    names = [f"python3.{minor}" for minor in range(release.OLDEST[1], 20)]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [Path(found) for name in names if (found := shutil.which(name))]
    candidates += [path for name in names for path in sorted(pyenv.glob(f"*/bin/{name}"))]
    interpreters: dict[str, Path] = {}
    for path in candidates:
        done = subprocess.run([path, "-c", release.VERSION], capture_output=True, text=True)
        if done.returncode == 0:  # a shim of pyenv fails if that version is not selected
            interpreters.setdefault(done.stdout.split()[1], path)
    interpreters.pop(f"{sys.version_info.major}.{sys.version_info.minor}", None)
    return interpreters


@pytest.mark.nightly
@pytest.mark.timeout(5_400)
def test_a_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    """With every interpreter of the machine: the first time, the core is compiled for each."""
    missing = compiled.cached_build(release.ROOT / "src" / "penstock")[1]
    if missing := missing or ("" if console_libraries.present() else console_libraries.problem()):
        skip_or_fail(missing)
    folder, version, others = tmp_path / "release", penstock.__version__, other_interpreters()
    more = [part for path in others.values() for part in ("--python", str(path))]
    arguments = ["--draft", "--build", "cached", *more, "--directory", str(folder)]
    assert release.main(arguments) == 0, capsys.readouterr().err
    assert f"twine upload {folder}" in capsys.readouterr().out
    names = {file.name for file in folder.iterdir()}
    wheels = sorted(name for name in names if name.endswith(".whl"))
    assert len(wheels) == 2 + len(others)
    for each in others:
        tag = f"cp{each.replace('.', '')}"
        assert [name for name in wheels if f"-{tag}-{tag}-manylinux" in name], wheels
    assert f"penstock-{version}.tar.gz" in names
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", release.SUMS], cwd=folder, check=True)
    for part, wanted in (("node", {"lmdb", "uvicorn", "preact"}), ("pipeline", {"pyspark", "deltalake"})):
        inventory = json.loads((folder / f"penstock-{version}-{part}.cdx.json").read_text())
        components = {component["name"]: component for component in inventory["components"]}
        assert wanted <= components.keys()
        assert inventory["metadata"]["component"]["version"] == version
    assert "| lmdb " in (folder / f"penstock-{version}-licenses.md").read_text()
    record_property("summary", f"also Python {', '.join(sorted(others))}" if others else "no other Python")
