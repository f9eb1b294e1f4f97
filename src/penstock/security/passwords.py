"""Passwords: the password file with slow hashes and the keys of SCRAM and TubeMQ, and the server side of SCRAM.

The file has one line per user with four fields, separated by tabs; empty lines and lines that begin with ``#`` are
ignored:

    name <TAB> $argon2id$v=19$m=19456,t=2,p=1$<salt>$<hash> <TAB> SCRAM-SHA-256$4096:<salt>$<StoredKey>:<ServerKey>
    <TAB> tube1.<key>

The third field has the format of PostgreSQL; if it is empty, the user cannot use SCRAM. The fourth is the key with
which the user signs in the TubeMQ protocol (:mod:`penstock.security.tube_key`); without it the user has no access
there.

With SCRAM-SHA-256 a client proves that it knows the password without sending it, in two messages in each direction. The
exchange with an unknown user is completed with a salt that depends only on the name and on a key in a comment of the
file, so that clients cannot find out which users exist: the salt is the same on every listener, after a restart, and on
every node with a copy of the file.

Source: RFC 9106 (Argon2), RFC 5802 and 7677 (SCRAM-SHA-256), RFC 5803 (format of a verifier); MQTT 5.0 section 4.12.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from argon2 import PasswordHasher, extract_parameters
from argon2.exceptions import InvalidHashError, VerificationError
from scramp import ScramException, ScramMechanism

from penstock.errors import ConfigError, StorageError
from penstock.security.tube_key import TUBE_KEY, can_sign, tube_key

__all__ = [
    "LONGEST_PASSWORD",
    "SCRAM_METHOD",
    "Credential",
    "ScramExchange",
    "ScramVerifier",
    "edit_passwords",
    "make_credential",
    "read_passwords",
    "read_salt_key",
    "verify_password",
]

LONGEST_NAME: Final = 256
LONGEST_PASSWORD: Final = 1024
"""Longest password in bytes; longer ones are rejected before hashing. MQTT permits 65,535."""
SCRAM_ITERATIONS: Final = 4096
"""Iterations of PBKDF2: the minimum of RFC 7677, since each client computes them at every connect."""
MAX_USERS: Final = 1_000_000

SCRAM_METHOD: Final = "SCRAM-SHA-256"

_HASHER: Final = PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1)
"""19 MiB, two passes, one lane, as recommended by OWASP for little memory: 20 ms of one core."""
_MECHANISM: Final = ScramMechanism(SCRAM_METHOD)
_SCRAM: Final = re.compile(r"SCRAM-SHA-256\$([0-9]{1,9}):([A-Za-z0-9+/=]+)\$([A-Za-z0-9+/=]+):([A-Za-z0-9+/=]+)")
_HEAD: Final = (
    "# Users of this node: name, argon2 hash, SCRAM verifier, TubeMQ signing key. Written by `penstock user`.\n"
)
_SALT_KEY: Final = re.compile(rb"^# Key of the salts of unknown users: ([0-9a-f]{64})\r?$", re.MULTILINE)
_SALT_KEY_WITHIN: Final = 4096
"""Bytes at the beginning of the file that can contain the key."""


class ScramVerifier(NamedTuple):
    """SCRAM credentials derived from a password; they do not permit authentication to another server."""

    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes


class Credential(NamedTuple):
    """A user of the file. Two credentials are equal if the user was not changed."""

    name: str
    hash: str
    scram: str = ""
    tube: str = ""
    """TubeMQ signing key, a secret; empty if the user cannot use TubeMQ."""

    def verifier(self) -> ScramVerifier | None:
        """The third field; None if it is empty."""
        found = _SCRAM.fullmatch(self.scram)
        if found is None:
            return None
        salt, stored, server = (base64.b64decode(found[i], validate=True) for i in (2, 3, 4))
        return ScramVerifier(int(found[1]), salt, stored, server)


def make_credential(name: str, password: bytes) -> Credential:
    """Hash a password for the file, in about 30 ms.

    Raises:
        ConfigError: the name or the password cannot be used.
    """
    if problem := _name_problem(name):
        raise ConfigError(f"user name {name!r} cannot be used", option="user", why=problem, hint="choose another name")
    if not 0 < len(password) <= LONGEST_PASSWORD:
        raise ConfigError(
            "the password cannot be used",
            option="password",
            why=f"it has {len(password)} bytes; 1 to {LONGEST_PASSWORD} are allowed",
            hint="choose another one",
        )
    scram = ""
    # A password that SCRAM cannot use (not UTF-8, control characters) still works with PASSWORD.
    with suppress(ScramException, UnicodeDecodeError):
        info = _MECHANISM.make_auth_info(password.decode(), SCRAM_ITERATIONS, secrets.token_bytes(16))
        salt, stored, server = (base64.b64encode(part).decode() for part in info[:3])
        scram = f"SCRAM-SHA-256${SCRAM_ITERATIONS}:{salt}${stored}:{server}"
    return Credential(name, _HASHER.hash(password), scram, tube_key(name, password) if can_sign(name) else "")


_NOBODY: Final = "$argon2id$v=19$m=19456,t=2,p=1$AAAAAAAAAAAAAAAAAAAAAA$" + "A" * 43


def verify_password(credential: Credential | None, password: bytes) -> bool:
    """True if ``password`` is correct. Takes the same time for an unknown user (None), so that clients cannot find out
    which users exist.

    About 20 ms of one core without the interpreter's lock: call it in a thread.
    """
    if len(password) > LONGEST_PASSWORD:
        return False
    try:
        _HASHER.verify(_NOBODY if credential is None else credential.hash, password)
    except (VerificationError, InvalidHashError):
        return False
    return credential is not None


def read_passwords(path: Path) -> dict[str, Credential]:
    """Read the users of the file at ``path``, by name.

    Raises:
        ConfigError: the file cannot be read, or a line is invalid; the error has its number, not its content.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8", where=str(path), hint="write UTF-8") from error
    found: dict[str, Credential] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        where = f"{path}:{number}"
        name, *fields = line.split("\t")
        credential = Credential(name, *fields) if 1 <= len(fields) <= 3 else None
        problem = "expected name, hash, verifier and key with tabs between them" if credential is None else ""
        if credential is not None:
            problem = _line_problem(credential) or ("the name is used twice" if name in found else "")
        if credential is None or problem:
            raise ConfigError(
                f"{where}: this line is invalid", where=where, why=problem, hint="set it with `penstock user`"
            )
        found[name] = credential
    if len(found) > MAX_USERS:
        raise ConfigError(f"{path}: has {len(found)} users, {MAX_USERS} are allowed", where=str(path))
    return found


def read_salt_key(path: Path) -> bytes | None:
    """Read the key of the salts of unknown users in the file at ``path``; None if it has none.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            found = _SALT_KEY.search(file.read(_SALT_KEY_WITHIN))
    except OSError as error:
        raise _unreadable(path, error) from error
    return None if found is None else bytes.fromhex(found[1].decode())


def edit_passwords(path: Path, change: Callable[[dict[str, Credential]], Mapping[str, Credential]]) -> None:
    """Replace the users of the file with the result of ``change``; a missing file has none. The key of salts stays.

    The new file is complete and durable, with mode 0600 and the owner of the old one, before it replaces the old one.
    Concurrent edits wait for each other.

    Raises:
        ConfigError: the old file is invalid; it is not changed.
        StorageError: the new file cannot be written; the old one is not changed.
    """
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            old, key = (read_passwords(path), read_salt_key(path)) if path.exists() else ({}, None)
            key = key or secrets.token_bytes(32)
            text = f"{_HEAD}# Key of the salts of unknown users: {key.hex()}\n"
            text += "".join("\t".join(c).rstrip("\t") + "\n" for c in change(old).values())
            try:
                _write(temporary, text, path.stat() if path.exists() else None)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror}",
            path=str(path),
            hint="check the directory and its permissions",
        ) from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path}: cannot be read: {error.strerror}",
        where=str(path),
        hint=(
            "let the user of this process read the file"
            if isinstance(error, PermissionError)
            else "check the path; `penstock user create` creates the file"
        ),
    )


def _write(path: Path, text: str, owner: os.stat_result | None) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        if owner is not None and (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
            # An administrator may edit the file of the account that runs the node.
            os.fchown(out.fileno(), owner.st_uid, owner.st_gid)
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def _name_problem(name: str) -> str:
    if not 0 < len(name) <= LONGEST_NAME:
        return f"it has {len(name)} characters; 1 to {LONGEST_NAME} are allowed"
    if not name.isprintable() or name.startswith("#") or name != name.strip():
        return "it begins with #, begins or ends with a blank, or has unprintable characters"
    return ""


def _line_problem(credential: Credential) -> str:
    if problem := _name_problem(credential.name):
        return f"its name: {problem}"
    try:
        extract_parameters(credential.hash)
    except InvalidHashError:
        return "its second field is not an argon2 hash"
    try:
        if credential.scram and credential.verifier() is None:
            return "its third field is not a SCRAM-SHA-256 verifier"
    except binascii.Error:
        return "its third field has invalid base64"
    if credential.tube and TUBE_KEY.fullmatch(credential.tube) is None:
        return "its fourth field is not a TubeMQ signing key"
    return ""


LONGEST_SCRAM_MESSAGE: Final = 4096
"""Longest client message in bytes, to allow long names."""


class ScramExchange:
    """One SCRAM authentication on the server. ``secret``: secret of the server, from which salts of unknown users are
    derived; ``nonce``: new and random.

    Call :meth:`first` with the client's first message, then :meth:`final` with the second. None means rejection;
    clients get no reason.
    """

    __slots__ = ("_server", "_users", "claimed", "secret", "user")

    def __init__(self, users: Mapping[str, Credential], *, secret: bytes, nonce: str) -> None:
        self._users = users
        self.secret = secret
        self.claimed: str | None = None
        """The user name in the client's first message, for logs."""
        self.user: Credential | None = None
        """The user; authenticated after :meth:`final` returned a message."""
        self._server = _MECHANISM.make_server(self._verifier, s_nonce=nonce)

    def first(self, message: bytes) -> bytes | None:
        """Process the client-first-message; return the server-first-message."""
        return self._step(message, self._server.set_client_first, self._server.get_server_first)

    def final(self, message: bytes) -> bytes | None:
        """Process the client-final-message; return the server-final-message with the server's proof."""
        answer = self._step(message, self._server.set_client_final, self._server.get_server_final)
        return answer if self.user is not None else None

    def _step(self, message: bytes, put: Callable[[str], None], get: Callable[[], str]) -> bytes | None:
        if len(message) > LONGEST_SCRAM_MESSAGE:
            return None
        try:
            put(message.decode())
            return get().encode()
        except (ScramException, ValueError):
            # ValueError: not UTF-8, or invalid base64.
            return None

    def _verifier(self, name: str) -> tuple[bytes, bytes, bytes, int]:
        self.claimed = name
        user = self._users.get(name)
        verifier = None if user is None else user.verifier()
        if verifier is None:
            salt = hmac.digest(self.secret, name.encode(), hashlib.sha256)[:16]
            nobody = hmac.digest(self.secret, b"stored key of " + name.encode(), hashlib.sha256)
            return salt, nobody, nobody, SCRAM_ITERATIONS
        self.user = user
        return verifier.salt, verifier.stored_key, verifier.server_key, verifier.iterations
