"""A request to the HTTP administration: the caller and its permissions, and parameters with their limits."""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = ["UNAUTHORIZED", "UNKNOWN", "BadParameter", "Caller", "Params", "Role", "as_number", "format_time",
           "parse_json"]  # fmt: skip

# --- the sender ---


UNAUTHORIZED = "illegal access, unauthorized request!"
"""Error of a request without the required credentials, as in the reference."""

MAX_TOKEN = 128
_TOKEN = "confModAuthToken"  # noqa: S105 - the name of the parameter


class Role(IntEnum):
    """The role of a user, which includes the lower ones."""

    NONE = 0
    """Queries without names of clients and without contents."""
    VIEWER = 1
    """Reads everything in the console, contents within the user's policies."""
    OPERATOR = 2
    """Changes data and clients in the console: offsets, dead letters, keys, messages."""
    ADMINISTRATOR = 3
    """May do everything, including changes of topics, backups and the audit trail."""


class Caller(NamedTuple):
    """The sender of a request. ``user``: name of the authenticated user, blank for none; ``address``: of the peer.

    ``reads``: queries are answered. ``administers``: changes and message bodies are allowed. ``identified``: the
    request had a valid credential; client ids are hidden from others.
    """

    user: str = ""
    address: str = ""
    reads: bool = True
    role: Role = Role.NONE
    token: bool = False
    """Whether the request had the administration token."""

    @property
    def administers(self) -> bool:
        """Whether changes and message bodies are allowed."""
        return self.role is Role.ADMINISTRATOR

    @property
    def identified(self) -> bool:
        """Whether the request had a valid credential."""
        return self.token or bool(self.user)

    @property
    def credential(self) -> str:
        """Credentials of the request, for the audit trail."""
        shown = [f"user {self.user}"] if self.user else []
        if self.token:
            shown.append("administration token")
        return ", ".join(shown) or "none"

    def showing(self, params: Mapping[str, str], token: str | None) -> Caller:
        """The caller with the rights of the administration ``token`` (None: there is none) if the request has it."""
        # Limited, so that the time of the comparison does not depend on the token.
        given = params.get(_TOKEN, "")[: MAX_TOKEN + 1]
        if token is None or not hmac.compare_digest(given.encode(), token.encode()):
            return self
        return self._replace(token=True, reads=True, role=Role.ADMINISTRATOR)


UNKNOWN = Caller()
"""A caller without credentials on a server without users."""


# --- parameters ---


MAX_ITEMS = 100
OF_EVERY_CHANGE = frozenset(
    {"method", "type", "callback", "confModAuthToken", "createUser", "cur", "modifyUser", "mur"}
    | {"createDate", "cDate", "modifyDate", "mDate"}
)
"""Parameters that every change may have: the method, and author and time of the change."""
_TIME = "%Y%m%d%H%M%S"
_TIME_DIGITS = re.compile(r"\d{14}", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d{1,20}", re.ASCII)
_USER = re.compile(r"\S.{0,62}\S", re.ASCII)


class BadParameter(Exception):
    """A parameter is missing or invalid; the text becomes part of the response."""


class Params:
    """The parameters of one request; each has a long and often a short name.

    ``before``: settings that earlier objects of the same batch changed, by kind and key. ``identified``: whether the
    caller has authenticated.
    """

    def __init__(
        self,
        given: Mapping[str, str],
        before: Mapping[tuple[str, str], object] = MappingProxyType({}),
        *,
        identified: bool = True,
    ) -> None:
        self.given = given
        self.before = before
        self._identified = identified
        self._read: set[str] = set()

    def fixed(self, values: Mapping[str, str]) -> Params:
        """Return the request with ``values`` that the method implies. Raises BadParameter if it has different ones."""
        for name, value in values.items():
            if self.text(name) not in {"", value}:
                raise BadParameter(f"{name} {self.given[name]!r}: this method means {value}")
        made = Params({**self.given, **values}, self.before, identified=self._identified)
        made._read = self._read
        return made

    def of_object(self, values: Mapping[str, str], before: Mapping[tuple[str, str], object]) -> Params:
        """Return the parameters of one object of a batch, added to those of the request."""
        return Params({**self.given, **values}, before, identified=self._identified)

    def check_unused(self, used: Iterable[str] = ()) -> None:
        """Refuse a request with a parameter that was not read, instead of ignoring it silently.

        ``used``: names that count as read. Raises BadParameter.
        """
        unused = self.given.keys() - self._read - OF_EVERY_CHANGE - set(used)
        if found := sorted(name for name in unused if self.given[name].strip()):
            raise BadParameter(f"{', '.join(found)}: this method does not have this parameter; omit it")

    def shown_id(self, client_id: str) -> str:
        """Return ``client_id``, or ``-`` for a caller without credentials: client ids are hidden from others."""
        return client_id if self._identified else "-"

    def text(self, *names: str) -> str:
        """Return the value of the first of ``names`` that is present, without surrounding blanks."""
        self._read.update(names)
        return next((value for name in names if (value := self.given.get(name, "").strip())), "")

    def required(self, *names: str) -> str:
        """Return the value of the first of ``names`` that is present. Raises BadParameter without one."""
        value = self.text(*names)
        if not value:
            raise BadParameter(f"{names[0]} is required")
        return value

    def user(self, *names: str) -> str:
        """Return the author of a change: two characters or more, as in the reference."""
        name = self.required(*names)
        if not _USER.fullmatch(name):
            raise BadParameter(f"{names[0]} {name!r}: 2 to 64 characters are possible")
        return name

    def items(self, *names: str, most: int = MAX_ITEMS) -> list[str]:
        """Return the items of a comma-separated list, without duplicates."""
        found = list(dict.fromkeys(item.strip() for item in self.text(*names).split(",") if item.strip()))
        if len(found) > most:
            raise BadParameter(f"{names[0]} has {len(found)} items, at most {most} are possible")
        return found

    def number(self, *names: str, default: int | None = None, least: int | None = None, most: int | None = None) -> int:
        """Return an integer between ``least`` and ``most``; ``default`` if it is missing.

        Raises:
            BadParameter: it is no such number, or it is missing and ``default`` is None.
        """
        text = self.text(*names)
        if not text and default is not None:
            return default
        if not text:
            raise BadParameter(f"{names[0]} is required")
        value = as_number(text, names[0])
        if (least is not None and value < least) or (most is not None and value > most):
            raise BadParameter(f"{names[0]} {value}: {least} to {most} are possible")
        return value

    def given_number(self, *names: str, least: int, most: int) -> int | None:
        """Return the number; None if it is missing."""
        return self.number(*names, least=least, most=most) if self.text(*names) else None

    def given_flag(self, *names: str) -> bool | None:
        """Return the flag; None if it is missing."""
        return self.flag(*names, default=False) if self.text(*names) else None

    def numbers(self, *names: str) -> list[int]:
        """Return the integers of a comma-separated list, without duplicates. Raises BadParameter."""
        return [as_number(item, names[0]) for item in self.items(*names)]

    def flag(self, *names: str, default: bool) -> bool:
        """Return a flag, ``true`` or ``false`` in any case; ``default`` if it is missing. Raises BadParameter."""
        text = self.text(*names).lower()
        if text not in {"", "true", "false"}:
            raise BadParameter(f"{names[0]} {text!r}: true or false are possible")
        return default if not text else text == "true"

    def time_ms(self, *names: str) -> int:
        """Return a time, written as ``yyyyMMddHHmmss`` in UTC, in ms since 1970."""
        text = self.required(*names)
        try:
            if not _TIME_DIGITS.fullmatch(text):  # strptime() reads 202601011230 as 12:03:00
                raise ValueError
            return int(datetime.strptime(text, _TIME).replace(tzinfo=UTC).timestamp() * 1000)
        except ValueError:
            raise BadParameter(f"{names[0]} {text!r}: a time as yyyyMMddHHmmss is expected") from None


def as_number(text: str, name: str) -> int:
    """Return the number in ``text``. Raises BadParameter with the name of the parameter, ``name``."""
    if not _NUMBER.fullmatch(text):
        raise BadParameter(f"{name} {text!r:.100} is not a number")
    return int(text)


def parse_json(text: str, name: str) -> Any:
    """Return the JSON value in ``text``, the parameter ``name``.

    Raises BadParameter, also for values that cannot be sent in a response: NaN, infinity, and half a surrogate pair.
    """
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise BadParameter(f"{name} is not JSON") from None
    return found


def format_time(time_ms: int) -> str:
    """Format a time as ``yyyyMMddHHmmss`` in UTC."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime(_TIME)
