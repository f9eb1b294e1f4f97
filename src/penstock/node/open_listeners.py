"""Secure defaults: a listener that other machines can reach needs users, unless it says ``anonymous: allow`` itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.runtime.io.network import Address

__all__ = ["OpenListener", "refuse_open_listeners"]

CREATE_USER = "penstock passwd create passwords NAME"


class OpenListener(NamedTuple):
    """A listener that accepts clients without credentials, and is not told to.

    ``setting`` is its place in the configuration, or the flag of a command; ``allow`` accepts such clients; ``why`` it
    would.
    """

    setting: str
    address: Address
    allow: str
    why: str = ""


def refuse_open_listeners(found: Sequence[OpenListener], *, users: str) -> None:
    """Raise ConfigError if a listener of ``found`` is reachable from other machines.

    ``users``: the setting, or flag, that names the password file.
    """
    reachable = [listener for listener in found if not listener.address.is_loopback]
    if not reachable:
        return
    named = ", ".join(f"{listener.setting} ({listener.address})" for listener in reachable)
    allowed = ", ".join(listener.allow for listener in reachable)
    raise ConfigError(
        f"other machines could use these listeners without credentials: {named}",
        option=reachable[0].setting,
        why=next((listener.why for listener in reachable if listener.why), f"there are no users: {users} is not set"),
        do=f"create a user (`{CREATE_USER}`) and set {users}; or accept anonymous clients: {allowed}; or listen on"
        " 127.0.0.1",
    )
