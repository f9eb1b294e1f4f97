"""Users of a node and their permissions, as the TubeMQ master and brokers check them."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.security.passwords import Credential
from penstock.security.policy import Permissions, Policy
from penstock.security.principal import Principal
from penstock.security.tube_key import tube_key
from penstock.tube.engine.access import RightsOf

__all__ = ["may_administer", "rights_of", "signing_keys"]


def signing_keys(users: Mapping[str, Credential] | None, part: tuple[str, str] | None = None) -> dict[str, str]:
    """Signing keys by user name. ``part``: name and password of a part of the node, known to this process only."""
    keys = {name: user.tube for name, user in (users or {}).items() if user.tube}
    if part is not None:
        keys[part[0]] = tube_key(part[0], part[1].encode())
    return keys


def rights_of(policy: Policy | None, part: tuple[str, str] | None = None) -> RightsOf | None:
    """Function from user name ("": anonymous) to permissions; None without a policy. ``part`` has all permissions."""
    if policy is None:
        return None

    def rights(user: str) -> Permissions | None:
        if part is not None and user == part[0]:
            return None
        return policy.permissions(policy.describe(Principal("", user=user or None)))

    return rights


def may_administer(rights: RightsOf | None, user: str) -> bool:
    """True if ``user`` may change the cluster."""
    granted = None if rights is None else rights(user)
    return granted is None or granted.may_administer()
