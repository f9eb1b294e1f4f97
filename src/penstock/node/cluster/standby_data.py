"""The data of a standby: environments that follow the log in etcd, their positions, and their lag.

They are in the data directory of the node, which starts on them when it is elected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.cluster.client import EtcdClient
from penstock.cluster.commit import Head
from penstock.cluster.leadership import why_not_eligible
from penstock.cluster.standby import Standby, StandbyLog
from penstock.errors import ShortageError, StorageError
from penstock.mqtt.storage import environment_at as mqtt_environment
from penstock.node.cluster.clock import ClusterClock
from penstock.node.cluster.state import LOGS, logs_of
from penstock.node.config.cluster import ClusterSection
from penstock.node.replacement import complete_replacement
from penstock.runtime.io.commit_log import LogPosition, decode_position
from penstock.runtime.io.files import Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.statestore.service.preload import PreloadedKeys
from penstock.statestore.service.storage import environment_at as statestore_environment
from penstock.tube.master.metadata import environment_at as tube_environment

__all__ = ["StandbyData"]


class StandbyData:
    """The environments below ``path`` of a node. Call all methods in one thread; another one may read the attributes.

    ``clock`` gets the times of commits that were received.
    """

    def __init__(self, client: EtcdClient, section: ClusterSection, path: Path, clock: ClusterClock) -> None:
        self.standby: Standby | None = None
        """Applies the commits; None while no environment is open."""
        self.keys: PreloadedKeys | None = None
        """Keys of the state store, which an elected node uses; None if it did not follow."""
        self.lag_commits = self.lag_s = math.nan
        """Commits that this node lacks, and for how many seconds; NaN: not known."""
        self.seen_ms = 0
        """Time of the cluster's clock up to which this node has all commits."""
        self.environments: dict[str, LoggedEnvironment] = {}
        """The open environments, by log."""
        self._client = client
        self._section = section
        self._path = path
        self._clock = clock
        self._stored: dict[str, LogPosition | None] | None = None
        """Position of each environment, read while they are not open."""

    @property
    def names(self) -> list[str]:
        """Names of the logs that are followed."""
        return list(self.environments)

    def applied(self) -> dict[str, int]:
        """Return the last commit of each environment, for the report of the node; empty if it is not known."""
        if self.standby is None or not self.standby.has_read:
            return {}
        return {name: position.sequence for name, position in self.standby.positions.items()}

    @property
    def lack(self) -> ShortageError | None:
        """The error if this node lacks disk space or descriptors for commits, so that it could not start as the active
        node."""
        return next((each.lack for each in self.environments.values() if each.lack is not None), None)

    def complete_replacement(self) -> None:
        """Put a loaded snapshot in its place, before an environment is opened: one that is replaced later would go
        back. Raises StorageError."""
        try:
            complete_replacement(self._path)
        except OSError as error:
            raise StorageError(
                f"a loaded snapshot cannot be put in its place: {error}",
                path=str(self._path),
                hint="check the disk of this node; it continues automatically",
            ) from error

    def follow(self, names: Sequence[str]) -> None:
        """Open the environments with the logs of the active node, and begin to follow. Raises StorageError."""
        section = self._section
        logs = {name: StandbyLog(self._client, section.prefix, name) for name in names}
        self.environments = {name: LoggedEnvironment(self.environment_at(name), log=log) for name, log in logs.items()}
        preloads = {name: preload for name, preload in self._preloads().items() if name in names}
        for name, environment in self.environments.items():
            if (preload := preloads.get(name)) is None:
                environment.open(lambda _: None)
            else:
                preload.open(environment)
        self.standby = Standby(self._client, section.prefix, section.node, self.environments, logs, preloads)
        self.standby.start()

    def measure_lag(self, heads: Mapping[str, Head | None], stamp_ms: int) -> bool:
        """Measure the lag behind ``heads``, the last commits in etcd, when the cluster's clock was at ``stamp_ms``;
        returns True if there is none."""
        if self.standby is None or self.standby.failure is not None:
            self.lag_commits = self.lag_s = math.nan
            return False
        positions = self.standby.positions
        lacks = [head.sequence - positions[name].sequence for name, head in heads.items() if head is not None]
        self.lag_commits = sum(max(0, count) for count in lacks)
        if self.lag_commits:  # while commits follow each other, there are always some that it has not read
            self.seen_ms = max(self.seen_ms, self.standby.applied_ms)
        else:
            self.seen_ms = stamp_ms
        self.lag_s = max(0, stamp_ms - self.seen_ms) / 1000 if self.seen_ms else math.nan
        return not self.lag_commits

    def why_not_eligible(self, *, has_log: bool) -> str | None:
        """Return the reason why a node with these data may not stand for election; None if it may. ``has_log``: etcd
        has a log of the cluster. Raises UnavailableError, RefusedError, StorageError."""
        prefix = self._section.prefix
        if self.standby is not None:
            return why_not_eligible(self._client, prefix, self.standby.positions)
        if self._stored is None:
            self._stored = {name: self.stored_position(name) for name in logs_of(self._section)}
        stored = self._stored
        if has_log:
            return why_not_eligible(self._client, prefix, stored)
        member = [name for name, position in stored.items() if position is not None and not position.epoch]
        if member and not self._section.new_log:
            return (
                f"etcd has no log of the cluster {self._section.name!r}, and this data directory belongs to a cluster:"
                " etcd was emptied, or `cluster.name` has changed; on the node with the newest data, set"
                " `cluster.new_log: true`"
            )
        return None

    def release(self) -> Mapping[str, LogPosition | None]:
        """Close the environments for a snapshot that replaces them; returns their positions."""
        names = self.names
        self.close()
        self._stored = None
        return {name: self.stored_position(name) for name in names}

    def close(self, *, elected: bool = False) -> None:
        """Stop following; LMDB then has every commit that was received. Only an elected node uses what it preloaded."""
        standby, self.standby = self.standby, None
        if standby is not None:
            standby.close()
            if elected:
                standby.catch_up()
            if standby.clock_offset is not None:
                self._clock.received(standby.clock_term, standby.clock_offset)
        if not elected:
            self.keys = None
        environments, self.environments = self.environments, {}
        for environment in environments.values():
            environment.close()

    def stored_position(self, name: str) -> LogPosition | None:
        """Return the last commit of an environment that is not open; None: it has none."""
        if not (self._path / LOGS[name] / "data.mdb").exists():
            return None
        environment = self.environment_at(name)
        try:
            stored = environment.open(lambda transaction: transaction.get(b"log", db=environment.tables["meta"]))
        finally:
            environment.close()
        return None if stored is None else decode_position(stored)

    def environment_at(self, name: str) -> LmdbEnvironment:
        """Return the environment of a log, which is not opened."""
        make = {"statestore": statestore_environment, "mqtt": mqtt_environment, "tube-master": tube_environment}[name]
        return make(self._path / LOGS[name], Durability.DURABLE)

    def _preloads(self) -> Mapping[str, PreloadedKeys]:
        """Memory that the standby fills for its election, by log."""
        self.keys = PreloadedKeys()
        return {"statestore": self.keys}
