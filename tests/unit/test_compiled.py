"""Compiled or interpreted core: a build is used only for the sources that it was made from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import compiled

PACKAGE = Path(compiled.__file__).parent
MODULE = "mqtt/codec/decoder.py"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a build of it in the cache."""
    package = tmp_path / "src" / "penstock"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "core.py").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = compiled.build_folder(package)
    folder.mkdir(parents=True)
    modules = compiled.core_modules(package)
    sources = {}
    for name in (*modules, "errors.py"):
        state = (package / name).stat()
        sources[name] = [state.st_size, state.st_mtime_ns, compiled.digest(package / name)]
    manifest = {"modules": modules, "sources": sources, "files": {"penstock.mqtt.codec.decoder": "decoder.so"}}
    (folder / compiled.MANIFEST).write_text(json.dumps(manifest))
    return package


def test_a_build_of_these_sources_is_used(package: Path) -> None:
    files, why = compiled.cached_build(package)
    assert (list(files), why) == (["penstock.mqtt.codec.decoder"], "")


@pytest.mark.parametrize("name", [MODULE, "errors.py"])
def test_an_edited_source_never_runs_as_stale_compiled_code(package: Path, name: str) -> None:
    path = package / name
    before = path.read_bytes()
    path.write_bytes(before + b"# edited\n")
    files, why = compiled.cached_build(package)
    assert files == {}
    assert why == f"{name} was changed since the build: run `python tools/core.py`"
    path.write_bytes(before)  # another time of change, the same content
    assert compiled.cached_build(package)[0]


def test_a_removed_and_an_added_module_end_a_build(package: Path) -> None:
    (package / "mqtt" / "codec" / "new.py").touch()
    assert compiled.cached_build(package)[1].startswith("modules were added or removed")
    (package / MODULE).unlink()
    assert compiled.cached_build(package)[1].startswith(f"{MODULE} was changed")


def test_without_a_build_the_error_names_the_command(package: Path) -> None:
    shutil.rmtree(compiled.build_folder(package))
    files, why = compiled.cached_build(package)
    assert files == {}
    assert "run `make setup`" in why


def _penstock(package: Path, core: str) -> subprocess.CompletedProcess[str]:
    script = "from penstock import compiled; print(compiled.form(), compiled.why_interpreted())"
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PENSTOCK_CORE": core}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


def test_the_environment_chooses(package: Path) -> None:
    shutil.rmtree(compiled.build_folder(package))
    assert _penstock(package, "interpreted").stdout == "interpreted PENSTOCK_CORE is 'interpreted'\n"
    refused = _penstock(package, "compiled")
    assert refused.returncode == 1
    assert "PENSTOCK_CORE is 'compiled', but the core is not: it was not built" in refused.stderr
    unknown = _penstock(package, "fast")
    assert "must be 'compiled' or 'interpreted'" in unknown.stderr
