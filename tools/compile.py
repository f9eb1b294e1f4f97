"""Compile codecs and engines with mypyc: a copy of the package whose hot modules are extension modules.

Usage: compile.py [--into FOLDER]

Writes to the last line of the standard output the folder to put on PYTHONPATH: by default one in the user's cache
folder, which is used again while neither the sources nor the tools have changed; builds there that nobody has used for
a week are removed. Needs what `make setup` installs, a C compiler and the headers of Python; a few minutes. The package
itself never needs it: decision 70 says why.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import time
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

COMPILED = (
    "mqtt/codec/*.py",
    "mqtt/engine/*.py",
    "statestore/codec/*.py",
    "statestore/hlc.py",
    "statestore/binding.py",
    "statestore/engine/*.py",
    "statestore/service/waiting.py",
    "tube/codec/*.py",
    "tube/engine/*.py",
)
"""What is compiled, inside the package; packages' own ``__init__.py`` hold nothing that would gain by it."""

INTERPRETED = {
    "mqtt/engine/limits.py": "the reference pages and the help take the options' words from its source",
    "mqtt/engine/client_events.py": "mypyc does not find the type of a dataclass field that is an object",
}
"""What is not, and why."""

UNUSED_S = 7 * 24 * 3600
"""After how long without use a build in the cache folder is removed."""


def modules(package: Path) -> list[str]:
    """The files to compile, by their paths inside ``package``."""
    found = {str(path.relative_to(package)) for pattern in COMPILED for path in package.glob(pattern)}
    return sorted(name for name in found - INTERPRETED.keys() if not name.endswith("__init__.py"))


def key(package: Path) -> str:
    """What a build depends on, as a short text."""
    digest = sha256()
    for path in [*sorted(package.rglob("*.py")), ROOT / "pyproject.toml", Path(__file__)]:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return f"{sys.implementation.cache_tag}-{platform.machine()}-mypyc{version('mypy')}-{digest.hexdigest()[:16]}"


def build(package: Path, folder: Path) -> None:
    """Copy ``package`` into ``folder``, which must not exist, with the compiled modules beside their sources."""
    from mypyc.build import mypycify
    from setuptools import setup

    work = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.copytree(package, work / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        os.chdir(work)
        files = [f"{package.name}/{name}" for name in modules(package)]
        # One file of C for each module: a compiler needs gigabytes for all of it in one.
        extensions = mypycify(
            [f"--config-file={ROOT / 'pyproject.toml'}", *files], opt_level="1", debug_level="0", multi_file=True
        )
        setup(name=package.name, ext_modules=extensions, script_args=["--quiet", "build_ext", "--inplace"])
        shutil.rmtree("build")
        work.rename(folder)
    finally:
        os.chdir(ROOT)
        shutil.rmtree(work, ignore_errors=True)


def clear(cache: Path, now: float) -> None:
    """Remove from ``cache`` what was last used ``UNUSED_S`` ago: builds, and what builds left that were ended."""
    for folder in cache.iterdir():
        if now - folder.stat().st_mtime > UNUSED_S:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="build into this folder, which must not exist")
    options = parser.parse_args()
    package = ROOT / "src" / "penstock"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "compiled"
    folder: Path = options.into.resolve() if options.into is not None else cache / key(package)
    if options.into is not None and folder.exists():
        print(f"compile: {folder} exists; name a folder that does not", file=sys.stderr)
        return 2
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        build(package, folder)
    if options.into is None:
        os.utime(folder)  # it is used now
        clear(cache, time.time())
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
