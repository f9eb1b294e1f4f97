"""Files of TLS that sections of clients name: of bridges, rules to other systems and traces."""

from __future__ import annotations

from typing import Final

from penstock.errors import ConfigError
from penstock.runtime.io.tls import TlsOptions

__all__ = ["check_client_files"]

_OPTIONS: Final = {"ca_file": "ca", "cert_file": "certificate", "key_file": "key"}
"""Options of sections, by options of :class:`TlsOptions`."""


def check_client_files(tls: TlsOptions, where: str, prefix: str = "tls.") -> None:
    """Read the files of ``tls``. ``where`` names the section in errors, ``prefix`` precedes the names of its options.

    Raises:
        ConfigError: a file cannot be used.
    """
    try:
        tls.context()
    except ConfigError as error:
        option = prefix + _OPTIONS[error.option]
        raise ConfigError(
            f"{where}: {error.what.removeprefix('tls: ').replace(error.option, option, 1)}",
            option=option,
            why=error.why,
            hint=error.hint,
        ) from error
