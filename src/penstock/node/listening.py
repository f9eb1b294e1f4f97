"""What the sections of all listeners share: an address to listen on, and one to tell."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, model_validator

from penstock.runtime.io.network import Address, parse_address

__all__ = ["AddressText", "Listener", "Part", "bind"]


def _address(value: object) -> Address:
    if isinstance(value, Address):
        return value
    if not isinstance(value, str):
        raise ValueError("expected HOST:PORT, as in 127.0.0.1:1883")
    return parse_address(value)


AddressText = Annotated[
    Address, PlainValidator(_address, json_schema_input_type=str), PlainSerializer(str, return_type=str)
]


def bind(default: str) -> Any:
    """The option of a listener that says where it listens."""
    return Field(
        default=parse_address(default),
        json_schema_extra={"default": default},
        description="HOST:PORT to listen on; port 0: a free one",
    )


class Part(BaseModel):
    """A section of the file: options that are not known are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Listener(Part):
    """Where a part listens, and the address that it tells others where that differs (a container, a proxy)."""

    bind: AddressText = bind("127.0.0.1:0")
    advertise: AddressText | None = Field(default=None, description="HOST:PORT that others are told, default: bind")
    anonymous: Literal["allow"] | None = Field(
        default=None,
        description="`allow`: clients without credentials are accepted here, also where the node has users. Default:"
        " only where it has none, and on loopback",
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: object) -> object:
        # `mqtt: 127.0.0.1:1883` is the short form of `mqtt: {bind: 127.0.0.1:1883}`.
        return {"bind": value} if isinstance(value, str) else value
