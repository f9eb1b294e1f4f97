"""Profiles: sets of settings that ``profile`` (``penstock up --profile``) adds to a configuration.

A setting of the file, the environment or the command line overrides that of the profile.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from penstock.runtime.config.yaml_document import Document, Value

__all__ = ["AIO_LISTENER", "AioFiles", "Profile", "add_profile"]

AIO_LISTENER = "aio"
"""Name of the listener that the profile ``aio`` adds."""

_DEFAULT_DATA_DIR = "penstock-data"


class Profile(StrEnum):
    """A profile."""

    AIO = "aio"
    """The broker that an application of Azure IoT Operations expects, on one machine."""


class AioFiles:
    """Paths of the files of the profile ``aio`` in the data directory ``data_dir``."""

    def __init__(self, data_dir: Path) -> None:
        self.directory = data_dir / "aio"
        self.authority = self.directory / "ca.pem"
        self.authority_key = self.directory / "ca.key"
        self.certificate = self.directory / "server.pem"
        self.key = self.directory / "server.key"
        self.token = self.directory / "token"
        """The token of the service account, which applications send."""
        self.tokens = self.directory / "tokens.yaml"
        """The token file of the node."""


def add_profile(document: Document) -> None:
    """Add the settings of the profile that ``document`` names, if it names one; unknown names are left alone."""
    if document.data.get("profile") != Profile.AIO:
        return
    data_dir = document.data.get("data_dir")
    files = AioFiles(Path(data_dir) if isinstance(data_dir, str) else Path(_DEFAULT_DATA_DIR))
    listener = ("mqtt", "listeners", AIO_LISTENER)
    for section in (("mqtt",), listener):
        if isinstance(address := _at(document.data, section), str):  # the short form of `bind`
            document.put((*section, "bind"), address, document.where(section))
    wanted: dict[tuple[str, ...], Value] = {
        # Largest packet of the protocol, and the Keep Alive that clients ask for.
        ("mqtt", "limits", "max_packet_size"): 256 * 1024 * 1024,
        ("mqtt", "limits", "max_keep_alive_s"): 65_535,
        (*listener, "bind"): "127.0.0.1:18883",
        (*listener, "transport"): "tls",
        (*listener, "tls", "certificate"): str(files.certificate),
        (*listener, "tls", "key"): str(files.key),
        (*listener, "authentication"): ["token"],
        ("security", "tokens"): str(files.tokens),
    }
    if _at(document.data, ("security", "passwords")) is None:
        # A token file alone would make the default listener ask for tokens, which the commands do not have.
        wanted["mqtt", "authentication"] = ["anonymous"]
    for location, value in wanted.items():
        if _is_missing(document.data, location):
            document.put(location, value, f"profile {Profile.AIO}")


def _at(data: Value, location: tuple[str, ...]) -> Value:
    """Return the value at ``location``; None if there is none."""
    for key in location:
        if not isinstance(data, dict):
            return None
        data = data.get(key)
    return data


def _is_missing(data: Value, location: tuple[str, ...]) -> bool:
    """Whether nothing is at ``location``; False also if a section of it is not a mapping, which is then refused."""
    for key in location:
        if data is None:
            return True
        if not isinstance(data, dict):
            return False
        data = data.get(key)
    return data is None
