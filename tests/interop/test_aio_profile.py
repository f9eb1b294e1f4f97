"""Applications of Azure IoT Operations against ``penstock up --profile aio``, with what ``penstock aio env`` prints."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import RefusedError
from penstock.mqtt.client import MqttClient, TlsOptions, TokenAuthentication
from penstock.statestore.client.client import StateStoreClient
from tests.end_to_end.nodes import PENSTOCK, RunningNode
from tests.interop.test_statestore_rust import SCENARIOS, is_current, program, run

__all__ = ["program"]

CONFIG = "profile: aio\nmqtt: {listeners: {aio: {bind: 127.0.0.1:0}}}\n"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    with RunningNode(tmp_path, CONFIG) as running:
        yield running


def variables(node: RunningNode) -> dict[str, str]:
    (found,) = node.rows("aio", "env", "--client-id", "line-3")
    return found


async def test_the_variables_connect_a_client_with_tls_and_a_token(node: RunningNode) -> None:
    found = variables(node)
    host, port = found["AIO_BROKER_HOSTNAME"], int(found["AIO_BROKER_TCP_PORT"])
    tls = TlsOptions(found["AIO_TLS_CA_FILE"])
    token = TokenAuthentication(Path(found["AIO_SAT_FILE"]))
    url = f"mqtts://{host}:{port}"
    async with StateStoreClient.connect(
        url, client_id=found["AIO_MQTT_CLIENT_ID"], tls=tls, authentication=token
    ) as store:
        await store.set("line-3/recipe", "7")
    assert node.out("kv", "get", "line-3/recipe") == "7"
    for authentication in (None, TokenAuthentication(lambda: b"guessed")):
        with pytest.raises(RefusedError):
            async with MqttClient(url, tls=tls, authentication=authentication, reconnect=False):
                pass


def test_the_exported_variables_are_those_of_json_and_survive_a_restart(node: RunningNode) -> None:
    found = variables(node)
    command = 'eval "$(' + " ".join(PENSTOCK) + ' aio env --client-id line-3)"; env'
    done = subprocess.run(["bash", "-c", command], env=node.environment, capture_output=True, text=True, check=True)
    exported = dict(line.split("=", 1) for line in done.stdout.splitlines() if line.startswith("AIO_"))
    assert exported == found
    options = node.out("aio", "env", "--client-id", "line-3", "--format", "docker").split()
    pairs = [option.removeprefix("--env=").split("=", 1) for option in options if option.startswith("--env=")]
    volumes = [option.removeprefix("--volume=").split(":") for option in options if option.startswith("--volume=")]
    mounts = {inside: outside for outside, inside, _ in volumes}
    # In the container the files have the paths of their mounts.
    assert {name: mounts.get(value, value) for name, value in pairs} == found
    assert len(mounts) == 2
    assert {"--network=host", f"--user={os.getuid()}:{os.getgid()}"} <= set(options)
    blank = node.penstock("aio", "env", "--client-id", "line 3", "--format", "docker")
    assert (blank.returncode, b"cannot be an option of docker run" in blank.stderr) == (2, True)
    token = Path(found["AIO_SAT_FILE"]).read_bytes()
    node.stop()
    stopped = node.penstock("aio", "env")
    assert stopped.returncode == 1
    assert b"penstock up --profile aio" in stopped.stderr
    node.start()
    assert Path(variables(node)["AIO_SAT_FILE"]).read_bytes() == token


async def test_the_rust_sdk_with_these_variables(node: RunningNode, program: str) -> None:
    assert is_current()
    environment = os.environ | variables(node)
    arguments = [f"{name}={value}" for name, value in environment.items() if name.startswith("AIO_")]
    code, output = await run("env", *arguments, program, "env", *SCENARIOS, timeout_s=60)
    assert code == 0, output
    assert output.split() == SCENARIOS
