"""Codes of the protocol: error codes, orders to consumers, and the version of the extensions.

200 is success; ``success`` and ``errCode`` of a response are always set together.
"""

from __future__ import annotations

import re
from enum import IntEnum

__all__ = ["EXTENSIONS", "ErrCode", "RebalanceOp", "remedy"]

EXTENSIONS = 2
"""Version of the extensions (fields 1000 and up) that penstock implements; 2 added commits at an offset."""


class ErrCode(IntEnum):
    """Error codes that servers send. Codes that clients use internally are not listed."""

    SUCCESS = 200
    NOT_READY = 201
    MOVED = 301
    BAD_REQUEST = 400
    UNAUTHORIZED = 401
    FORBIDDEN = 403
    NOT_FOUND = 404
    PARTITION_OCCUPIED = 410
    HB_NO_NODE = 411
    DUPLICATE_PARTITION = 412
    CERTIFICATE_FAILURE = 415
    SERVER_RECEIVE_OVERFLOW = 419
    CLIENT_INCONSISTENT_CONSUMETYPE = 424
    CLIENT_INCONSISTENT_TOPICSET = 425
    CLIENT_INCONSISTENT_FILTERSET = 426
    CLIENT_INCONSISTENT_SESSIONKEY = 427
    CLIENT_INCONSISTENT_SELECTBIG = 428
    CLIENT_INCONSISTENT_SOURCECOUNT = 429
    CLIENT_DUPLICATE_INDEXID = 430
    TOPIC_NOT_DEPLOYED = 431
    CONSUME_GROUP_FORBIDDEN = 450
    SERVER_CONSUME_SPEED_LIMIT = 452
    CONSUME_CONTENT_FORBIDDEN = 455
    INTERNAL_SERVER_ERROR = 500
    SERVICE_UNAVAILABLE = 503


class RebalanceOp(IntEnum):
    """EventProto.opType. 1 and 2 announce a partner event; penstock sends the plain forms 10 and 20."""

    CONNECT = 1
    DISCONNECT = 2
    REPORT = 3
    ONLY_CONNECT = 10
    ONLY_DISCONNECT = 20


_OTHER_GROUP = "the members of a group have the same topics, filters and balancing: use another group for this one"
_REMEDIES: dict[int, str] = {
    ErrCode.CERTIFICATE_FAILURE: "sign as a user of the cluster, with a clock that differs by less than 20 s: user and "
    "password (--username and --password-file of a command)",
    ErrCode.TOPIC_NOT_DEPLOYED: "create the topic first",
    ErrCode.CLIENT_INCONSISTENT_CONSUMETYPE: _OTHER_GROUP,
    ErrCode.CLIENT_INCONSISTENT_TOPICSET: _OTHER_GROUP,
    ErrCode.CLIENT_INCONSISTENT_FILTERSET: _OTHER_GROUP,
}


_DENIED = re.compile(
    r"(?:user (?P<user>\S+)|an anonymous client) may not (?P<what>produce to|consume) topics? (?P<topics>.+?)"
    r"(?: as group (?P<group>\S+))?"
)


def remedy(code: int, text: str = "") -> str | None:
    """Return the hint for an error with ``code`` and the server's ``text``; None without one."""
    denied = _DENIED.fullmatch(text)
    if denied is None:
        return _REMEDIES.get(code)
    permission = "Consume" if denied["what"] == "consume" else "Produce"
    group = "" if denied["group"] is None else f" for group {denied['group']}"
    who = denied["user"] or "anonymous clients"
    return f"grant {permission} on {denied['topics']}{group} to {who} in the policy file of the server, then SIGHUP"
