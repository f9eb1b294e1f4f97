"""Build the core's extension modules with mypyc, for this checkout or for a wheel.

Usage: python tools/core.py [--require] [--release]

Builds into the user's cache folder if the sources have changed since the last build, in about a minute and a half.
Without a compiler or Python's headers it prints a message and the core runs interpreted; with ``--require`` this is an
error.

``--release`` builds like a released wheel: with a profile of the requests of ``benchmarks.in_process`` and optimization
across files. The build takes six minutes, and a request about a quarter less time, because the code for errors, which
mypyc adds after every step, is separated from the code that usually runs. It needs GCC and the packages that ``make
setup`` installs. The build hook of the wheel uses :func:`compile_into`.
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
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "penstock"

FLAGS = "-w -fvisibility=hidden -fno-plt"
"""Functions of the library are not called by name from outside, so calls inside it can be direct: this saves 10 % of a
request."""

COMPILE = """
import sys
from mypyc.build import mypycify
from setuptools import setup
extensions = mypycify(sys.argv[2:], opt_level=sys.argv[1], debug_level="0", multi_file=True)
setup(name="penstock-core", ext_modules=extensions, script_args=["--quiet", "build_ext", "--inplace"])
"""


def forms() -> ModuleType:
    """Return ``penstock.compiled``, loaded without the package."""
    spec = spec_from_file_location("penstock_compiled", PACKAGE / "compiled.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem() -> str:
    """Return the reason why this machine cannot compile the core; empty if it can."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the headers of Python are not installed (Debian: python3-dev)"
    try:
        for needed in ("mypyc.build", "setuptools"):
            import_module(needed)
    except ImportError as error:
        return f"mypyc cannot be imported ({error})"
    return ""


def problem_of_release() -> str:
    """Return the reason why this machine cannot make a release build; empty if it can."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    if "Free Software Foundation" not in said:
        return f"profiles are made with GCC, and {compiler} is not GCC"
    return ""


def compile_into(folder: Path, optimization: str, *, release: bool = False) -> dict[str, str]:
    """Compile the core in ``folder``: module -> file of each extension module, relative to it.

    Raises:
        RuntimeError: it does not compile, or a release cannot be measured; with the output.
    """
    shutil.copytree(PACKAGE, folder / "penstock", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    names = [f"penstock/{name}" for name in forms().core_modules(PACKAGE)]
    if release:
        # GCC finds the profile of a file by the path of its object: both builds are in the same folder.
        profile = folder / "profile"
        files = _compile(folder, names, optimization, f"-fprofile-generate={profile}")
        _train(folder)
        for file in files.values():
            (folder / file).unlink()
        shutil.rmtree(folder / "build")
        flags = f"-flto=auto -fprofile-use={profile} -fprofile-partial-training"
        files = _compile(folder, names, optimization, flags)
    else:
        files = _compile(folder, names, optimization, "")
    return files


def _compile(folder: Path, names: list[str], optimization: str, flags: str) -> dict[str, str]:
    cflags = " ".join((os.environ.get("CFLAGS", ""), FLAGS, flags)).strip()
    environment = {**os.environ, "CFLAGS": cflags, "PENSTOCK_CORE": "interpreted"}
    # Types are checked separately, with all packages installed. The build of a wheel has no libraries, so their types
    # are Any.
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


def _train(folder: Path) -> None:
    """Run the requests of the benchmark with the extension modules in ``folder``, which write the profile."""
    path = os.pathsep.join((str(folder), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "PENSTOCK_CORE": "compiled"}
    for window, durability in ((1, "memory"), (16, "memory"), (1, "durable")):
        command = [sys.executable, "-m", "benchmarks.in_process", "--case", "all", "--through", "server"]
        command += ["--reads", "300", "--window", str(window), "--durability", durability]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                "a release build runs benchmarks.in_process, which needs a checkout and the packages of `make setup` "
                f"(a wheel: build it with --no-isolation):\n{done.stderr[-3000:]}"
            )


def imported(names: list[str]) -> list[str]:
    """Return ``names`` and every file of the package that they import, directly or not: compiled code contains their
    constants."""
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


def build(*, release: bool = False) -> Path:
    """Build for this checkout, replacing an earlier build; returns the folder."""
    compiled = forms()
    folder: Path = compiled.build_folder(PACKAGE)
    folder.parent.mkdir(parents=True, exist_ok=True)
    modules = compiled.core_modules(PACKAGE)
    sources = {}
    for name in imported(modules):
        state = (PACKAGE / name).stat()
        sources[name] = [state.st_size, state.st_mtime_ns, compiled.digest(PACKAGE / name)]
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        files = compile_into(Path(work), "2" if release else "1", release=release)
        new = folder.with_name(f"{folder.name}.{os.getpid()}")
        for file in files.values():
            (new / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Path(work) / file, new / file)
        shutil.copytree(Path(work) / "build", new / "build", ignore=shutil.ignore_patterns("*.o", "*.so", "*.json"))
    manifest = {
        "checkout": str(ROOT),
        "modules": modules,
        "sources": sources,
        "files": files,
        "release": release,
    }
    (new / compiled.MANIFEST).write_text(json.dumps(manifest, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    remove_abandoned(folder.parent)
    return folder


def remove_abandoned(builds: Path) -> None:
    """Delete the builds in this folder whose checkout does not exist any more."""
    for manifest in builds.glob(f"*/{forms().MANIFEST}"):
        checkout = json.loads(manifest.read_text()).get("checkout")
        if checkout and not Path(checkout).exists():
            shutil.rmtree(manifest.parent, ignore_errors=True)


def is_release() -> bool:
    """Return True if the build of this checkout is a release build."""
    manifest = forms().build_folder(PACKAGE) / forms().MANIFEST
    return manifest.exists() and bool(json.loads(manifest.read_text()).get("release"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--require", action="store_true", help="fail if the core cannot be compiled")
    parser.add_argument("--release", action="store_true", help="build like a released wheel (six minutes)")
    options = parser.parse_args()
    _, why = forms().cached_build(PACKAGE)
    if not why and (not options.release or is_release()):
        print("core: compiled, the build is of these sources")
        return 0
    missing = problem() or (options.release and problem_of_release())
    if missing:
        print(f"core: not compiled, it runs interpreted: {missing}", file=sys.stderr)
        return int(options.require)
    print("core: compiling, for one to three minutes (a release: six) and without further messages", flush=True)
    try:
        folder = build(release=options.release)
    except RuntimeError as error:
        print(f"core: {error}", file=sys.stderr)
        return 1
    print(f"core: compiled into {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
