"""TLS of a client: whom it trusts, and the certificate with which it says who it is."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

from penstock.errors import ConfigError

__all__ = ["TlsOptions", "certificate_file"]

_CERTIFICATES: Final[WeakKeyDictionary[ssl.SSLContext, str]] = WeakKeyDictionary()
"""The certificate file of each context, for error messages: OpenSSL does not keep the path."""


def certificate_file(context: ssl.SSLContext | None) -> str | None:
    """The file of the client certificate that a context of :meth:`TlsOptions.context` sends; None if not known."""
    return None if context is None else _CERTIFICATES.get(context)


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """``ca_file``: PEM of the authorities to trust (None: those of the system). ``cert_file`` and ``key_file``: PEM of
    the client's certificate with its chain, and of its key (None: in the same file). ``server_name``: the name that the
    server's certificate must bear, where that is not the host. ``verify`` False trusts anybody: for tests alone.
    """

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    key_password: str | None = field(default=None, repr=False)
    server_name: str | None = None
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        """What the event loop needs: TLS 1.2 and newer.

        Raises:
            ConfigError: a file is missing or holds something else.
        """
        try:
            context = ssl.create_default_context(cafile=None if self.ca_file is None else str(self.ca_file))
        except OSError as e:
            raise _unusable("ca_file", self.ca_file, e, "the certificates of the authorities") from e
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.cert_file is not None:
            password = self.key_password
            try:  # A callback: else OpenSSL asks at the terminal where the key is encrypted.
                context.load_cert_chain(self.cert_file, self.key_file, password=lambda: password or "")
            except OSError as e:
                raise _unusable("cert_file", self.cert_file, e, "a certificate and the key that fits it") from e
            _CERTIFICATES[context] = str(self.cert_file)
        elif self.key_file is not None:
            raise ConfigError("tls: a key without a certificate", option="key_file", do="name the cert_file as well")
        return context


def _unusable(option: str, path: str | Path | None, error: OSError, expected: str) -> ConfigError:
    return ConfigError(
        f"tls: {option} {str(path)!r} cannot be used",
        option=option,
        why=error.strerror or str(error),
        do=f"name a PEM file with {expected}",
    )
