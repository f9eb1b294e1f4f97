"""Settings that all nodes of a cluster should have in common: an active node acts by its own configuration.

A node puts their checksums into its report, so that a difference is found before a takeover.
"""

from __future__ import annotations

import json
import zlib
from pathlib import PurePath

from penstock.node.config.node import NodeConfig

__all__ = ["settings_checksums"]


def settings_checksums(config: NodeConfig) -> dict[str, int]:
    """Return the checksum of each of these settings, by name.

    Defaults do not count, because a later version may have more of them, and files count by their names, because each
    node may have them in another directory.
    """
    settings: dict[str, object] = {
        "bridges": [bridge.model_dump(exclude_defaults=True) for bridge in config.bridges],
        "mqtt.limits": config.mqtt.model_dump(include={"limits"}, exclude_defaults=True),
        "rules": [rule.model_dump(exclude_defaults=True) for rule in config.rules],
        "statestore": config.statestore.model_dump(exclude_defaults=True),
        "tube.topics": {name: topic.model_dump(exclude_defaults=True) for name, topic in config.tube.topics.items()},
    }
    return {
        name: zlib.crc32(json.dumps(value, sort_keys=True, default=_as_text).encode())
        for name, value in settings.items()
    }


def _as_text(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value.name if isinstance(value, PurePath) else str(value)
