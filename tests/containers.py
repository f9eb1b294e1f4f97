"""Container images without a container engine: the instructions of a Containerfile, executed in chroots.

A stage is a directory with the files that its instructions changed, on top of the stage that it comes from (overlayfs).
Every command runs in mount and process namespaces of its own: its mounts and processes end with it, also if the test
fails or is killed, and the machine never sees them. A container also has its own network with a loopback interface.

What differs from an engine: the base image ``python:X.Y-slim-RELEASE`` is replaced by the Debian release of that name
with Debian's own Python X.Y and its headers, because no registry of images is used. There are no control groups, no
system call filter and no user namespace. Instructions, options and patterns that this module does not know are errors.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

from tests.tools import require_tool, skip_or_fail

__all__ = [
    "Container",
    "Image",
    "ImageBuilder",
    "Instruction",
    "context_files",
    "new_volume",
    "parse",
    "require_namespaces",
    "run_once",
]

BASE = re.compile(r"python:(\d+\.\d+)-slim-([a-z]+)")
"""Base images that can be replaced: Python's version and Debian's release."""
BASE_PACKAGES = ("ca-certificates", "netbase", "tzdata", "python3", "python3-venv", "python3-dev", "python-is-python3")
"""What the base has: the packages of the slim images, and Debian's Python with the command ``python``, the module venv
and the headers, which the image has, too."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NETWORK_VARIABLES = re.compile(
    r"(https?|ftp|all|no)_proxy|(pip|npm_config)_\w+|\w*(ca_bundle|cert|cert_file|cert_dir|ca_certs|certs)",
    re.IGNORECASE,
)
"""Variables of this process that the commands of a build get: how the machine reaches the registries."""
NETWORK_FILES = (
    "/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt", "/usr/local/share/ca-certificates",
    "/etc/pip.conf", "/root/.config/pip/pip.conf", "/etc/npmrc", "/root/.npmrc",
)  # fmt: skip
"""Files of the machine for the same purpose. They are below a build, and in no image."""
STEP_S = 3_600.0
DEADLINE_S = 600.0
LOOPBACK_UP = (
    "import fcntl, socket, struct; "
    "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh14x', b'lo', 0x41))"  # SIOCSIFFLAGS: IFF_UP | IFF_RUNNING
)


class Instruction(NamedTuple):
    """An instruction of a Containerfile. ``stage`` is empty before the first FROM."""

    stage: str
    name: str
    value: str


def parse(text: str) -> list[Instruction]:
    """Return the instructions of a Containerfile; every stage must have a name."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found: list[Instruction] = []
    stage = ""
    for line in filter(str.strip, text.splitlines()):
        name, _, value = line.partition(" ")
        if name == "FROM":
            stage = value.split(" AS ")[1].strip()
        found.append(Instruction(stage, name, value.strip()))
    return found


def context_files(root: Path) -> list[Path]:
    """Return the files below ``root`` that its ``.dockerignore`` leaves in the build context, relative to it.

    Raises:
        ValueError: a pattern has something else than ``*`` and ``**/`` at its beginning, or is an exception (``!``)
            with a slash.
    """
    rules: list[tuple[re.Pattern[str], bool]] = []
    for line in (root / ".dockerignore").read_text(encoding="utf-8").splitlines():
        excepted, anywhere = line.startswith("!"), line.startswith("**/")
        pattern = line.removeprefix("!").removeprefix("**/")
        if re.search(r"[][?\\]|\*\*", pattern) or (excepted and "/" in pattern):
            raise ValueError(f".dockerignore: the pattern {line!r} is not supported")
        if pattern and not pattern.startswith("#"):
            expression = "[^/]*".join(re.escape(part) for part in pattern.split("*"))
            rules.append((re.compile(("(?:.*/)?" if anywhere else "") + expression + "(?:/.*)?"), not excepted))

    def is_ignored(path: Path) -> bool:
        matches = [ignored for rule, ignored in rules if rule.fullmatch(path.as_posix())]
        return bool(matches) and matches[-1]

    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        below = Path(folder).relative_to(root)
        folders[:] = [name for name in folders if not is_ignored(below / name)]
        found += [below / name for name in files if not is_ignored(below / name)]
    return sorted(found)


def require_namespaces() -> None:
    """Skip (or fail) the test where its chroots cannot be made."""
    if sys.platform != "linux" or os.geteuid() != 0:
        skip_or_fail("chroots, mounts and namespaces need root on Linux")
    if not re.search(r"\boverlay$", Path("/proc/filesystems").read_text(encoding="ascii"), re.MULTILINE):
        skip_or_fail("the kernel has no overlayfs")
    for tool in ("debootstrap", "apt-get", "chroot", "mount", "nsenter", "unshare"):
        require_tool(tool)
    done = subprocess.run(_in_namespaces([["true"]], ["true"]), capture_output=True, text=True)
    if done.returncode:
        skip_or_fail(f"this process cannot make namespaces: {done.stderr.strip()}")


@dataclass(frozen=True)
class Image:
    """A stage: ``layers`` are its directories, the uppermost first; the rest is what its instructions say."""

    layers: tuple[Path, ...]
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    working_directory: str = "/"
    volumes: tuple[str, ...] = ()
    ports: frozenset[int] = frozenset()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    health_check: tuple[str, ...] = ()
    health_options: dict[str, float] = field(default_factory=dict)
    """interval, timeout and start-period in seconds."""

    def home(self) -> str:
        """Return the home directory of the user, as engines set it: ``/`` if the user has no entry in /etc/passwd."""
        files = (layer / "etc" / "passwd" for layer in self.layers)
        text = next(file for file in files if file.exists()).read_text(encoding="utf-8")
        entries = (line.split(":") for line in text.splitlines())
        return next((entry[5] for entry in entries if entry[2] == self.user.split(":")[0]), "/")

    def size(self) -> int:
        """Return the bytes of the files on top of the base."""
        paths = (path for layer in self.layers[:-1] for path in layer.rglob("*"))
        return sum(path.lstat().st_size for path in paths if path.is_file() and not path.is_symlink())


class ImageBuilder:
    """Builds stages of the Containerfile ``text`` with the build context ``context``. ``work``: an empty directory."""

    def __init__(self, text: str, context: Path, work: Path) -> None:
        self._instructions = parse(text)
        self._context = context
        self._work = work
        self._stages: dict[str, Image] = {}
        self._arguments: dict[str, str] = {}
        for each in self._instructions:
            if not each.stage:
                name, equals, value = each.value.partition("=")
                if each.name != "ARG" or not equals:
                    raise ValueError(f"{each.name} {each.value}: only ARG with a default is supported before FROM")
                self._arguments[name] = value

    def build(self, stage: str) -> Image:
        """Return the image of ``stage``; builds it, and those that it needs, unless they are built.

        Raises:
            ValueError: an instruction is not supported.
            RuntimeError: a command failed; with its output.
        """
        if stage not in self._stages:
            steps = [each for each in self._instructions if each.stage == stage]
            if not steps:
                raise ValueError(f"there is no stage {stage!r}")
            source = _expand(steps[0].value.partition(" AS ")[0], self._arguments)
            parent = (
                self.build(source) if any(each.stage == source for each in self._instructions) else self._base(source)
            )
            layer = self._work / "stages" / stage
            layer.mkdir(parents=True)
            image = replace(parent, layers=(layer, *parent.layers))
            for step in steps[1:]:
                image = self._execute(image, step)
            self._stages[stage] = image
        return self._stages[stage]

    def _base(self, name: str) -> Image:
        match = BASE.fullmatch(name)
        if match is None:
            raise ValueError(f"FROM {name}: only python:X.Y-slim-RELEASE can be replaced by Debian's packages")
        return Image((_debian(match[2], match[1]),), {"PATH": PATH})

    def _execute(self, image: Image, step: Instruction) -> Image:
        name, value = step.name, step.value
        match name:
            case "RUN" if not value.startswith(("--", "[")):
                self._run(image, value)
                return image
            case "COPY":
                self._copy(image, value)
                return image
            case "WORKDIR" if value.startswith("/"):
                self._in_layer(image, lambda root: [], lambda root: ["mkdir", "-p", f"{root}{value}"])
                return replace(image, working_directory=value)
            case "ENV":
                new = dict(part.split("=", 1) for part in shlex.split(value))
                expanded = {key: _expand(text, image.environment) for key, text in new.items()}
                return replace(image, environment=image.environment | expanded)
            case "USER" if re.fullmatch(r"\d+:\d+", value):
                return replace(image, user=value)
            case "VOLUME" if re.fullmatch(r"/\S+", value):
                return replace(image, volumes=(*image.volumes, value))
            case "EXPOSE":
                return replace(image, ports=image.ports | {int(port) for port in value.split()})
            case "ENTRYPOINT":  # json.loads refuses the form for a shell
                return replace(image, entrypoint=tuple(json.loads(value)))
            case "CMD":
                return replace(image, command=tuple(json.loads(value)))
            case "HEALTHCHECK":
                options, _, check = value.partition("CMD ")
                parts = [re.fullmatch(r"--(interval|timeout|start-period)=(\d+)s", each) for each in options.split()]
                if not all(parts):
                    raise ValueError(f"HEALTHCHECK {options}: an option is not supported")
                found = {each[1]: float(each[2]) for each in parts if each}
                return replace(image, health_check=tuple(json.loads(check)), health_options=found)
        raise ValueError(f"{name} {value}: not supported")

    def _run(self, image: Image, command: str) -> None:
        caches = {"/var/cache/apt/archives": _cache() / "apt", "/root/.cache/pip": _cache() / "pip"}
        for folder in caches.values():
            folder.mkdir(parents=True, exist_ok=True)
        machine = {name: value for name, value in os.environ.items() if NETWORK_VARIABLES.fullmatch(name)}
        environment = {"HOME": "/root", **machine, **image.environment}

        def mounts(root: Path) -> list[list[str]]:
            binds = [["mount", "--bind", str(source), f"{root}{target}"] for target, source in caches.items()]
            return [*_kernel_mounts(root), *binds]

        def last(root: Path) -> list[str]:
            shell = ["/bin/sh", "-c", command]
            return _inside(["chroot", str(root)], shell, environment, image.user, image.working_directory)

        self._in_layer(image, mounts, last, below=self._network(image))

    def _copy(self, image: Image, value: str) -> None:
        match = re.fullmatch(r"(?:--from=(\S+) )?([^\s\-\[]\S*) ([^\s\-\[]\S*)", value)
        if match is None or "*" in value:
            raise ValueError(f"COPY {value}: only --from, one source and a target are supported")
        stage, source, target = match.groups()
        mounts: list[list[str]] = []
        if stage:
            above = self._work / "source"
            above.mkdir(exist_ok=True)
            mounts.append(_overlay(above, self.build(stage).layers))
        else:
            above = self._work / "context"
            if not above.exists():
                for file in context_files(self._context):
                    (above / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(self._context / file, above / file, follow_symlinks=False)
        path = above / source.lstrip("/")

        def last(root: Path) -> list[str]:
            place = f"{root}{os.path.join(image.working_directory, target)}"  # noqa: PTH118 - an absolute target replaces
            # Of a directory its contents are copied, to a directory. COPY gives the files to root.
            copy = 'if [ -d "$1" ]; then mkdir -p "$2" && cp -R "$1/." "$2"; else cp "$1" "$2"; fi'
            copy = copy.replace("cp ", "cp --no-dereference --preserve=mode,timestamps ")
            return ["sh", "-c", copy, "copy", str(path), place]

        self._in_layer(image, lambda root: mounts, last)

    def _network(self, image: Image) -> Path:
        """Return a layer with the machine's files for the network and mount points, for the commands of a build."""
        layer = self._work / "network"
        if not layer.exists():
            for name in NETWORK_FILES:
                source, target = Path(name), layer / name[1:]
                target.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    shutil.copytree(source, target)
                elif source.exists():
                    shutil.copy(source, target)
            sources = "".join(f"{line}\n" for line in _debian_sources(_release(image.layers[-1])))
            files = {
                "etc/apt/sources.list": sources,
                "etc/apt/apt.conf.d/99machine": _output("apt-config", "dump", "Acquire"),
                "etc/dpkg/dpkg.cfg.d/unsafe-io": "force-unsafe-io\n",  # as in Debian's images
            }
            for name, text in files.items():
                (layer / name).parent.mkdir(parents=True, exist_ok=True)
                (layer / name).write_text(text, encoding="utf-8")
            (layer / "root" / ".cache" / "pip").mkdir(parents=True)
        return layer

    def _in_layer(
        self,
        image: Image,
        mounts: Callable[[Path], list[list[str]]],
        last: Callable[[Path], list[str]],
        *,
        below: Path | None = None,
    ) -> None:
        """Run a command that changes the uppermost layer. ``mounts`` and ``last`` get the root of the file system."""
        upper, *lower = image.layers
        root, scratch = self._work / "root", self._work / "overlay"
        root.mkdir(exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        layers = (below, *lower) if below else lower
        commands = [_overlay(root, layers, upper, scratch), *mounts(root)]
        _checked(_in_namespaces(commands, last(root)), upper.name)


class Container:
    """A container of ``image`` with a read-only root, without capabilities, started as the documentation says.

    ``volume`` is the directory of its only volume; ``binds`` are read-only mounts, target: source. ``work``: an empty
    directory. Programs in /tmp cannot be executed unless ``tmp`` is ``exec``. ``network_of``: a running container,
    whose network this one shares.
    """

    def __init__(
        self,
        image: Image,
        work: Path,
        volume: Path,
        binds: dict[str, Path],
        *,
        tmp: Literal["exec", "noexec"] = "noexec",
        network_of: Container | None = None,
    ) -> None:
        self.image = image
        self._work = work
        (self._path,) = image.volumes
        self._volume = volume
        self._binds = binds
        self._tmp = f"nosuid,nodev,{tmp}"
        self._network_of = network_of
        self._names: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self.log = work / "log"

    def start(self, *command: str, name: str) -> Container:
        """Start ``command``, or that of the image; ``name`` is the host name. Further names of the loopback interface
        are those of the container whose network it shares."""
        self._names = [name, *(self._network_of._names if self._network_of else ())]
        root = self._work / "root"
        above = self._work / "mount-points"
        for folder in (root, above / "etc"):
            folder.mkdir(parents=True, exist_ok=True)
        (above / "etc" / "hosts").write_text(f"127.0.0.1 localhost {' '.join(self._names)}\n", encoding="ascii")
        (above / "etc" / "resolv.conf").touch()
        for target in (*self._binds, self._path):
            (above / target[1:]).mkdir(parents=True, exist_ok=True)
        commands = [
            *([] if self._network_of else [[sys.executable, "-c", LOOPBACK_UP]]),
            ["hostname", name],
            _overlay(root, (above, *self.image.layers)),
            *_kernel_mounts(root),
            ["mount", "-t", "tmpfs", "-o", self._tmp, "tmpfs", f"{root}/tmp"],
            ["mount", "--bind", str(self._volume), f"{root}{self._path}"],
        ]
        for target, source in self._binds.items():
            commands.append(["mount", "--bind", str(source), f"{root}{target}"])
            commands.append(["mount", "-o", "remount,bind,ro", f"{root}{target}"])
        last = self._inside(["chroot", str(root)], [*self.image.entrypoint, *(command or self.image.command)])
        if self._network_of:
            enter = ["nsenter", f"--target={self._network_of._first_process()}", "--net"]
            started = [*enter, *_in_namespaces(commands, last)]
        else:
            started = _in_namespaces(commands, last, "--net")
        with self.log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(started, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True)
        return self

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the running container, as its user."""
        return self._run(command, environment, DEADLINE_S)

    def output(self, *command: str, **environment: str) -> str:
        """Return the standard output of a command that must succeed."""
        done = self.run(*command, **environment)
        assert done.returncode == 0, f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def is_healthy(self) -> bool:
        """Return the result of the image's health check, as an engine gets it: too late is a failure."""
        try:
            return self._run(self.image.health_check, {}, self.image.health_options["timeout"]).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def wait_until_healthy(self) -> float:
        """Return the seconds until the health check succeeded; fails as :meth:`wait_until`."""
        return self.wait_until(self.is_healthy, "not healthy")

    def wait_until(self, holds: Callable[[], bool], otherwise: str) -> float:
        """Return the seconds until ``holds()`` is true; fails after ``DEADLINE_S`` or when the process ends."""
        started = time.monotonic()
        while not holds():
            assert self._process is not None
            status = self._process.poll()
            if status is not None or time.monotonic() - started > DEADLINE_S:
                raise AssertionError(f"{otherwise}, exit status {status}: {self.log.read_text(encoding='utf-8')}")
            time.sleep(0.1)
        return time.monotonic() - started

    def stop(self, seconds: float) -> int:
        """Send SIGTERM to the first process; return its exit status, which must come within ``seconds``."""
        assert self._process is not None
        os.kill(self._first_process(), signal.SIGTERM)
        status = self._process.wait(seconds)
        self._process = None
        return status

    def __enter__(self) -> Container:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()  # unshare --kill-child: the namespaces, and all that runs in them, end with it
            self._process.wait()

    def _first_process(self) -> int:
        """Return the machine's id of the container's process 1, as soon as it is in the container's root."""
        assert self._process is not None
        root, deadline = Path("/").stat().st_dev, time.monotonic() + DEADLINE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            for status in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):  # it has ended
                    parent = int(status.read_text().rpartition(")")[2].split()[1])
                    if parent == self._process.pid and (status.parent / "root").stat().st_dev != root:
                        return int(status.parent.name)
        raise AssertionError(f"the container does not run: {self.log.read_text(encoding='utf-8')}")

    def _run(
        self, command: Sequence[str], environment: Mapping[str, str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        kinds = ("mount", "pid", "net", "ipc", "uts", "root")
        enter = ["nsenter", f"--target={self._first_process()}", *(f"--{kind}" for kind in kinds)]
        return subprocess.run(
            self._inside(enter, command, environment), capture_output=True, text=True, check=False, timeout=seconds
        )

    def _inside(self, enter: list[str], command: Sequence[str], more: Mapping[str, str] | None = None) -> list[str]:
        environment = {**self.image.environment, "HOME": self.image.home(), **(more or {})}
        unprivileged = ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
        return _inside(enter, command, environment, self.image.user, self.image.working_directory, setpriv=unprivileged)


def run_once(image: Image, work: Path, binds: dict[str, Path], *command: str, stdin: str = "") -> None:
    """Run a command in a new container as root, with writable mounts, and delete the container."""
    root, upper, scratch = (work / name for name in ("root", "upper", "overlay"))
    for folder in (root, upper, scratch, *(upper / target[1:] for target in binds)):
        folder.mkdir(parents=True, exist_ok=True)
    mounts = [["mount", "--bind", str(source), f"{root}{target}"] for target, source in binds.items()]
    commands = [_overlay(root, image.layers, upper, scratch), *_kernel_mounts(root), *mounts]
    last = _inside(
        ["chroot", str(root)], [*image.entrypoint, *command], image.environment, "0:0", image.working_directory
    )
    _checked(_in_namespaces(commands, last, "--net"), shlex.join(command), stdin=stdin)


def new_volume(image: Image, folder: Path) -> Path:
    """Create the directory of the image's only volume, with the owner, mode and content that the image has there."""
    (path,) = image.volumes
    source = next(layer / path[1:] for layer in image.layers if (layer / path[1:]).exists())
    subprocess.run(["cp", "-a", str(source), str(folder)], check=True)
    return folder


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "containers"


def _release(base: Path) -> str:
    found = re.search(r"^VERSION_CODENAME=(\w+)$", (base / "etc" / "os-release").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def _debian_sources(release: str) -> list[str]:
    """Return the lines of sources.list for ``release`` and its updates, from the configuration of this machine."""
    suites = (release, f"{release}-updates", f"{release}-security")
    text = _output("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages")
    lines = sorted({line for line in text.splitlines() if line.split()[1] in suites})
    if not any(line.split()[1] == release for line in lines):
        skip_or_fail(f"apt of this machine has no source of Debian {release}")
    return [f"deb {line}" for line in lines]


def _debian(release: str, python: str) -> Path:
    """Return the directory of a minimal Debian with its Python, which is kept in the user's cache folder."""
    key = hashlib.sha256(repr(BASE_PACKAGES).encode()).hexdigest()[:8]
    folder = _cache() / f"{release}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            mirror = next(line.split()[1] for line in _debian_sources(release) if line.split()[2] == release)
            unfinished = folder.with_suffix(".unfinished")
            # A process that was killed in debootstrap leaves mounts of it only in its own namespace.
            shutil.rmtree(unfinished, ignore_errors=True)
            packages = ",".join(BASE_PACKAGES)
            command = ["debootstrap", "--variant=minbase", f"--include={packages}", release, str(unfinished), mirror]
            _checked(_in_namespaces([], command), f"debootstrap {release}")
            unfinished.rename(folder)
    found = sorted(path.name for path in (folder / "usr" / "bin").glob("python3.*"))
    if f"python{python}" not in found:
        raise ValueError(f"Debian {release} has {found} instead of Python {python}")
    return folder


def _expand(text: str, values: Mapping[str, str]) -> str:
    """Replace ``$NAME`` and ``${NAME}``; a name without a value is a KeyError."""
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda match: values[match[1] or match[2]], text)


def _overlay(root: Path, lower: Sequence[Path], upper: Path | None = None, scratch: Path | None = None) -> list[str]:
    """Return the command that mounts layers at ``root``: read-only unless there is an upper one."""
    options = f"lowerdir={':'.join(map(str, lower))}"
    options += f",upperdir={upper},workdir={scratch}" if upper else ",ro"
    return ["mount", "-t", "overlay", "overlay", "-o", options, str(root)]


def _kernel_mounts(root: Path) -> list[list[str]]:
    """Return the commands that mount what every container has: /proc, /sys (read-only) and a few devices."""
    devices = [
        command
        for name in ("null", "zero", "full", "random", "urandom")
        for command in (["touch", f"{root}/dev/{name}"], ["mount", "--bind", f"/dev/{name}", f"{root}/dev/{name}"])
    ]
    return [
        ["mount", "-t", "proc", "proc", f"{root}/proc"],
        ["mount", "-t", "sysfs", "-o", "ro", "sysfs", f"{root}/sys"],
        ["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", f"{root}/dev"],
        *devices,
        ["ln", "-s", "/proc/self/fd", f"{root}/dev/fd"],
        ["mkdir", f"{root}/dev/shm"],
        ["mount", "-t", "tmpfs", "tmpfs", f"{root}/dev/shm"],
    ]


def _in_namespaces(commands: Sequence[Sequence[str]], last: Sequence[str], *options: str) -> list[str]:
    """Return the command that runs ``commands`` and then ``last``, as process 1, in namespaces of their own."""
    script = "\n".join(["set -e", *(shlex.join(command) for command in commands), f"exec {shlex.join(last)}"])
    kinds = ["--mount", "--propagation=private", "--pid", "--ipc", "--uts", "--fork", "--kill-child", *options]
    return ["unshare", *kinds, "sh", "-c", script]


def _inside(
    enter: Sequence[str],
    command: Sequence[str],
    environment: Mapping[str, str],
    user: str,
    folder: str,
    *,
    setpriv: Sequence[str] = (),
) -> list[str]:
    """Return the command that enters a root and runs ``command`` there as ``user``, with this environment only."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    uid, gid = user.split(":")
    # The signal of unshare's --kill-child, which the kernel forgets when a process changes its user.
    identity = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--pdeathsig=keep", *setpriv]
    return [*enter, "/usr/bin/env", "-i", f"--chdir={folder}", *variables, *identity, *command]


def _checked(command: list[str], what: str, *, stdin: str = "") -> None:
    done = subprocess.run(
        command, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=STEP_S
    )
    if done.returncode:
        raise RuntimeError(f"{what}: exit status {done.returncode}\n{command[-1]}\n{done.stdout[-6000:]}")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
