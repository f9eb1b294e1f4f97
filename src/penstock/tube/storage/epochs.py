"""The epochs of a log: how often a restart may have lost messages that readers had seen.

Only topics whose acknowledgement is weaker than "durable" can lose such messages, and only when their process did not
close in order: those of durability "memory" always, those of "flushed" when the machine started anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["begin_epoch", "decode_note", "encode_note", "may_have_lost", "note_name"]

Epochs = list[tuple[int, int]]
_KEPT = 1000


def note_name(topic: str, store: int) -> str:
    """The name of a store's note."""
    return f"epochs/{topic}-{store}"


def encode_note(epochs: Epochs) -> bytes:
    return json.dumps(epochs).encode()


def decode_note(note: bytes) -> Epochs:
    return [(int(epoch), int(start)) for epoch, start in json.loads(note)]


def may_have_lost(previous: Mapping[str, Any] | None, durability: str, boot: str) -> bool:
    """Whether a log of ``durability`` may have lost what was readable. ``previous``: `Disk.unclean`."""
    if previous is None or durability == "durable":
        return False
    return durability == "memory" or not boot or previous.get("boot") != boot


def begin_epoch(epochs: Epochs, end: int) -> Epochs:
    """``epochs`` with a new one whose log ends at ``end``: what had stood behind it is gone."""
    return [*epochs, (epochs[-1][0] + 1 if epochs else 1, end)][-_KEPT:]
