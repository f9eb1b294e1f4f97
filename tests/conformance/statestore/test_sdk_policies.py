"""Each SDK under a policy that grants what the guides say: to publish requests, and to subscribe as it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.node.config.mqtt import Security
from penstock.node.config.node import NodeConfig
from penstock.node.node import Node
from tests.conformance.statestore.sdk_clients import DOTNET, GO, RUST, Profile, RefusedByStoreError, SdkClient

FREE = "127.0.0.1:0"
STORE = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8"
RULES = """
rules:
  - principals: {clientIds: ["*"]}
    brokerResources:
      - {method: Connect}
      - {method: Publish, topics: ["STORE/command/invoke"]}
      - {method: Subscribe, topics: [SUBSCRIBES]}
    stateStoreResources:
      - {method: ReadWrite, keys: ["app/*"]}
""".replace("STORE", STORE)


@pytest.mark.parametrize(
    ("sdk", "subscribes"),
    [
        (GO, ["clients/{clientIdHex}/#"]),
        (RUST, ["clients/{clientId}/#", f"clients/{STORE}/{{clientIdHex}}/command/notify/+"]),
        (DOTNET, ["clients/{clientId}/#", f"clients/{STORE}/{{clientId}}/command/notify"]),
    ],
    ids=lambda value: str(value.name) if isinstance(value, Profile) else "",
)
async def test_permissions_of_the_guide_are_sufficient(tmp_path: Path, sdk: Profile, subscribes: list[str]) -> None:
    policies = tmp_path / "policies.yaml"
    policies.write_text(RULES.replace("SUBSCRIBES", ", ".join(f'"{topic}"' for topic in subscribes)))
    listeners = dict.fromkeys(("mqtt", "tube_master", "tube_broker", "tube_broker_http", "http"), FREE)
    settings = {"data_dir": tmp_path / "data", "security": Security(policies=policies), **listeners}
    node = Node(NodeConfig.model_validate(settings))
    ready = await node.start()
    try:
        async with SdkClient(int(ready.mqtt.rpartition(":")[2]), sdk) as client:
            await client.observe("app/k")
            for number in range(4):  # the later ones go the quick way
                applied, version = await client.set("app/k", f"{number}")
                assert applied
                told = await client.notice()
                assert (told.value, told.version) == (f"{number}".encode(), version)
            for refused in (client.get("other"), client.set("other", "1"), client.observe("other")):
                with pytest.raises(RefusedByStoreError, match=r"^not authorized$"):
                    await refused
    finally:
        await node.close()
