"""Build hook of the wheel: the core's extension modules, where there is a C compiler; else a wheel of pure Python.

The front-end libraries of the web console are fetched with npm (``tools/console_libraries.py``); without it the wheel
has no web console, which is an error for a release.

``PENSTOCK_BUILD=compiled`` makes a core that cannot be compiled an error, ``PENSTOCK_BUILD=release`` builds with a
profile (``tools/core.py``), ``PENSTOCK_BUILD=cached`` takes the extension modules that ``make core`` built from these
sources, for tests, ``PENSTOCK_BUILD=pure`` builds a pure wheel.
An editable installation has no extension modules beside its sources: ``tools/core.py`` builds them into the cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _tool(root: Path, name: str) -> ModuleType:
    spec = spec_from_file_location(f"penstock_tools_{name}", root / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CoreBuildHook(BuildHookInterface[Any]):
    """Adds the extension modules to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the core into a folder of this build, and name its files [BuildHookInterface]."""
        wanted = os.environ.get("PENSTOCK_BUILD", "")
        if wanted not in ("", "compiled", "release", "cached", "pure"):
            raise ValueError(
                f"PENSTOCK_BUILD is {wanted!r}: it must be 'compiled', 'release', 'cached' or 'pure', or not set"
            )
        if self.target_name != "wheel" or version == "editable":
            return
        self._add_console_libraries(required=wanted == "release")
        if wanted == "pure":
            return
        core = _tool(Path(self.root), "core")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if wanted == "cached":
            files, missing = core.forms().cached_build(core.PACKAGE)
            if missing:
                raise RuntimeError(f"there is no build of the core: {missing}")
            folder = core.forms().build_folder(core.PACKAGE)
            build_data["force_include"] |= {str(file): str(file.relative_to(folder)) for file in files.values()}
            return
        release = wanted == "release"
        missing = core.problem() or (release and core.problem_of_release())
        if missing:
            if wanted:
                raise RuntimeError(f"the core cannot be compiled: {missing}")
            self.app.display_warning(f"penstock: a pure wheel, whose core runs interpreted: {missing}")
            build_data["pure_python"] = True
            build_data["infer_tag"] = False
            return
        self._folder = tempfile.mkdtemp(prefix="penstock-core-")
        for file in core.compile_into(Path(self._folder) / "core", "2", release=release).values():
            build_data["force_include"][str(Path(self._folder) / "core" / file)] = file
        sys.stdout.flush()

    def _add_console_libraries(self, *, required: bool) -> None:
        libraries = _tool(Path(self.root), "console_libraries")
        if libraries.present():
            return
        missing = libraries.problem()
        if not missing:
            try:
                libraries.fetch()
            except (OSError, subprocess.CalledProcessError) as error:
                missing = str(error)
        if missing and required:
            raise RuntimeError(f"the libraries of the web console cannot be fetched: {missing}")
        if missing:
            self.app.display_warning(f"penstock: a wheel without the web console: {missing}")

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
        """Remove what was compiled [BuildHookInterface]."""
        folder = getattr(self, "_folder", None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
