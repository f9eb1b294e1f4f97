"""The container images: every instruction of ``deploy/container/Containerfile`` executed, and the node started.

There is no container engine; :mod:`tests.containers` executes the instructions in chroots, in namespaces that end with
each command. Equal to an image that an engine builds: the build context, the instructions and their order, Debian's
release, Python's minor version, all pinned Python and npm packages, user, environment, working directory, volume,
health check and command. Different: Debian's Python with its patches instead of the one of the image ``python`` in
/usr/local, and base packages in the versions of the mirror's day. By day, tests/unit/deploy/test_container.py checks
what the files say.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.containers import Container, Image, ImageBuilder, new_volume, require_namespaces, run_once
from tests.end_to_end.nodes import wait_until
from tests.unit.deploy.test_container import CONTAINERFILE, DEPLOY, ROOT, document

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(5_400)]

MOUNTS = Path("/proc/self/mountinfo")
PAGE = (ROOT / "docs" / "operations" / "deploy.md").read_text(encoding="utf-8")
PASSWORD = "not-a-secret"
CLIENT = {"PENSTOCK_USERNAME": "edge", "PENSTOCK_PASSWORD_FILE": "/etc/penstock/edge.password"}
SLEEPING = b"sleep\x0086399\x00"
LISTENING = """
import socket, sys
for port in sys.argv[1:]:
    socket.create_connection(("127.0.0.1", int(port)), 10).close()
"""

CONSOLE = r"""
import re
from urllib.request import Request, urlopen
url = "http://127.0.0.1:8080/"
page = urlopen(Request(url, headers={"Accept": "text/html"}), timeout=10).read().decode()
library = re.search(r'"\./([^"]+/vendor/preact\.mjs)"', page)
urlopen(url + library[1], timeout=10)
"""

METRICS = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:9108/metrics').read().decode())"


@pytest.fixture(autouse=True)
def no_mounts_are_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever a test does, the machine has no mount of it afterwards."""
    require_namespaces()
    yield
    assert str(tmp_path_factory.getbasetemp()) not in MOUNTS.read_text()


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> ImageBuilder:
    """The builder of the images; the stage `build`, which both need, is executed once."""
    require_namespaces()
    return ImageBuilder(CONTAINERFILE.read_text(encoding="utf-8"), ROOT, tmp_path_factory.mktemp("images"))


def documented_options() -> str:
    """The options of the command in the documentation that starts a node."""
    match = re.search(r"docker run --detach (.*?) penstock\n", PAGE.replace("\\\n", " "))
    assert match is not None
    return " ".join(match[1].split())


def configured(image: Image, tmp_path: Path) -> Path:
    """A directory for /etc/penstock with the configuration of a node and one user, made as the page says."""
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "penstock.yaml").write_bytes((DEPLOY / "container" / "penstock.yaml").read_bytes())
    (tmp_path / "once").mkdir()
    command = ["user", "create", "/etc/penstock/passwords", "edge"]
    run_once(image, tmp_path / "once", {"/etc/penstock": etc}, *command, stdin=PASSWORD)
    (etc / "edge.password").write_text(PASSWORD)
    uid = image.user.split(":")[0]
    subprocess.run(["chown", uid, etc / "passwords", etc / "edge.password"], check=True)
    return etc


def test_the_image_of_a_node(
    builder: ImageBuilder, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    started = time.monotonic()
    image = builder.build("node")
    built_s = time.monotonic() - started

    etc, options, uid = configured(image, tmp_path), documented_options(), image.user.split(":")[0]
    # What Container does is what these options say.
    assert "--read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges" in options
    assert "-v /etc/penstock:/etc/penstock:ro -v penstock-data:/var/lib/penstock" in options
    stop = re.search(r"--stop-timeout (\d+)", options)
    assert stop is not None
    volume = new_volume(image, tmp_path / "volume")
    assert str(volume.stat().st_uid) == uid
    (tmp_path / "container").mkdir()
    with Container(image, tmp_path / "container", volume, {"/etc/penstock": etc}) as node:
        healthy_s = node.start(name="penstock").wait_until_healthy()
        status = dict(line.split(":", 1) for line in node.output("cat", "/proc/1/status").splitlines())
        assert status["Uid"].split() == status["Gid"].split() == [uid] * 4
        assert status["NoNewPrivs"].split() == ["1"]
        assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
        for path in ("/new", "/opt/penstock/new", "/etc/penstock/new"):
            assert "Read-only file system" in node.run("touch", path).stderr
        node.output("touch", "/tmp/new", "/var/lib/penstock/new")
        assert node.run("mount", "-o", "remount,rw", "/").returncode != 0
        node.output("python", "-c", LISTENING, *map(str, image.ports))
        version = json.loads(node.output("penstock", "version", "--json"))
        assert version["core"] == "compiled"
        node.output("penstock", "kv", "set", "greeting", "hello", **CLIENT)
        assert node.output("penstock", "kv", "get", "greeting", **CLIENT).strip() == "hello"
        assert node.run("penstock", "kv", "get", "greeting").returncode == 1  # the node has users
        node.output("python", "-c", CONSOLE)
        before = time.monotonic()
        assert node.stop(float(stop[1])) == 0, node.log.read_text()
        stop_s = time.monotonic() - before

        node.start(name="penstock").wait_until_healthy()  # a new container with the same volume
        assert node.output("penstock", "kv", "get", "greeting", **CLIENT).strip() == "hello"
        assert node.stop(float(stop[1])) == 0
    record_property(
        "summary",
        f"built in {built_s:.0f} s, {image.size() / 1e6:.0f} MB on its base; healthy after {healthy_s:.1f} s, "
        f"stopped in {stop_s:.1f} s",
    )


def test_the_image_of_pipelines(
    builder: ImageBuilder, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The pipeline of the compose file and a node that it reads, with the options of the compose file; both in one
    network namespace instead of a network of two."""
    node_image = builder.build("node")
    started = time.monotonic()
    image = builder.build("pipeline")
    built_s = time.monotonic() - started

    service = document(DEPLOY / "compose" / "compose.yaml")["services"]["pipeline"]
    assert service["tmpfs"] == ["/tmp:exec"]
    assert "pipeline:/var/lib/penstock" in service["volumes"]
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    etc, own = configured(node_image, tmp_path), tmp_path / "pipeline-etc"
    own.mkdir()
    (own / "pipeline.yaml").write_bytes((DEPLOY / "compose" / "pipeline.yaml").read_bytes())
    (own / "pipeline.password").write_text(PASSWORD)
    subprocess.run(["chown", image.user, own / "pipeline.password"], check=True)
    binds, volume = {"/etc/penstock": own}, new_volume(image, tmp_path / "tables")
    table = volume / "lake" / "telemetry"

    def has_rows(count: int) -> bool:
        return DeltaTable.is_deltatable(str(table)) and DeltaTable(str(table)).to_pyarrow_table().num_rows == count

    for name in ("node", "one", "two"):
        (tmp_path / name).mkdir()
    data = new_volume(node_image, tmp_path / "data")
    with Container(node_image, tmp_path / "node", data, {"/etc/penstock": etc}) as node:
        node.start(name="penstock").wait_until_healthy()
        node.output("penstock", "mqtt", "pub", "telemetry/1", "one", **CLIENT)
        with Container(image, tmp_path / "one", volume, binds, tmp="exec", network_of=node) as pipeline:
            pipeline.start(*service["command"], name="pipeline")
            first_s = pipeline.wait_until(lambda: has_rows(1), "no row")
            status = dict(line.split(":", 1) for line in pipeline.output("cat", "/proc/1/status").splitlines())
            assert status["Uid"].split() == image.user.split(":")[:1] * 4
            assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
            assert "Read-only file system" in pipeline.run("touch", "/new").stderr
            assert json.loads(pipeline.output("penstock", "version", "--json"))["core"] == "compiled"
            assert "penstock_pipeline_" in pipeline.output("python", "-c", METRICS)
            assert pipeline.stop(grace_s) == 0, pipeline.log.read_text()
        node.output("penstock", "mqtt", "pub", "telemetry/2", "two", **CLIENT)
        with Container(image, tmp_path / "two", volume, binds, tmp="exec", network_of=node) as pipeline:
            pipeline.start(*service["command"], name="pipeline")  # continues where the first one ended
            pipeline.wait_until(lambda: has_rows(2), "not two rows")
            assert pipeline.stop(grace_s) == 0, pipeline.log.read_text()
    size = image.size() / 1e6
    record_property("summary", f"built in {built_s:.0f} s, {size:.0f} MB on its base; first row after {first_s:.0f} s")


def test_a_failed_instruction_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    text = "ARG PYTHON=python:3.11-slim-bookworm\nFROM ${PYTHON} AS one\nRUN echo before && mount && false\n"
    with pytest.raises(RuntimeError, match=r"one: exit status 1\n(.*\n)+before\n(.*\n)*overlay on / type overlay"):
        ImageBuilder(text, ROOT, tmp_path).build("one")


def is_sleeping() -> bool:
    """Whether the process of the next test runs, anywhere on the machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if path.read_bytes() == SLEEPING:
                return True
    return False


def test_a_container_ends_with_its_test(tmp_path: Path) -> None:
    """Also as another user than root: the kernel forgets --kill-child when a process changes its user."""
    text = """
FROM python:3.11-slim-bookworm AS one
USER 10001:10001
VOLUME /var/lib
HEALTHCHECK --timeout=5s CMD ["true"]
ENTRYPOINT ["sleep"]
CMD ["86399"]
"""
    image = ImageBuilder(text, ROOT, tmp_path).build("one")
    (tmp_path / "container").mkdir()
    with Container(image, tmp_path / "container", new_volume(image, tmp_path / "volume"), {}) as container:
        container.start(name="penstock").wait_until_healthy()
        assert is_sleeping()
    wait_until(lambda: not is_sleeping(), "the process continues")
