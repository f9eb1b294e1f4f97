"""Listener sections, and the check that no listener is unintentionally open to other machines.

A listener that other machines can reach needs users, unless its section has ``anonymous: allow``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    model_validator,
)

from penstock.errors import ConfigError
from penstock.runtime.io.network import Address, parse_address

__all__ = [
    "AddressText",
    "ListenerSection",
    "OpenListener",
    "Section",
    "WebUrl",
    "bind",
    "refuse_open_listeners",
]


def _address(value: object) -> Address:
    if isinstance(value, Address):
        return value
    if not isinstance(value, str):
        raise ValueError("expected HOST:PORT, as in 127.0.0.1:1883")
    return parse_address(value)


AddressText = Annotated[
    Address, PlainValidator(_address, json_schema_input_type=str), PlainSerializer(str, return_type=str)
]


def _web_url(value: str) -> str:
    try:
        url = urlsplit(value)
        is_valid = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or "@" in url.netloc or url.query or url.fragment or not value.isprintable() or " " in value:
        raise ValueError("expected https://HOST[:PORT]/[PATH/], without credentials, query and fragment")
    return value if value.endswith("/") else f"{value}/"


WebUrl = Annotated[str, AfterValidator(_web_url)]
"""URL of a web server, which ends with a slash."""


def bind(default: str) -> Any:
    """The address option of a listener."""
    return Field(
        default=parse_address(default),
        json_schema_extra={"default": default},
        description="HOST:PORT to listen on; port 0 selects a free port",
    )


class Section(BaseModel):
    """A section of the configuration file; unknown options are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class ListenerSection(Section):
    """Address of a listener, and its advertised address if they differ (container, proxy)."""

    bind: AddressText = bind("127.0.0.1:0")
    advertise: AddressText | None = Field(
        default=None, description="HOST:PORT that clients connect to; default: `bind`"
    )
    anonymous: Literal["allow"] | None = Field(
        default=None,
        description="`allow`: accept clients without credentials, even if the node has users. Default: "
        "accept them on loopback if the node has no users",
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: object) -> object:
        # `mqtt: 127.0.0.1:1883` is the short form of `mqtt: {bind: 127.0.0.1:1883}`.
        return {"bind": value} if isinstance(value, str) else value


CREATE_USER = "penstock user create passwords NAME"


class OpenListener(NamedTuple):
    """A listener that accepts clients without credentials although its configuration does not permit it.

    ``setting``: its place in the configuration, or the option of a command; ``allow``: the setting that permits such
    clients; ``why``: the reason why it accepts them.
    """

    setting: str
    address: Address
    allow: str
    why: str = ""


def refuse_open_listeners(found: Sequence[OpenListener], *, users: str) -> None:
    """Raise ConfigError if other machines can reach a listener of ``found``.

    ``users``: the setting, or option, of the password file.
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
        hint=f"create a user (`{CREATE_USER}`) and set {users}; or accept anonymous clients: {allowed}; or listen on"
        " 127.0.0.1",
    )
