"""Tree of topic filters: finds matches for a topic in time proportional to its levels, not to the number of filters.

Source: MQTT 5.0 section 4.7.
"""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["FilterTree"]

V = TypeVar("V")


class _Node(Generic[V]):
    """One level of the tree. ``here``: values of filters that end at this level; ``below``: values of filters that
    continue with ``#``."""

    __slots__ = ("below", "children", "here")

    def __init__(self) -> None:
        self.children: dict[str, _Node[V]] = {}
        self.here: dict[str, V] = {}
        self.below: dict[str, V] = {}

    def empty(self) -> bool:
        """Return whether the node has neither filters nor children and can be removed."""
        return not (self.children or self.here or self.below)


class FilterTree(Generic[V]):
    """Maps valid topic filters and owners to values, one for each pair; ``len`` counts them."""

    __slots__ = ("_root", "_size")

    def __init__(self) -> None:
        self._root: _Node[V] = _Node()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def set(self, topic_filter: str, owner: str, value: V) -> bool:
        """Set the value of a filter and owner; return True if it is new."""
        levels = topic_filter.split("/")
        rest = levels[-1] == "#"
        node = self._root
        for level in levels[:-1] if rest else levels:
            child = node.children.get(level)
            if child is None:
                child = node.children[level] = _Node()
            node = child
        holder = node.below if rest else node.here
        new = owner not in holder
        holder[owner] = value
        self._size += new
        return new

    def remove(self, topic_filter: str, owner: str, value: V) -> bool:
        """Remove ``value`` of a filter and owner; return False if they have none, or another one by now."""
        levels = topic_filter.split("/")
        rest = levels[-1] == "#"
        if rest:
            levels.pop()
        path = [self._root]
        for level in levels:
            child = path[-1].children.get(level)
            if child is None:
                return False
            path.append(child)
        holder = path[-1].below if rest else path[-1].here
        if holder.get(owner) is not value:
            return False
        del holder[owner]
        self._size -= 1
        for i in range(len(levels) - 1, -1, -1):
            if not path[i + 1].empty():
                break
            del path[i].children[levels[i]]
        return True

    def match(self, topic: str) -> list[V]:
        """Return the values of all filters that match ``topic``: one per filter and owner."""
        found: list[V] = []
        nodes = [self._root]
        wild = topic[:1] != "$"  # [MQTT-4.7.2-1]: at the first level only
        for level in topic.split("/"):
            following: list[_Node[V]] = []
            for node in nodes:
                if wild:
                    found += node.below.values()
                    child = node.children.get("+")
                    if child is not None:
                        following.append(child)
                child = node.children.get(level)
                if child is not None:
                    following.append(child)
            nodes = following
            wild = True
            if not nodes:
                return found
        for node in nodes:
            found += node.here.values()
            found += node.below.values()  # "a/#" matches "a" as well
        return found
