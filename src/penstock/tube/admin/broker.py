"""The broker's HTTP methods (``/broker.htm?method=…``): the table of methods, authorization and the response.

A successful response has ``dataSet`` with ``totalCnt``. A change is made in the engine; the caller makes it durable and
then answers. Offsets are index positions, 28 bytes per message of the store. Times are ``yyyyMMddHHmmss`` in UTC.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import penstock
from penstock.errors import RemoteProtocolError
from penstock.tube.admin import broker_methods as methods
from penstock.tube.admin.broker_methods import Answer, BrokerAdmin
from penstock.tube.admin.caller import UNAUTHORIZED, UNKNOWN, Caller
from penstock.tube.admin.parameters import BadParameter, Params

__all__ = ["METHODS", "BrokerAdmin", "BrokerMethod", "handle", "is_protected"]


def handle(
    admin: BrokerAdmin, params: Mapping[str, str], token: str | None, caller: Caller = UNKNOWN
) -> tuple[Answer, bool]:
    """The response to a request of ``caller``, and whether a change must be made durable first.

    ``token`` is the administration token, which a request contains as ``confModAuthToken``; None: only users may make
    changes or read messages.
    """
    name = params.get("method", "")
    method = METHODS.get(name)
    if method is None:
        return _failure(f"Unsupported method: {name!r}; known: {', '.join(sorted(METHODS))}"), False
    caller = caller.showing(params, token)
    if not (caller.administers if method.protected else caller.reads):
        return _failure(UNAUTHORIZED), False
    try:
        given = Params(params, identified=caller.identified)
        if method.changes:
            given.user("modifyUser", "mur")
            given.check_unused(method.only)
        rows = method.run(admin, given)
    except (BadParameter, RemoteProtocolError) as error:
        return _failure(str(error)), False
    except OSError as error:
        return _failure(f"the disk failed: {error.strerror}"), False
    answer: Answer = {"result": True, "errCode": 0, "errMsg": "OK", method.rows: rows, method.total: len(rows)}
    if method.single and rows:
        answer |= rows[0]
    return answer, method.changes


def is_protected(name: str) -> bool:
    """Whether the method of that name makes a change or shows the contents of messages."""
    method = METHODS.get(name)
    return method is not None and method.protected


def _failure(text: str) -> Answer:
    return {"result": False, "errCode": 400, "errMsg": text}


def _version(admin: BrokerAdmin, params: Params) -> list[Answer]:
    return [{"version": f"penstock-{penstock.__version__}"}]


def _statistics_on(admin: BrokerAdmin, params: Params) -> list[Answer]:
    return []


def _statistics_off(admin: BrokerAdmin, params: Params) -> list[Answer]:
    raise BadParameter("counters are always on: they cannot be disabled")


def _methods(admin: BrokerAdmin, params: Params) -> list[Any]:
    return [{"method": name, "needAuth": method.protected} for name, method in sorted(METHODS.items())]


class BrokerMethod(NamedTuple):
    """One method: the function, whether it makes a change, and a line for the reference page.

    ``rows`` and ``total`` are the names of the rows and of their number in the response, which differ between the
    reference's methods. ``single``: the row's fields are in the response itself as well. ``bodies``: the response has
    the contents of messages. ``only``: all parameters of a change; others are rejected.
    """

    run: Callable[[BrokerAdmin, Params], list[Any]]
    about: str
    changes: bool = False
    rows: str = "dataSet"
    total: str = "totalCnt"
    single: bool = False
    bodies: bool = False
    only: frozenset[str] = frozenset()

    @property
    def protected(self) -> bool:
        """Whether the request needs the administration token, or a user with the right to administer."""
        return self.changes or self.bodies

    def with_data(self) -> BrokerMethod:
        """The same method with its rows as `data`."""
        return self._replace(rows="data", total="count")


_CONSUMERS = BrokerMethod(methods.consumers, "registrations of consumers, with their offsets")
_GROUPS = BrokerMethod(
    methods.groups, "names of the groups; `divide`: those with a consumer and those without", total="dataCount"
)
_METRICS = BrokerMethod(methods.metrics, "counters of the broker").with_data()
_REGISTERED = BrokerMethod(methods.registrations, "registrations of consumers")
_STATISTICS_OFF = BrokerMethod(_statistics_off, "refused: counters are always on").with_data()
_POSITION = frozenset({"groupName", "topicName", "partitionId"})
METHODS: dict[str, BrokerMethod] = {
    "admin_query_broker_all_consumer_info": _CONSUMERS,
    "admin_get_group_detail_info": _CONSUMERS,
    "admin_query_broker_all_store_info": BrokerMethod(methods.stores, "first and last offsets and sizes of the stores"),
    "admin_query_broker_memstore_info": BrokerMethod(methods.stores, "the same; `unwrittenSize` waits for its commit"),
    "admin_get_msgstore_stats": BrokerMethod(methods.store_stats, "sizes of the stores, by topic").with_data(),
    "admin_get_metrics_info": _METRICS,
    "admin_enable_stats": BrokerMethod(_statistics_on, "succeeds without effect: counters are always on").with_data(),
    "admin_disable_stats": _STATISTICS_OFF,
    "admin_disable_all_stats": _STATISTICS_OFF,
    "admin_query_group_offset": BrokerMethod(methods.group_offset, "offset of a group in one partition", single=True),
    "admin_query_offset": BrokerMethod(methods.group_offsets, "offsets of groups, and their lag"),
    "admin_query_pubinfo": BrokerMethod(methods.pubinfo, "first and last offsets of all partitions", total="dataCount"),
    "admin_get_booked_groupname": _GROUPS,
    "admin_query_group": _GROUPS,
    "admin_get_partition_reginfo": _REGISTERED,
    "admin_query_consumer_regmap": _REGISTERED,
    "admin_snapshot_message": BrokerMethod(
        methods.snapshot, "the newest messages of a partition, in base64; needs the administration token", bodies=True
    ),
    "admin_get_group_history_offset": BrokerMethod(
        methods.history, "entries of a group in the offset history, from a time on"
    ).with_data(),
    "admin_backup_group_offsets": BrokerMethod(
        methods.backup,
        "offsets of all groups, each as `offsetJsonInfo` of `admin_set_offset`; the response is the backup, nothing is"
        " written on the broker's machine",
    ).with_data(),
    "admin_manual_set_current_offset": BrokerMethod(
        methods.set_current,
        "set the offset of a group in one partition",
        changes=True,
        single=True,
        only=_POSITION | {"manualOffset"},
    ),
    "admin_set_offset": BrokerMethod(
        methods.set_offset,
        "set groups to given offsets, or to the end of topics",
        changes=True,
        only=frozenset({"groupName", "topicName", "manualSet", "offsetJsonInfo"}),
    ),
    "admin_set_offset_by_time": BrokerMethod(
        methods.set_by_time,
        "set groups to the first message of a time",
        changes=True,
        only=frozenset({"groupName", "topicName", "recordTime"}),
    ),
    "admin_clone_offset": BrokerMethod(
        methods.clone_offsets,
        "copy the offsets of a group to others",
        changes=True,
        only=frozenset({"sourceGroupName", "targetGroupName", "topicName"}),
    ),
    "admin_rmv_offset": BrokerMethod(
        methods.remove_offsets,
        "remove offsets of groups that are not consuming",
        changes=True,
        only=frozenset({"groupName", "topicName", "onlyMemory"}),
    ).with_data(),
    "admin_query_staged_rows": BrokerMethod(
        methods.staged_rows, "staged rows that are not committed yet; an extension"
    ),
    "admin_rmv_staged_rows": BrokerMethod(
        methods.remove_staged,
        "remove the staged rows of a query (`queryName`, `force`); an extension",
        changes=True,
        only=frozenset({"queryName", "force"}),
    ),
    "admin_query_server_version": BrokerMethod(_version, "version of the server").with_data(),
    "admin_get_methods": BrokerMethod(_methods, "names of the methods"),
}
