"""`penstock doctor`, with and without a running node."""

from __future__ import annotations

import asyncio
import json
import tarfile
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.spark_host import Machine
from penstock.errors import ConfigError, StorageError
from penstock.node.node import Node
from penstock.spark.environment.java import Java
from tests.unit.node.test_node import config


async def run(*args: object) -> int:
    return await asyncio.to_thread(main, ["doctor", *(str(arg) for arg in args)])


async def test_the_node_of_the_data_directory_is_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # without a configuration file
    data = tmp_path / "data"
    node = Node(config(data))
    ready = await node.start()
    try:
        assert await run("--data-dir", data) == 0
        shown = capfd.readouterr().out
        assert f"ready, pid {ready.pid} at http://{ready.http}" in shown
        assert "listeners" not in shown  # the node uses the addresses
        failure = StorageError("the disk failed", why="input/output error", hint="replace it")
        node.health.add_problem("tube", lambda: failure)
        assert await run("--data-dir", data, "--json") == 1
        rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        assert {
            "level": "problem",
            "part": "tube",
            "what": "the disk failed",
            "why": "input/output error",
            "hint": "replace it",
        } in rows
    finally:
        await node.close()


async def test_the_variables_of_a_client_name_the_node_to_check(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the names of those of a node's listeners, which are in use by the node that the client uses."""
    monkeypatch.chdir(tmp_path)
    node = Node(config(tmp_path / "elsewhere"))
    ready = await node.start()
    token = ("--admin-token-file", tmp_path / "elsewhere" / "tube" / "admin-token")
    bundle = tmp_path / "support.tar.gz"
    try:
        monkeypatch.setenv("PENSTOCK_HTTP", ready.http)
        monkeypatch.setenv("PENSTOCK_TUBE_MASTER", ready.tube_master)
        assert await run(*token, "--bundle", bundle) == 0
        shown = capfd.readouterr().out
        assert f"ready, pid {ready.pid} at http://{ready.http}" in shown
        assert "is in use" not in shown
        with tarfile.open(bundle) as archive:
            names = {Path(name).name for name in archive.getnames()}
        assert "overview.json" in names
        assert "configuration.yaml" not in names  # that would not be the configuration of the node
        (tmp_path / "penstock.yaml").write_text("data_dir: data\n", encoding="utf-8")
        assert await run(*token) == 1  # now they are addresses of the node that is configured here
        assert f"{ready.http} (http) is in use" in capfd.readouterr().out
        assert await run(*token, "--http", ready.http) == 0
    finally:
        await node.close()
    assert await run("--http", ready.http) == 1
    assert f"no node is reachable at http://{ready.http}" in capfd.readouterr().out


def test_the_archive_of_the_classes_of_spark_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "classes.jsa"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.spark.environment.class_archive.installation", lambda **_: tmp_path)
    monkeypatch.setattr("penstock.spark.environment.class_archive.archive_path", lambda *_: archive)
    monkeypatch.setattr("penstock.spark.environment.java.find_java", lambda **_: Java(tmp_path / "java", 17, "test"))
    monkeypatch.setattr("penstock.cli.spark_host.host_problems", lambda *_: ())

    def row() -> dict[str, str]:
        main(["doctor", "--json"])
        (found,) = (each for each in map(json.loads, capfd.readouterr().out.splitlines()) if each["part"] == "spark")
        return dict(found)

    found = row()
    assert (found["level"], found["hint"]) == ("ok", "start pipelines faster: penstock pipeline warm-up")
    archive.touch()
    assert row()["what"] == f"Java is {tmp_path / 'java'}, and its classes are archived"

    def none(**_: object) -> Java:
        raise ConfigError("no Java was found", hint="install one")

    monkeypatch.setattr("penstock.spark.environment.java.find_java", none)
    assert (row()["level"], row()["what"]) == ("warning", "no Java was found")
    monkeypatch.setattr("penstock.cli.doctor.find_spec", lambda _: None)
    main(["doctor", "--json"])
    assert '"spark"' not in capfd.readouterr().out


def test_a_check_leaves_the_cache_directory_of_spark_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    main(["doctor", "--json"])
    assert '"spark"' in capfd.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_properties_of_the_machine_that_break_spark_are_warnings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "ld-musl-x86_64.so.1").touch()
    machine = Machine(tmp_path, {"JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={tmp_path}"}, "glibc", "UTF-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.cli.spark_host.this_machine", lambda: machine)
    monkeypatch.setattr("penstock.cli.spark_host.TEMPORARY_BYTES", 0)
    monkeypatch.setattr("penstock.spark.environment.class_archive.installation", lambda **_: None)
    monkeypatch.setattr("penstock.spark.environment.java.find_java", lambda **_: Java(tmp_path / "java", 17, "PATH"))
    main(["doctor", "--json"])
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    (found,) = (row for row in rows if row["part"] == "spark" and row["level"] == "warning")
    assert found["what"] == "/lib/ld-musl-x86_64.so.1 exists, although this system has glibc"
    assert "apt remove musl" in found["hint"]


async def test_a_bundle_has_state_and_configuration_but_no_secrets(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, bundle = tmp_path / "data", tmp_path / "support.tar.gz"
    bundle.write_bytes(b"an earlier one")
    bundle.chmod(0o644)
    file = tmp_path / "penstock.yaml"
    file.write_text("data_dir: data\ntube: {admin_token: a-long-secret}\n", encoding="utf-8")
    node = Node(config(data))
    await node.start()
    try:
        await run(file, "--bundle", bundle)
    finally:
        await node.close()
    with tarfile.open(bundle) as archive:
        texts = {
            Path(entry.name).name: content.read().decode()
            for entry in archive.getmembers()
            if (content := archive.extractfile(entry)) is not None
        }
        assert all(entry.mode == 0o600 for entry in archive.getmembers())
    assert set(texts) == {
        *("findings.jsonl", "configuration.yaml", "metrics.txt", "overview.json", "history.json", "events.json"),
        *("rules.json", "topics.json", "groups.json", "clients.json", "brokers.json", "pipelines.json"),
        "log-levels.json",
    }
    assert bundle.stat().st_mode & 0o777 == 0o600
    assert "admin_token: '***'" in texts["configuration.yaml"]
    assert "penstock_node" in texts["metrics.txt"]
    token = (data / "tube" / "admin-token").read_text(encoding="utf-8").strip()
    assert not [name for name, text in texts.items() if "a-long-secret" in text or token in text]
    assert "no passwords and no payloads" in capfd.readouterr().err


async def test_an_invalid_configuration_is_a_finding(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, bundle = tmp_path / "penstock.yaml", tmp_path / "support.tar.gz"
    file.write_text("mqtt: {bindd: 127.0.0.1:1883}\n", encoding="utf-8")
    assert await run(file, "--bundle", bundle) == 1
    out = capfd.readouterr().out
    assert "mqtt.bindd" in out
    assert "problems: 1, warnings: " in out
    with tarfile.open(bundle) as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert names == {"findings.jsonl", "configuration.txt"}


async def test_a_bundle_that_cannot_be_written_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "none" / "support.tar.gz"
    assert await run("--data-dir", tmp_path / "data", "--bundle", bundle) == 2
    error = capfd.readouterr().err
    assert f"--bundle {bundle} cannot be written" in error
    assert "why: No such file or directory" in error


async def test_the_option_for_a_bundle_is_named_by_the_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert await run("bundle") == 2
    assert "  hint: for a support bundle: penstock doctor --bundle FILE\n" in capfd.readouterr().err
