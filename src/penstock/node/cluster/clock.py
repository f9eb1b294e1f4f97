"""The clock of a cluster for expiry times, which continues when another node becomes active.

The active node puts the time with each commit and once a second into etcd, with its boot identifier and the offset to
the clock of its machine since the boot. A standby on the same boot continues exactly, another one counts on from the
receipt, so that after a takeover it is late, never early.
"""

from __future__ import annotations

import json
import logging
import time

from penstock.node.cluster.state import decode_object
from penstock.runtime.io.clock import MAX_STEP_MS, SteppedClock, boot_id, boot_ms, wall_clock_ms

__all__ = ["ClusterClock"]

_log = logging.getLogger("penstock.cluster")


class ClusterClock:
    """The clock of a node, which follows that of the active node with :meth:`adjust` until :meth:`start`.

    ``runs``: whether the cluster's clock was read while the node that had set it was active, or was set since the boot
    of this machine. A later term does not reset it: if this node first reads its clock after it has ended, it is late
    by the time without an active node, as documented, whereas the system clock may be ahead.
    """

    def __init__(self) -> None:
        self.runs = False
        self.offset_ms: int | None = None
        """The cluster's clock minus :func:`boot_ms`, as far as it is known."""
        self._term: object = None
        """The term in which that clock was set."""
        self._lag_ms = 0
        """Time by which that clock was behind the clock of versions of the node that had set it."""
        self._versions_offset: int | None = None
        """Clock of the active node's versions minus :func:`boot_ms`, when it was last set."""
        self._stamp_read = b""
        """The stamp that was last read."""
        self._versions: SteppedClock | None = None
        """Clock of this node's versions, of an elected node."""

    def adjust(self, value: bytes, active_term: int | None) -> int:
        """Adjust this clock to the stamp ``value`` in etcd, and return the time of the stamp in ms; 0: unreadable.

        The active node, of ``active_term``, puts a stamp each second; that of an earlier one may be old. The clock of a
        node may be behind that of the node before it, and the expiry times of its term are as well: so only the clock
        of the last term counts.
        """
        stamp = decode_object(value)
        try:
            time_ms, boot, offset = int(stamp["time_ms"]), stamp["boot"], int(stamp["offset_ms"])
        except (KeyError, ValueError, TypeError):
            _log.warning("the clock of the cluster cannot be read: %r", value)
            return 0
        if stamp.get("term") != self._term:
            self._term, self.offset_ms = stamp.get("term"), None
        versions = stamp.get("versions_ms")
        self._lag_ms = max(0, versions - time_ms) if isinstance(versions, int) else 0
        if boot is None or boot != boot_id():
            offset = time_ms - boot_ms()
            set_ms = boot_ms()
            self.runs |= active_term is not None and stamp.get("term") == active_term
        else:  # the clock was set on this machine, where it continues exactly
            set_ms = time_ms - offset
            self.runs = True
        self.offset_ms = offset if self.offset_ms is None else max(self.offset_ms, offset)
        if value != self._stamp_read:  # otherwise it has become older since
            self._stamp_read = value
            self._versions_offset = versions - set_ms if isinstance(versions, int) else None
        return time_ms

    def received(self, term: object, offset_ms: int) -> None:
        """Continue at least as far as the commits that a standby has received in ``term``."""
        if term == self._term:
            self.offset_ms = max(self.offset_ms or offset_ms, offset_ms)

    def start(self) -> None:
        """Set the clock of an elected node, after the last :meth:`adjust`.

        A node that has seen no active node since its machine was started, because all nodes were stopped, uses its
        system clock, as a single node does after a reboot.
        """
        offset = self.offset_ms
        if offset is None or not self.runs:
            wall = wall_clock_ms() - boot_ms() - self._lag_ms
            offset = wall if offset is None else max(offset, wall)
        self.offset_ms = offset

    def version_clock(self, hold_s: float) -> SteppedClock:
        """Return the clock of versions, of an elected node: the system clock without its steps.

        A system clock that differs from the clock of the previous active node has stepped: one of them is wrong, and
        versions of a wrong clock are permanent.
        """
        last = self._versions_offset
        wall_ms = wall_clock_ms()
        if last is None or not self.runs or abs(wall_ms - boot_ms() - last) <= MAX_STEP_MS:
            self._versions = SteppedClock(hold_s=hold_s)
            return self._versions
        # The first reading is what the clock continues from; later ones show for how long the step lasts.
        readings = iter([(boot_ms() + last) * 1_000_000])
        self._versions = SteppedClock(hold_s=hold_s, wall=lambda: next(readings, 0) or time.time_ns())
        return self._versions

    def now(self) -> int:
        """Time in ms since 1970; it does not step."""
        assert self.offset_ms is not None
        return boot_ms() + self.offset_ms

    def stamp(self, term: int) -> bytes:
        """The stamp of the active node of ``term``, for etcd."""
        stamp = {"term": term, "time_ms": self.now(), "boot": boot_id(), "offset_ms": self.offset_ms}
        if self._versions is not None:
            stamp["versions_ms"] = self._versions.now()
        return json.dumps(stamp).encode()
