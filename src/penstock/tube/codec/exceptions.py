"""Exceptions on the wire: the Java class name in an ERROR or FATAL response is part of the protocol.

The Java client loads the class by its name and throws it; the C++ client looks for the substring ``StandbyException``.
Older clients know older package names, so the name depends on the requester's protocol version.
"""

from __future__ import annotations

import re

__all__ = [
    "EXCEPTION",
    "ILLEGAL_ARGUMENT",
    "NOT_READY",
    "STANDBY",
    "STOPPING",
    "UNKNOWN_PROTOCOL",
    "is_standby",
    "kind_of",
    "name_for",
]

_PACKAGE = "org.apache.inlong.tubemq."
_KIND = _PACKAGE + "corerpc.exception."
STANDBY = _KIND + "StandbyException"
NOT_READY = _KIND + "ServerNotReadyException"
UNKNOWN_PROTOCOL = _KIND + "UnknownProtocolException"
STOPPING = _KIND + "ServiceStoppingException"
EXCEPTION = "java.lang.Exception"
ILLEGAL_ARGUMENT = "java.lang.IllegalArgumentException"

# Version 2 is "com.apache", not "org.apache", as in the reference.
_PACKAGE_OF_VERSION = {1: "com.tencent.tubemq.", 2: "com.apache.tubemq."}


def name_for(version: int, name: str) -> str:
    """Return ``name`` (of protocol version 3) as spelled in ``version``; unchanged for unknown versions."""
    package = _PACKAGE_OF_VERSION.get(version)
    if package is not None and name.startswith(_PACKAGE):
        return package + name.removeprefix(_PACKAGE)
    return name


def kind_of(name: str) -> str:
    """Return a readable form of an exception's class name: "service stopping" for
    ``org.x.ServiceStoppingException``."""
    kind = name.rpartition(".")[2].removesuffix("Exception")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind).lower() or "it gives no reason"


def is_standby(name: str) -> bool:
    """Whether an exception reports a standby master, in any version's spelling."""
    return name.endswith(".StandbyException")
