"""A topic as it is configured: what its brokers have in common, and what single brokers have instead of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.tube.codec.strings import DefaultConfig, TopicConfig

__all__ = ["TOPIC_DELETED", "TOPIC_GONE", "TOPIC_REMOVED", "Deployment", "Topic"]

TOPIC_DELETED = 1
TOPIC_REMOVED = 2
TOPIC_GONE = 3


class Deployment(NamedTuple):
    """What one broker has of a topic."""

    partitions: int = 3
    stores: int = 1
    accept_publish: bool = True
    accept_subscribe: bool = True
    status: int = 0
    """0 in use, 1 deleted (no service, data kept), 2 being removed with its data, 3 removed: the broker has it not."""
    delete_policy: str | None = None

    @property
    def partition_count(self) -> int:
        return self.partitions * self.stores


class Topic(NamedTuple):
    """A configured topic. ``brokers``: the ids that have it, None for all; sizes in bytes, None for the cluster's.

    The fields that `Deployment` has too are what its brokers have, but for those in ``own``.
    """

    name: str
    partitions: int = 3
    stores: int = 1
    brokers: tuple[int, ...] | None = None
    accept_publish: bool = True
    accept_subscribe: bool = True
    max_message_bytes: int | None = None
    status: int = 0
    delete_policy: str | None = None
    own: tuple[tuple[int, Deployment], ...] = ()
    """By id, the brokers that differ. A broker that the topic left while it is on all others has status 3."""

    @property
    def common(self) -> Deployment:
        """What a broker has that has nothing of its own."""
        return Deployment(
            self.partitions, self.stores, self.accept_publish, self.accept_subscribe, self.status, self.delete_policy
        )

    @property
    def deployments(self) -> list[Deployment]:
        """What brokers have of it, each once; brokers that may join count."""
        own = dict(self.own)
        others = self.brokers is None or any(number not in own for number in self.brokers)
        return [self.common] * others + [each for each in own.values() if each.status < TOPIC_GONE]

    @property
    def in_use(self) -> bool:
        """Whether it is deleted nowhere, or not everywhere."""
        return any(not each.status for each in self.deployments)

    @property
    def writable(self) -> bool:
        """Whether a broker is to take records for it."""
        return any(each.accept_publish and not each.status for each in self.deployments)

    @property
    def removing(self) -> bool:
        """Whether a broker is to remove its data."""
        return any(each.status == TOPIC_REMOVED for each in self.deployments)

    def at(self, broker_id: int) -> Deployment:
        """What this broker has, if it is one of the topic's (`on`)."""
        return next((each for number, each in self.own if number == broker_id), self.common)

    def on(self, broker_id: int) -> bool:
        return (self.brokers is None or broker_id in self.brokers) and self.at(broker_id).status < TOPIC_GONE

    def config(self, default: DefaultConfig, broker_id: int) -> TopicConfig:
        """As pushed to a broker: what equals its default is left blank."""
        here = self.at(broker_id)
        return TopicConfig(
            self.name,
            _unless(here.partitions, default.partitions),
            None if here.accept_publish else False,
            None if here.accept_subscribe else False,
            delete_policy=None if here.delete_policy == default.delete_policy else here.delete_policy,
            stores=_unless(here.stores, default.stores),
            status=here.status,
            max_message_bytes=self.max_message_bytes,
        )

    def changed(self, own: Mapping[int, Deployment], common: Deployment | None = None) -> Topic:
        """With other properties on the brokers of ``own``, and with another ``common`` where one is given."""
        base = self.common if common is None else common
        differing = {number: each for number, each in {**dict(self.own), **own}.items() if each != base}
        return self._replace(**base._asdict(), own=tuple(sorted(differing.items())))

    def everywhere(self, change: Callable[[Deployment], Deployment]) -> Topic:
        """With ``change`` made on every broker."""
        return self.changed({number: change(each) for number, each in self.own}, change(self.common))

    def joined(self, broker_id: int, deployment: Deployment) -> Topic:
        """On a further broker."""
        brokers = None if self.brokers is None else tuple(sorted({*self.brokers, broker_id}))
        return self._replace(brokers=brokers).changed({broker_id: deployment})

    def left(self, broker_id: int) -> Topic:
        """Without this broker; ``brokers`` is empty after the last one of those that are named."""
        if self.brokers is None:
            return self.changed({broker_id: self.common._replace(status=TOPIC_GONE)})
        return self._replace(
            brokers=tuple(number for number in self.brokers if number != broker_id),
            own=tuple(entry for entry in self.own if entry[0] != broker_id),
        )


def _unless(value: int, inherited: int) -> int | None:
    return None if value == inherited else value
