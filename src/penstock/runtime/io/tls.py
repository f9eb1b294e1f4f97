"""TLS contexts of clients and servers, and the credentials of clients, as given by commands and Spark options.

The TLS protocols of asyncio and uvloop drop the alert that OpenSSL wrote when a server's handshake fails, so the client
sees a closed connection without a reason [RFC 8446 section 6.2]. Both send pending bytes when the handshake wants more
data. The handshake object of :class:`AlertingContext` therefore reports a failure as "more data wanted": the alert is
sent, further bytes are discarded, and the connection ends when the client closes it or the handshake timeout of the
listener expires. Closing at once instead would reset the connection while the client still sends, and a reset discards
an unread alert.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypedDict
from weakref import WeakKeyDictionary

from penstock.errors import ConfigError

__all__ = [
    "ANONYMOUS_LOGIN",
    "HANDSHAKE_FAILED",
    "AlertingContext",
    "AlertingObject",
    "ClientOptions",
    "Login",
    "PemProblem",
    "TlsOptions",
    "certificate_file",
    "certificate_problem",
    "handshake_failure",
    "pair_problem",
    "read_password",
]

_CERTIFICATES: Final[WeakKeyDictionary[ssl.SSLContext, str]] = WeakKeyDictionary()
"""Certificate file of each context, for errors: OpenSSL does not keep the path."""


def certificate_file(context: ssl.SSLContext | None) -> str | None:
    """File of the client certificate of a context of :meth:`TlsOptions.context`; None if unknown."""
    return None if context is None else _CERTIFICATES.get(context)


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """TLS options of a client. ``ca_file``: PEM file of the trusted authorities (None: those of the system).
    ``cert_file`` and ``key_file``: PEM files of the client certificate with its chain, and of its key (None: in the
    same file). ``server_name``: name in the server's certificate, if it is not the host. ``verify`` False accepts every
    server, for tests only."""

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    key_password: str | None = field(default=None, repr=False)
    server_name: str | None = None
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        """Create the TLS context of a client: TLS 1.2 and newer.

        Raises:
            ConfigError: a file is missing or invalid.
        """
        try:
            context = ssl.create_default_context(cafile=None if self.ca_file is None else str(self.ca_file))
        except OSError as e:
            path = Path(self.ca_file or ssl.get_default_verify_paths().cafile or "")
            damaged = PemProblem("a certificate in it is damaged", "export the certificates of the authorities again")
            raise _unusable("ca_file", path, certificate_problem(path) or damaged) from e
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.cert_file is not None:
            password = self.key_password
            try:  # A callback: otherwise OpenSSL prompts on the terminal for the password of an encrypted key.
                context.load_cert_chain(self.cert_file, self.key_file, password=lambda: password or "")
            except OSError as e:
                certificate, key = Path(self.cert_file), Path(self.key_file or self.cert_file)
                blames_key, problem = pair_problem(certificate, key, e)
                if blames_key and self.key_file is not None:
                    raise _unusable("key_file", key, problem) from e
                if blames_key and "no private key" in problem.why:
                    problem = problem._replace(hint="set the file of the key as well (key_file, --key-file)")
                raise _unusable("cert_file", certificate, problem) from e
            _CERTIFICATES[context] = str(self.cert_file)
        elif self.key_file is not None:
            raise ConfigError("tls: a key without a certificate", option="key_file", hint="set cert_file as well")
        return context


def _unusable(option: str, path: Path, problem: PemProblem) -> ConfigError:
    return ConfigError(f"tls: {option} {str(path)!r} cannot be used", option=option, why=problem.why, hint=problem.hint)


class PemProblem(NamedTuple):
    """The reason why a PEM file cannot be used, and the remedy; never content of the file."""

    why: str
    hint: str


def certificate_problem(path: Path) -> PemProblem | None:
    """Find out why ``path`` has no certificates in PEM; None if it has."""
    return _pem_problem(path, re.compile(rb"-----BEGIN (TRUSTED |X509 )?CERTIFICATE-----"), "certificate", "x509")


def pair_problem(certificate: Path, key: Path, error: OSError) -> tuple[bool, PemProblem]:
    """Find out why OpenSSL refused a certificate with its key. Returns True first if the cause is in the key."""
    if (problem := certificate_problem(certificate)) is not None:
        return False, problem
    if (
        problem := _pem_problem(key, re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"), "private key", "pkey")
    ) is not None:
        return True, problem
    if "KEY_VALUES_MISMATCH" in str(error):
        return True, PemProblem(
            f"it is not the key of the first certificate in {certificate}",
            f"use the key of that certificate; put it first in {certificate}, the intermediate ones after it",
        )
    if b"ENCRYPTED" in key.read_bytes():
        return True, PemProblem(
            "the key is encrypted, and its password is missing or wrong",
            f"decrypt it (openssl pkey -in {key} -out FILE) and make it readable by its user only",
        )
    return False, PemProblem(
        f"OpenSSL cannot read a block in {certificate} or {key}, so one of them is damaged",
        f"check them: openssl x509 -noout -in {certificate}; openssl pkey -noout -in {key}",
    )


def _pem_problem(path: Path, block: re.Pattern[bytes], what: str, command: str) -> PemProblem | None:
    try:
        content = path.read_bytes()
    except OSError as error:
        return PemProblem(error.strerror or str(error), "check the path, and that this user may read the file")
    if block.search(content):
        return None
    if content.startswith(b"\x30"):  # an ASN.1 sequence
        return PemProblem(
            "it is in DER form, not PEM", f"convert it: openssl {command} -inform DER -in {path} -out FILE.pem"
        )
    return PemProblem(
        f"it has no {what} in PEM form (-----BEGIN {what.upper()}-----)",
        f"use a PEM file with the {what}; openssl {command} -in FILE shows whether it is one",
    )


HANDSHAKE_FAILED: Final[ContextVar[Callable[[ssl.SSLError], None] | None]] = ContextVar(
    "handshake_failed", default=None
)
"""Called with the reason of a failed handshake; the context variable is set where the connection is accepted."""

_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST"})
"""Failures of peers that do not use TLS and could not read an alert."""


def handshake_failure(error: Exception) -> str:
    """Reason of a failed handshake, for the server's log."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client certificate was rejected: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the client sent no certificate"
    return str(error) or "the peer disconnected during the handshake"


class AlertingObject(ssl.SSLObject):
    """TLS state of a connection whose alert is sent before a failed handshake closes it."""

    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    failed: bool = False
    failure: ssl.SSLError | None = None
    """Error of the handshake; the reporter sets it to None, because its traceback refers to this object."""
    notify: Callable[[ssl.SSLError], None] | None = None

    def do_handshake(self) -> None:
        """Continue the handshake; after a failure, discard what the client sends."""
        if not self.failed:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                if error.reason in _NOT_TLS or not self.outgoing.pending:
                    raise
                self.failed = True
                if self.notify is not None:
                    self.notify(error)
                else:
                    self.failure = error
            else:
                return
        self.incoming.read()
        raise ssl.SSLWantReadError("the handshake failed, and the client was sent an alert")


class AlertingContext(ssl.SSLContext):
    """A server's context whose connections send an alert when the handshake fails."""

    sslobject_class = AlertingObject
    current: AlertingContext | None = None
    """Context of new connections, if it replaced this one."""

    def replace(self, context: AlertingContext) -> None:
        """Use ``context`` for new connections of listeners that were created with this one."""
        self.current = context

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,  # noqa: FBT001, FBT002 - the signature of ssl
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> AlertingObject:
        """The TLS state of one connection, for an event loop."""
        if self.current is not None:
            return self.current.wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        assert isinstance(made, AlertingObject)
        made.incoming, made.outgoing = incoming, outgoing
        made.notify = HANDSHAKE_FAILED.get()
        return made


class ClientOptions(TypedDict):
    """Credentials and TLS arguments of a producer, consumer or reader."""

    username: str | None
    password: str | None
    tls: ssl.SSLContext | None


@dataclass(frozen=True, slots=True)
class Login:
    """User name, password file and TLS files of a client. ``tls`` None: no TLS.

    It has no secrets, so it can be stored and sent to other machines; files are read where they are used.
    """

    username: str | None = None
    password_file: str | Path | None = None
    tls: TlsOptions | None = None

    def __post_init__(self) -> None:
        if (self.username is None) != (self.password_file is None):
            raise ConfigError(
                "a user and a password file must be set together",
                option="username",
                hint="set both, or neither if the server has no users",
            )

    def password(self) -> str | None:
        """Read the password.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self.password_file is None:
            return None
        return read_password(Path(self.password_file))

    def client(self) -> ClientOptions:
        """Arguments of a client.

        Raises:
            ConfigError: a file cannot be used.
        """
        return {
            "username": self.username,
            "password": self.password(),
            "tls": None if self.tls is None else self.tls.context(),
        }


def read_password(path: Path, option: str = "password_file") -> str:
    """Read the password, the first line of the file that ``option`` names.

    Raises:
        ConfigError: the file cannot be read, or its first line is empty.
    """
    try:
        password = path.read_text(encoding="utf-8").split("\n", 1)[0].removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{option}: {str(path)!r} cannot be read",
            option=option,
            why=getattr(error, "strerror", None) or "it is not UTF-8 text",
            hint="use a file that this user can read, on each machine that needs it; its first line is the password",
        ) from error
    if not password:
        raise ConfigError(
            f"{option}: the first line of {str(path)!r} is empty",
            option=option,
            hint="write the password into the first line",
        )
    return password


ANONYMOUS_LOGIN = Login()
"""Neither user nor TLS."""
