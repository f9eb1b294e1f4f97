"""Build, describe and check the distributions of a release.

Usage: release.py [--build release|compiled|cached|pure] [--python PATH ...] [--directory DIR] [--draft]

Writes to ``dist/release/VERSION``: the wheels of this platform, the pure wheel, the source distribution, the components
of the node and of pipelines in CycloneDX, a list of their licences, and ``SHA256SUMS``. Then it installs the version
from an index on loopback, as a user does (``--only-binary``), and runs the quick start and ``penstock demo`` outside of
the checkout, with each interpreter. Nothing is published: the last line is the command that does.

A release is built from a clean checkout whose changelog has the version with a date. ``--draft`` builds without these
conditions. ``--build`` is the kind of the platform's wheels: ``release`` (default) compiles with a profile,
``compiled`` without one, ``cached`` uses the core that ``make core`` built, ``pure`` builds no wheel of the platform.
There is a wheel for the Python that runs this program and for that of each ``--python``, which is built in a virtual
environment with the pinned build tools; with ``cached`` its core is compiled once, into the user's cache folder. Run it
once on each platform.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import file_digest
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
SUMS = "SHA256SUMS"
DISTRIBUTIONS = (".whl", ".tar.gz")
LICENCES = {"pyrage": "MIT"}
"""Licences of distributions whose wheels have the text only."""
START_S = 60.0
"""Time in seconds in which the node of the installation must start."""
COMMAND_S = 60.0
"""Time in seconds in which a command of the quick start must end, and the node must stop."""
DEMO_S = 600.0
"""Time in seconds in which the demo of the installation must end."""
FROM_SOURCE = ("--no-binary", "pyspark", "--no-build-isolation")
"""Options of pip for what PyPI has as source only; the pinned build tools build it."""
OLDEST = (3, 11)
"""Oldest version of Python, as in pyproject.toml."""
VERSION = "import sys; print(sys.implementation.name, '%d.%d' % sys.version_info[:2])"
VALIDATE = """
import sys
from pathlib import Path
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
for name in sys.argv[1:]:
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(Path(name).read_text()):
        sys.exit(f"{name}: {error}")
"""


class NotReadyError(Exception):
    """The checkout cannot be released; the text says why and what to do."""


def version_of(root: Path) -> str:
    """Return the version in the source of ``root``."""
    found = re.search(r'^__version__ = "([^"]+)"$', (root / "src/penstock/__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise NotReadyError("src/penstock/__init__.py has no __version__")
    return found[1]


def check_ready(root: Path, version: str) -> None:
    """Raise NotReadyError unless the checkout is clean and the changelog has the version with its date."""
    changes = _output("git", "-C", str(root), "status", "--porcelain")
    if changes:
        raise NotReadyError(f"the checkout has changes: commit or remove them\n{changes}")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        raise NotReadyError(
            f"CHANGELOG.md has no heading '## {version} (YEAR-MONTH-DAY)': write the date of the release"
        )


class Interpreter(NamedTuple):
    """A Python of this machine: ``path`` of the program, its version such as 3.12, and a Python that has the build
    tools."""

    path: Path
    version: str
    builder: Path


def interpreters(paths: Sequence[Path], work: Path, build: str) -> list[Interpreter]:
    """Return the Python that runs this program and those at ``paths``, with environments below ``work`` to build with.

    Raises:
        NotReadyError: a path is no CPython that penstock supports, two have the same version, or the pinned packages
            do not install.
    """
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {this: Interpreter(Path(sys.executable), this, Path(sys.executable))}
    for path in paths:
        try:
            name, version = _output(str(path), "-c", VERSION).split()
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise NotReadyError(f"--python {path}: it is no Python: {error}") from error
        if name != "cpython" or tuple(map(int, version.split("."))) < OLDEST:
            raise NotReadyError(f"--python {path}: it is {name} {version}, and the core needs CPython 3.11 or newer")
        if version in found:
            raise NotReadyError(f"--python {path}: {found[version].path} is Python {version} as well")
        found[version] = Interpreter(path, version, path)
    if build == "pure":
        return list(found.values())
    others = [each for each in found.values() if each.version != this]
    for each in others:
        # The profile of a release is measured with the packages of a node.
        files = ["build.txt", *(["node.txt"] if build == "release" else [])]
        builder = make_environment(each, work / f"build-{each.version}", *(REQUIREMENTS / file for file in files))
        found[each.version] = each._replace(builder=builder)
        if build == "cached":
            _run(str(builder), str(ROOT / "tools" / "core.py"), "--require")
    return list(found.values())


def build_distributions(folder: Path, build: str, pythons: Sequence[Interpreter]) -> None:
    """Write the platform's wheels (unless ``build`` is ``pure``), the pure wheel and the source to ``folder``."""
    for python in pythons if build != "pure" else ():
        unrepaired = folder / "unrepaired"
        hatch = [str(python.builder), "-m", "hatchling", "build", "--target"]
        _run(*hatch, "wheel", "--directory", str(unrepaired), PENSTOCK_BUILD=build)
        (wheel,) = unrepaired.glob("*.whl")
        if sys.platform == "linux":
            path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
            _run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder), str(wheel), PATH=path)
        else:
            shutil.copy(wheel, folder)
        shutil.rmtree(unrepaired)
    hatch = [sys.executable, "-m", "hatchling", "build", "--target"]
    _run(*hatch, "wheel", "--directory", str(folder), PENSTOCK_BUILD="pure")
    _run(*hatch, "sdist", "--directory", str(folder))


def make_environment(python: Interpreter, folder: Path, *requirements: Path) -> Path:
    """Create a virtual environment of ``python`` with pinned requirements; return its Python. All are wheels but
    PySpark, which is built here."""
    _run(str(python.path), "-m", "venv", "--clear", str(folder))
    created = folder / "bin" / "python"
    for file in requirements:
        _pip(created, "--require-hashes", "--only-binary", ":all:", *FROM_SOURCE, "-r", str(file))
    return created


@contextmanager
def package_index(folder: Path, root: Path) -> Iterator[str]:
    """Serve the distributions in ``folder`` as a package index (PEP 503) on loopback; yields its URL.

    ``root``: an empty directory for its pages.
    """
    project = root / "simple" / "penstock"
    project.mkdir(parents=True)
    links = []
    for file in distributions(folder):
        shutil.copy(file, project)
        links.append(f'<a href="{file.name}#sha256={digest(file)}">{file.name}</a>')
    (project / "index.html").write_text("<!DOCTYPE html>\n" + "\n".join(links), encoding="utf-8")

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def quick_start(python: Path, folder: Path) -> None:
    """Run a node of the installation of ``python`` in ``folder``, write and read a key and a record, restore an
    encrypted backup, and stop it."""
    penstock = str(python.parent / "penstock")
    own = _own_environment()
    listen = [each for name in ("mqtt", "tube-master", "tube-broker", "tube-broker-http", "http")
              for each in (f"--{name}", "127.0.0.1:0")]  # fmt: skip
    log = (folder / "node.log").open("w+", encoding="utf-8")
    node = subprocess.Popen(
        [penstock, "up", "--json", *listen], cwd=folder, env=own, stdout=subprocess.PIPE, stderr=log, text=True
    )
    try:
        assert node.stdout is not None
        late = threading.Timer(START_S, node.kill)
        late.start()
        line = node.stdout.readline()
        late.cancel()
        if not line:
            log.seek(0)
            raise NotReadyError(f"the node of the installation did not start:\n{log.read()}")
        ready = json.loads(line)
        environment = own | {
            "PENSTOCK_BROKER": f"mqtt://{ready['mqtt']}",
            "PENSTOCK_TUBE_MASTER": ready["tube_master"],
            "PENSTOCK_HTTP": ready["http"],
        }

        def expect(wanted: str, *arguments: str) -> str:
            done = subprocess.run(
                [penstock, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False,
                timeout=COMMAND_S,
            )  # fmt: skip
            if done.returncode or wanted not in done.stdout:
                raise NotReadyError(
                    f"penstock {' '.join(arguments)}: exit status {done.returncode}, expected {wanted!r}\n"
                    f"{done.stdout}{done.stderr}"
                )
            return done.stdout

        expect("", "kv", "set", "greeting", "hello")
        expect("hello", "kv", "get", "greeting")
        expect("", "tube", "topic", "create", "events")
        expect("", "tube", "produce", "events", "hello")
        expect("hello", "tube", "consume", "events", "--from", "earliest", "--count", "1")
        (folder / "backup.pub").write_text(expect("age1", "keygen", "backup.key"))
        expect("age1", "backup", "backups", "--recipients-file", "backup.pub")
        expect("", "restore", "backups", "restored", "--identity-file", "backup.key")
        expect("intact", "fsck", "restored")
        node.terminate()
        if node.wait(COMMAND_S):
            raise NotReadyError(f"the node ended with status {node.returncode}")
    finally:
        if node.poll() is None:
            node.kill()
            node.wait()
        assert node.stdout is not None
        node.stdout.close()
        log.close()


def run_demo(python: Path, folder: Path) -> None:
    """Run ``penstock demo`` of the installation of ``python`` in the empty ``folder``; it checks what it delivered."""
    command = [str(python.parent / "penstock"), "demo", "--json", "--dir", str(folder)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=_own_environment(), capture_output=True, text=True, check=False, timeout=DEMO_S
        )
    except subprocess.TimeoutExpired as error:
        raise NotReadyError(f"penstock demo did not end in {DEMO_S:.0f} s:\n{error.stdout!r}") from error
    if done.returncode or not json.loads(done.stdout.splitlines()[-1])["ok"]:
        raise NotReadyError(f"penstock demo: exit status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def with_known_licences(table: str) -> str:
    """Return the ``table`` of licences with those that the metadata of a distribution does not name."""
    for name, licence in LICENCES.items():
        table = re.sub(rf"^(\| {name} +\| \S+ +\| )UNKNOWN", rf"\g<1>{licence}", table, flags=re.MULTILINE)
    return table


def describe(folder: Path, tools: Path, node: Path, name: str) -> None:
    """Write components and licences: of the installation of ``node``, and of pipelines from their requirements."""
    cyclonedx, project = str(tools.parent / "cyclonedx-py"), str(ROOT / "pyproject.toml")
    common = ["--output-reproducible", "--spec-version", "1.6", "--pyproject", project, "--mc-type", "application"]
    of_node, of_pipeline = folder / f"{name}-node.cdx.json", folder / f"{name}-pipeline.cdx.json"
    _run(cyclonedx, "environment", *common, "--output-file", str(of_node), str(node))
    _run(cyclonedx, "requirements", *common, "--output-file", str(of_pipeline), str(REQUIREMENTS / "pipeline.txt"))
    for file in (of_node, of_pipeline):
        complete_inventory(file, version_of(ROOT))
    _run(str(tools), "-c", VALIDATE, str(of_node), str(of_pipeline))
    licences = folder / f"{name}-licenses.md"
    _run(
        str(tools.parent / "pip-licenses"), "--python", str(node), "--format", "markdown",
        "--output-file", str(licences),
    )  # fmt: skip
    text = with_known_licences(licences.read_text(encoding="utf-8"))
    licences.write_text(text, encoding="utf-8")
    if "UNKNOWN" in text:
        raise NotReadyError(f"a component has no known licence:\n{text}")
    with licences.open("a", encoding="utf-8") as listed:
        for library in console_libraries():
            columns = (library["name"], library["version"], library["license"], "console, in the wheel")
            listed.write(f"| {' | '.join(columns)} |\n")


def console_libraries() -> list[dict[str, str]]:
    """Return name, version and license (SPDX) of the front-end libraries in the wheel."""
    lock = json.loads((REQUIREMENTS / "console" / "package-lock.json").read_text(encoding="utf-8"))
    return [
        {"name": path.removeprefix("node_modules/"), "version": entry["version"], "license": entry["license"]}
        for path, entry in sorted(lock["packages"].items())
        if path
    ]


def complete_inventory(file: Path, version: str) -> None:
    """Add the version, which pyproject.toml does not have, and the front-end libraries of the wheel to ``file``."""
    inventory = json.loads(file.read_text(encoding="utf-8"))
    inventory["metadata"]["component"] |= {"version": version, "purl": f"pkg:pypi/penstock@{version}"}
    for library in console_libraries():
        purl = f"pkg:npm/{library['name'].replace('@', '%40')}@{library['version']}"
        licence = {"license": {"id": library["license"]}}
        inventory["components"].append(
            {
                "type": "library",
                "bom-ref": purl,
                "name": library["name"],
                "version": library["version"],
                "purl": purl,
                "licenses": [licence],
            }
        )
    file.write_text(json.dumps(inventory, indent=2) + "\n", encoding="utf-8")


def distributions(folder: Path) -> list[Path]:
    """Return the wheels and the source distribution in ``folder``."""
    return sorted(file for file in folder.iterdir() if file.name.endswith(DISTRIBUTIONS))


def digest(file: Path) -> str:
    """Return the SHA-256 of ``file`` in hexadecimal digits."""
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Write the digests of all files in ``folder``, in the format of ``sha256sum --check``."""
    files = sorted(file for file in folder.iterdir() if file.name != SUMS)
    (folder / SUMS).write_text("".join(f"{digest(file)}  {file.name}\n" for file in files), encoding="utf-8")


def release(folder: Path, work: Path, build: str, paths: Sequence[Path], say: Callable[[str], None]) -> str:
    """Fill the empty ``folder``, check it, and return the command that publishes it. ``work``: temporary files.

    ``paths``: further interpreters to build for.
    """
    version = version_of(ROOT)
    pythons = interpreters(paths, work, build)
    say(f"building the distributions, for Python {', '.join(each.version for each in pythons)}")
    build_distributions(folder, build, pythons)
    say("installing the tools")
    tools = make_environment(pythons[0], work / "tools", REQUIREMENTS / "release.txt")
    twine = str(tools.parent / "twine")
    files = [str(file) for file in distributions(folder)]
    _run(twine, "check", "--strict", *files)
    for python in pythons:
        say(f"installing from an index on loopback with Python {python.version}")
        own = work / python.version
        own.mkdir()
        node = make_environment(python, own / "node", REQUIREMENTS / "node.txt")
        pipeline = make_environment(python, own / "pipeline", REQUIREMENTS / "build.txt", REQUIREMENTS / "pipeline.txt")
        with package_index(folder, own / "index") as url:
            for each in (node, pipeline):
                _pip(each, "--index-url", url, "--no-deps", "--only-binary", ":all:", f"penstock=={version}")
        core = json.loads(_output(str(node.parent / "penstock"), "version", "--json", cwd=work))["core"]
        if core != ("interpreted" if build == "pure" else "compiled"):
            raise NotReadyError(f"the installation has the {core} core: pip did not choose the wheel of this platform")
        for run, installed, what in ((quick_start, node, "quick start"), (run_demo, pipeline, "demo")):
            say(f"running the {what} with Python {python.version}")
            with TemporaryDirectory(prefix="penstock-release-") as outside:
                run(installed, Path(outside))
    say("listing components and licences")
    describe(folder, tools, work / pythons[0].version / "node" / "bin" / "python", f"penstock-{version}")
    write_sums(folder)
    return f"{twine} upload {' '.join(files)}"


def _pip(python: Path, *arguments: str) -> None:
    _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def _run(*command: str, **environment: str) -> None:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise NotReadyError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")


def _own_environment() -> dict[str, str]:
    """Return the variables of this process without those by which an installation would find something else."""
    return {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("PENSTOCK_", "PYTHON", "PYSPARK_", "SPARK_HOME", "VIRTUAL_ENV"))
    }


def _output(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, env=_own_environment(), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--build", choices=("release", "compiled", "cached", "pure"), default="release")
    parser.add_argument(
        "--python", type=Path, action="append", default=[], metavar="PATH", help="build for this interpreter as well"
    )
    parser.add_argument("--directory", type=Path, help="default: dist/release/VERSION")
    parser.add_argument("--draft", action="store_true", help="also from a checkout with changes")
    options = parser.parse_args(arguments)
    try:
        version = version_of(ROOT)
        folder = options.directory or ROOT / "dist" / "release" / version
        if not options.draft:
            check_ready(ROOT, version)
        if folder.exists() and any(folder.iterdir()):
            raise NotReadyError(f"{folder} is not empty: remove it, or choose another one with --directory")
        folder.mkdir(parents=True, exist_ok=True)
        work = ROOT / "build" / "release" / folder.name
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        publish = release(
            folder, work, options.build, options.python, lambda step: print(f"release: {step}", flush=True)
        )
    except NotReadyError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    for file in sorted(folder.iterdir()):
        print(f"{file.stat().st_size:>12,}  {file.name}")
    print(f"release: {folder} is complete; to publish it:\n  {publish}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
