"""The container images and the compose file: what they copy and mount exists, what they run is accepted, and nothing
runs as root or writes outside its volumes. tests/end_to_end/test_container_image.py executes the instructions."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from penstock.node.config.node import NodeConfig, load_config
from tests.containers import ImageBuilder, Instruction, context_files, parse
from tests.unit.cli.test_grammar import LEAVES

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CONTAINERFILE = DEPLOY / "container" / "Containerfile"
PORTS = {1883, 8715, 8123, 8080}


def instructions() -> list[Instruction]:
    """The instructions of the container file, each with the name of its stage."""
    return parse(CONTAINERFILE.read_text(encoding="utf-8"))


def values(stage: str, name: str) -> list[str]:
    return [each.value for each in instructions() if (each.stage, each.name) == (stage, name)]


def document(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text(encoding="utf-8"))


def test_stages_come_from_the_pinned_base_or_an_earlier_stage() -> None:
    known = {"${PYTHON}"}
    for each in instructions():
        if each.name == "FROM":
            base, _, stage = each.value.partition(" AS ")
            assert base in known
            known.add(stage)
        if each.name == "COPY" and (source := re.match(r"--from=(\S+)", each.value)):
            assert source[1] in known


def test_pip_installs_pinned_files_and_the_own_wheel_only() -> None:
    commands = [each.value for each in instructions() if each.name == "RUN" and "pip install" in each.value]
    installs = [part for command in commands for part in command.split("&&") if "pip install" in part]
    assert len(installs) == 7
    for install in installs:
        if "/dist/" in install:
            assert "--no-deps --no-index" in install
        else:
            assert "--require-hashes" in install
            assert (ROOT / install.split("-r ")[1].strip()).is_file()


def test_the_build_context_has_what_the_build_copies() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    wanted = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert all((ROOT / name).exists() for name in wanted)
    # What hatchling reads: pyproject.toml names these.
    assert {"LICENSE", "README.md", "pyproject.toml", "hatch_build.py", "requirements", "src", "tools"} <= set(wanted)


def test_the_build_context_has_what_git_has_of_the_build_and_nothing_else() -> None:
    """Neither tests nor what builds leave: the console's libraries are fetched in the image."""
    found = {path.as_posix() for path in context_files(ROOT)}
    assert {"pyproject.toml", "src/penstock/node/node.py", "tools/core.py", "requirements/node.txt"} <= found
    assert {path.partition("/")[0] for path in found} <= {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    }
    assert not [path for path in found if "__pycache__" in path or "/web/vendor/" in path]


@pytest.mark.parametrize("pattern", ["src/?", "!src/penstock", "a/**/b", "[ab]"])
def test_an_unknown_pattern_of_the_build_context_is_refused(pattern: str, tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text(f"*\n{pattern}\n")
    with pytest.raises(ValueError, match="is not supported"):
        context_files(tmp_path)


@pytest.mark.parametrize(
    "instruction",
    [
        "ADD a b", 'SHELL ["sh"]', "RUN --mount=type=cache,target=/a true", 'RUN ["true"]', "COPY --chown=1 a b",
        "COPY *.txt /a/", "COPY a b /c/", "USER penstock", "WORKDIR relative", "HEALTHCHECK --retries=3 CMD []",
        "ENTRYPOINT penstock", 'VOLUME ["/data"]', "ONBUILD RUN true", "ENV A=$UNKNOWN",
    ],
)  # fmt: skip
def test_the_nightly_build_refuses_an_instruction_that_it_does_not_know(
    instruction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.containers._debian", lambda release, python: tmp_path / "base")
    builder = ImageBuilder(f"FROM python:3.11-slim-bookworm AS one\n{instruction}\n", ROOT, tmp_path)
    with pytest.raises((ValueError, KeyError)):
        builder.build("one")


def test_the_nightly_build_refuses_a_base_that_it_cannot_replace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"FROM alpine:3\.20: only python:X\.Y-slim-RELEASE"):
        ImageBuilder("FROM alpine:3.20 AS one\n", ROOT, tmp_path).build("one")


@pytest.mark.parametrize("stage", ["node", "pipeline"])
def test_an_image_runs_an_accepted_command_without_root(stage: str) -> None:
    assert values(stage, "USER") == ["10001:10001"]
    assert values(stage, "VOLUME") == values(stage, "WORKDIR") == ["/var/lib/penstock"]
    command = [*json.loads(values(stage, "ENTRYPOINT")[0]), *json.loads(values(stage, "CMD")[0])]
    program, *arguments = command
    assert program == "penstock"
    path = next(path for path in LEAVES if tuple(arguments[: len(path)]) == path)
    LEAVES[path].make_context(path[-1], arguments[len(path) :])  # raises for an unknown option


def test_the_node_s_image_exposes_its_listeners_and_checks_its_health() -> None:
    assert {int(port) for port in values("node", "EXPOSE")[0].split()} == PORTS
    (check,) = values("node", "HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert command[:2] == ["python", "-c"]
    # Nothing listens there, or something that is no node: the command is valid and fails.
    program = command[2].replace(":8080", ":1")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Connection refused" in done.stderr


def listeners(config: NodeConfig) -> set[int]:
    return {part.bind.port for part in (config.mqtt, config.tube_master, config.tube_broker, config.http)}


def test_the_configuration_of_the_image_is_valid_and_has_the_exposed_ports() -> None:
    config = load_config(DEPLOY / "container" / "penstock.yaml", {}, {})
    assert listeners(config) == PORTS
    assert str(config.data_dir).startswith("/var/lib/penstock/")
    assert config.security.passwords is not None


def test_the_compose_file_mounts_existing_files_and_hardens_every_service() -> None:
    folder = DEPLOY / "compose"
    compose = document(folder / "compose.yaml")
    created = {"./passwords", "./pipeline.password"}  # by the reader of the page
    page = (ROOT / "docs" / "operations" / "deploy.md").read_text(encoding="utf-8")
    for name, service in compose["services"].items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source in created:
                assert source.removeprefix("./") in page
            elif source.startswith("."):
                assert (folder / source).exists(), mount
            else:
                assert source in compose["volumes"]
        if "build" in service:
            assert (folder / service["build"]["context"]).resolve() == ROOT
            assert values(service["build"]["target"], "ENTRYPOINT"), name
        else:
            assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "a version, never latest"
    ports = {int(port.split(":")[-1]) for port in compose["services"]["penstock"]["ports"]}
    assert ports == PORTS


def test_prometheus_of_the_compose_file_scrapes_the_node_with_the_rules() -> None:
    folder = DEPLOY / "compose"
    prometheus = document(folder / "prometheus.yml")
    mounts = document(folder / "compose.yaml")["services"]["prometheus"]["volumes"]
    assert any(mount.split(":")[1] == f"/etc/prometheus/{prometheus['rule_files'][0]}" for mount in mounts)
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": ["penstock:8080"]}]


def test_the_pipeline_of_the_compose_file_is_valid(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    text = (DEPLOY / "compose" / "pipeline.yaml").read_text(encoding="utf-8")
    file = tmp_path / "pipeline.yaml"
    file.write_text(text.replace("/etc/penstock/pipeline.password", str(password)))
    command = shlex.split(f"pipeline validate {file}")
    program = "import sys; from penstock.cli.main import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
