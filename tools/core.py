"""Build the core's extension modules with mypyc, for this checkout or for a wheel.

Usage: python tools/core.py [--require]

Builds into the user's cache folder where the sources have changed since the last build; about a minute. Without a
compiler or Python's headers it says so, and the core runs interpreted; ``--require`` makes that an error. The build
hook of the wheel uses :func:`compile_into`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "penstock"

COMPILE = """
import sys
from mypyc.build import mypycify
from setuptools import setup
extensions = mypycify(sys.argv[2:], opt_level=sys.argv[1], debug_level="0", multi_file=True)
setup(name="penstock-core", ext_modules=extensions, script_args=["--quiet", "build_ext", "--inplace"])
"""


def forms() -> ModuleType:
    """``penstock.compiled``, loaded without the package."""
    spec = spec_from_file_location("penstock_compiled", PACKAGE / "compiled.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem() -> str:
    """Why nothing can be compiled here; empty where it can."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the headers of Python are not installed (Debian: python3-dev)"
    try:
        import mypyc.build  # noqa: F401 - whether they are there
        import setuptools  # noqa: F401 - whether they are there
    except ImportError as error:
        return f"mypyc cannot be imported ({error})"
    return ""


def compile_into(folder: Path, optimization: str) -> dict[str, str]:
    """Compile the core in ``folder``: module -> file of each extension module, relative to it.

    Raises:
        RuntimeError: it does not compile; with the compiler's output.
    """
    shutil.copytree(PACKAGE, folder / "penstock", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    names = [f"penstock/{name}" for name in forms().core_modules(PACKAGE)]
    environment = {**os.environ, "CFLAGS": f"{os.environ.get('CFLAGS', '')} -w".strip(), "PENSTOCK_CORE": "interpreted"}
    # Types are checked elsewhere, with everything installed. Here a wheel's build has no libraries: they become Any.
    checks = ["--config-file=", "--ignore-missing-imports"]
    command = [sys.executable, "-c", COMPILE, optimization, *checks, *names]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the core does not compile:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    files: dict[str, str] = {}
    for path in sorted(folder.rglob("*.so")):
        relative = path.relative_to(folder)
        if relative.parts[0] != "build":
            files[".".join((*relative.parts[:-1], path.name.partition(".")[0]))] = relative.as_posix()
    return files


def imported(names: list[str]) -> list[str]:
    """``names`` and every file of the package that they import, directly or not: compiled code holds its constants."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("penstock."):
                waiting += _files_of(node.module.removeprefix("penstock."), [alias.name for alias in node.names])
    return sorted(found)


def _files_of(module: str, names: list[str]) -> list[str]:
    stem = module.replace(".", "/")
    files = [f"{stem}.py", f"{stem}/__init__.py", *(f"{stem}/{name}.py" for name in names)]
    return [file for file in files if (PACKAGE / file).exists()]


def build() -> Path:
    """Build for this checkout, in place of what was built before; the folder."""
    compiled = forms()
    folder: Path = compiled.build_folder(PACKAGE)
    folder.parent.mkdir(parents=True, exist_ok=True)
    modules = compiled.core_modules(PACKAGE)
    sources = {}
    for name in imported(modules):
        state = (PACKAGE / name).stat()
        sources[name] = [state.st_size, state.st_mtime_ns, compiled.digest(PACKAGE / name)]
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        files = compile_into(Path(work), "1")
        new = folder.with_name(f"{folder.name}.{os.getpid()}")
        for file in files.values():
            (new / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Path(work) / file, new / file)
        shutil.copytree(Path(work) / "build", new / "build", ignore=shutil.ignore_patterns("*.o", "*.so", "*.json"))
    manifest = {"modules": modules, "sources": sources, "files": files}
    (new / compiled.MANIFEST).write_text(json.dumps(manifest, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--require", action="store_true", help="fail where the core cannot be compiled")
    options = parser.parse_args()
    _, why = forms().cached_build(PACKAGE)
    if not why:
        print("core: compiled, the build is of these sources")
        return 0
    missing = problem()
    if missing:
        print(f"core: not compiled, it runs interpreted: {missing}", file=sys.stderr)
        return int(options.require)
    try:
        folder = build()
    except RuntimeError as error:
        print(f"core: {error}", file=sys.stderr)
        return 1
    print(f"core: compiled into {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
