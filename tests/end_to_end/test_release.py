"""``make release``: distributions that install from an index and run outside of a checkout, and what describes them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock import compiled
from tests.tools import skip_or_fail
from tools import console_libraries, release

CAN_BUILD = """
import sys, sysconfig
from importlib.util import find_spec
from pathlib import Path
if find_spec("ensurepip") is None:
    sys.exit("it has no ensurepip")
if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
    sys.exit("it has no headers")
"""


def supported_versions() -> list[str]:
    """The versions of Python in the classifiers of the package, such as 3.12."""
    project = tomllib.loads((release.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in project["classifiers"])
    return [match[1] for match in found if match]


def other_interpreters() -> tuple[dict[str, Path], dict[str, str]]:
    """The other supported versions of Python of this machine, on PATH or installed by pyenv: their paths, and of those
    that are missing or cannot build a wheel, the reasons."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found: dict[str, Path] = {}
    missing: dict[str, str] = {}
    for version in supported_versions():
        if version == f"{sys.version_info.major}.{sys.version_info.minor}":
            continue
        name = f"python{version}"
        missing[version] = "it is not installed"
        for path in (shutil.which(name), *sorted(pyenv.glob(f"*/bin/{name}"))):
            # A shim of pyenv fails if that version is not selected.
            if path is None or subprocess.run([path, "-c", ""], capture_output=True).returncode:
                continue
            done = subprocess.run([path, "-c", CAN_BUILD], capture_output=True, text=True)
            if done.returncode == 0:
                found[version] = Path(path)
                del missing[version]
                break
            missing[version] = done.stderr.strip()
    return found, missing


def test_an_interpreter_that_cannot_build_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = next(each for each in supported_versions() if each != f"{sys.version_info.major}.{sys.version_info.minor}")
    program = tmp_path / f"python{other}"
    program.write_text('#!/bin/sh\n[ -z "$2" ] || { echo it has no headers >&2; exit 1; }\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    found, missing = other_interpreters()
    assert found == {}
    assert missing.pop(other) == "it has no headers"
    assert set(missing.values()) == {"it is not installed"}


@pytest.mark.nightly
@pytest.mark.timeout(5_400)
def test_a_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    """With every interpreter of the machine: the first time, the core is compiled for each."""
    missing = compiled.cached_build(release.ROOT / "src" / "penstock")[1]
    if missing := missing or ("" if console_libraries.present() else console_libraries.problem()):
        skip_or_fail(missing)
    folder, version = tmp_path / "release", penstock.__version__
    others, left_out = other_interpreters()
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
    parts = [f"with Python {each}" for each in others] + [f"not with {each}: {why}" for each, why in left_out.items()]
    record_property("summary", ", ".join(parts))
