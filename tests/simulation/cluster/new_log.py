"""The operator who restores a backup of etcd and starts a new log, as documented, while clients send requests.

Both nodes are stopped, the active one last: it has all commits. A backup without the newest ones is restored, the keys
of the cluster are deleted, and the node begins a new log with its data. Then it is stopped, and the other node gets a
copy. At times the other node is started before, with its old data: it must wait, also if the first one ends. Other
faults begin at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from penstock.cluster.log import leader_key
from tests.simulation.cluster.etcd import Etcd
from tests.simulation.cluster.history import HistoryEnded
from tests.simulation.cluster.node import PREFIX, Node
from tests.simulation.cluster.threads import Simulator

__all__ = ["BEGUN", "start_new_log"]

BEGUN: Final = "new log begun"
"""What happened, once both nodes run with it."""
LOOK_S: Final = 0.1


def start_new_log(etcd: Etcd, nodes: Sequence[Node], happened: list[str]) -> None:
    """Replace the data of etcd by those of now, some seconds later; in a thread of the operator.

    Raises:
        HistoryEnded: the node with the newest commits was killed, so that some of them may be lost.
    """
    simulator, random = Simulator.running, Simulator.running.random
    backup = etcd.back_up()
    simulator.wait(random.choice((0.3, 1.0, 4.0)))

    _until(lambda: _active(etcd, nodes) is not None)
    active = _active(etcd, nodes)
    assert active is not None
    (other,) = (node for node in nodes if node is not active)
    active.is_held = other.is_held = True
    kills = active.kills
    _do(other.end)
    _stop(active)
    if active.kills > kills:
        raise HistoryEnded("the node with the newest commits was killed before etcd was restored")

    etcd.restore(backup)
    active.history.emptied()
    simulator.wait(random.choice((0.1, 3.0)))
    etcd.delete_all()
    active.set_new_log(begin=True)
    active.is_held = False
    _do(active.start)
    if random.random() < 0.5:
        other.is_held = False
        _do(other.start)
    _until(lambda: _active(etcd, nodes) is not None)
    simulator.wait(random.choice((0.3, 2.0, 5.0)))

    active.is_held = other.is_held = True
    _do(other.end)
    _stop(active)
    other.copy_data(active)
    active.set_new_log(begin=False)
    for node in (active, other):
        node.is_held = False
        _do(node.start)
        if random.random() < 0.7:  # another node continues with its system clock, as documented
            _until(lambda: _active(etcd, nodes) is not None)
    happened.append(BEGUN)


def _active(etcd: Etcd, nodes: Sequence[Node]) -> Node | None:
    """The only node that takes itself for active, if etcd does as well."""
    found = [node for node in nodes if node.service is not None]
    holder = etcd.holder(leader_key(PREFIX))
    return found[0] if len(found) == 1 and found[0].process.is_alive and found[0].member.term == holder else None


def _stop(node: Node) -> None:
    """Stop a node in order, and wait for its end; it may also end because of a fault."""
    if node.process.is_alive:
        _do(node.stop)
        _until(lambda: not node.process.is_alive)


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        Simulator.running.wait(LOOK_S)


def _do(action: Callable[[], None]) -> None:
    """Call ``action`` outside of all threads: it ends some, or starts others."""
    Simulator.running.later(0.0, action)
    Simulator.running.wait(0.001)
