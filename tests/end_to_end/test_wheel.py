"""The wheel: the core's extension modules are in it, and are what an installation runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from zipfile import ZipFile

import librt
import mypy_extensions
import pytest

from penstock import compiled
from tests.tools import skip_or_fail
from tools import console_libraries, core

ROOT = Path(__file__).resolve().parent.parent.parent


def _build(folder: Path, form: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PENSTOCK_BUILD": form}, check=True, timeout=1500)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _repaired(wheel: Path, folder: Path) -> Path:
    """The wheel with the tag of the oldest Linux that it runs on, as ``make wheel`` makes it."""
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder), str(wheel)]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    subprocess.run(command, env={**os.environ, "PATH": path}, check=True, timeout=120)
    (repaired,) = folder.glob("*.whl")
    return repaired


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "form", ["cached", *(pytest.param(form, marks=pytest.mark.nightly) for form in ("compiled", "release"))]
)
def test_a_platform_wheel_has_every_module_of_the_core_compiled(form: str, tmp_path: Path) -> None:
    missing = compiled.cached_build(ROOT / "src" / "penstock")[1] if form == "cached" else core.problem()
    if form == "release":
        missing = missing or core.problem_of_release()
    if missing:
        pytest.skip(missing)
    wheel = _build(tmp_path / "dist", form)
    assert "none-any" not in wheel.name
    if sys.platform == "linux":
        wheel = _repaired(wheel, tmp_path / "repaired")
        assert "manylinux" in wheel.name
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for module in compiled.core_modules(ROOT / "src" / "penstock"):
        assert f"penstock/{module}" in names
        assert f"penstock/{module.removesuffix('.py')}{EXTENSION_SUFFIXES[0]}" in names
    python = tmp_path / "venv" / "bin" / "python"
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    script = "import penstock.mqtt.codec.topics as t; from penstock import compiled; print(compiled.form(), t.__file__)"
    # The dependencies of the core, without the environment that the tests run in.
    shutil.copytree(librt.__path__[0], tmp_path / "librt")
    shutil.copy(mypy_extensions.__file__, tmp_path)
    for wanted, suffix in (("", EXTENSION_SUFFIXES[0]), ("interpreted", ".py")):
        environment = {**os.environ, "PENSTOCK_CORE": wanted, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            [python, "-c", script], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
        )
        assert done.stdout.split()[0] == (wanted or "compiled")
        assert done.stdout.strip().endswith(suffix)


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("pure"), "pure")


def test_a_pure_wheel_runs_anywhere(pure_wheel: Path) -> None:
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    with ZipFile(pure_wheel) as archive:
        names = set(archive.namelist())
    assert not [name for name in names if name.endswith(".so")]
    # By their names, Spark finds the formats without an import of penstock.
    assert {"pyspark_mqtt.py", "pyspark_statestore.py", "pyspark_tubemq.py"} <= names


def test_a_wheel_has_the_web_console_with_the_licences_of_its_libraries(pure_wheel: Path) -> None:
    if console_libraries.problem():
        skip_or_fail(console_libraries.problem())
    with ZipFile(pure_wheel) as archive:
        names = set(archive.namelist())
    web = "penstock/console/web"
    assert {f"{web}/vendor/{file}" for file in console_libraries.FILES} <= names
    assert {f"{web}/{file}" for file in ("index.html", "main.js", "console.css")} <= names
