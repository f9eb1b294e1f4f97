"""When an acknowledgement leaves: after the disk has it, after the kernel has it, or at once."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Durability"]


class Durability(StrEnum):
    """Durability that an acknowledgement guarantees. The operator chooses; ``DURABLE`` is the default everywhere."""

    DURABLE = "durable"
    """After fsync: survives loss of power."""
    FLUSHED = "flushed"
    """After the write: survives the end of the process, not loss of power."""
    MEMORY = "memory"
    """At once; written behind. A crash may lose what was acknowledged last."""
