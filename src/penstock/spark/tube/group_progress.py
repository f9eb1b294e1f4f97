"""Progress of a query, published as committed offsets of a consumer group: `penstock tube group lag GROUP` shows it.

In a thread of its own: a broker that is slow, or refuses, holds no micro-batch up. Only the newest positions count, so
that batches which follow each other quickly cost one round.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.spark.tube.offsets import Positions
from penstock.spark.tube.tube_client import TubeClient

__all__ = ["GroupProgress"]

CLOSE_S = 20.0
"""Longest time that a query which stops waits for its last offsets to be committed. Each commit is a registration, for
which a busy broker of Apache's needs seconds; one that is cut off keeps its partition from the group's next commit."""

_log = logging.getLogger(__name__)


class GroupProgress:
    """Shows positions as those of ``group``; ``connect`` makes the connection that only its thread uses."""

    def __init__(self, connect: Callable[[], TubeClient], group: str) -> None:
        self._connect = connect
        self._group = group
        self._wanted: Positions = {}
        self._changed = threading.Condition()
        self._closing = False
        self._shown: Positions = {}
        self._refused: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="positions", daemon=True)
        self._thread.start()

    def show(self, positions: Positions) -> None:
        """Everything before ``positions`` is committed. Returns at once."""
        with self._changed:
            self._wanted = positions
            self._changed.notify()

    def close(self) -> None:
        """Show what is left, for a short time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        with self._connect() as tube:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self._wanted != self._shown)
                    wanted, closing = self._wanted, self._closing
                self._show(tube, wanted)
                if closing:
                    return

    def _show(self, tube: TubeClient, wanted: Positions) -> None:
        for partition, position in wanted.items():
            if self._shown.get(partition) == position:
                continue
            try:
                if tube.address(partition) is None:
                    tube.partitions([partition.topic])
                tube.commit_offset(partition, self._group, position)
            except PenstockError as error:
                if error.what not in self._refused:
                    self._refused.add(error.what)
                    _log.warning("the position of group %s is not shown: %s", self._group, error.what)
        # Also what failed: the next batch brings newer positions, and nothing depends on these.
        self._shown = wanted
