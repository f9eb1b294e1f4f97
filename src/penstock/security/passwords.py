"""The password file: users, a slow hash of each password, and what SCRAM and TubeMQ need of it. Never the password.

A line a user, four fields with a tab between them; lines that begin with ``#`` and empty ones are skipped:

    name <TAB> $argon2id$v=19$m=19456,t=2,p=1$<salt>$<hash> <TAB> SCRAM-SHA-256$4096:<salt>$<StoredKey>:<ServerKey>
    <TAB> tube1.<key>

The third field may be empty: then the user has no SCRAM. It is written as PostgreSQL writes it. The fourth is the key
with which the user signs in the TubeMQ protocol (:mod:`penstock.security.tube_key`); without it the user has no access
there.

Source: RFC 9106 (Argon2), RFC 5802 and 7677 (SCRAM-SHA-256), RFC 5803 (how a verifier is stored).
"""

from __future__ import annotations

import base64
import binascii
import fcntl
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

__all__ = ["Credential", "ScramVerifier", "edit_passwords", "make_credential", "read_passwords", "verify_password"]

LONGEST_NAME: Final = 256
LONGEST_PASSWORD: Final = 1024
"""Bytes; a longer one is refused before it is hashed. MQTT itself would allow 65,535."""
SCRAM_ITERATIONS: Final = 4096
"""Of PBKDF2, which RFC 7677 asks for at least; each client pays for them on every connect."""
MAX_USERS: Final = 1_000_000

_HASHER: Final = PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1)
"""19 MiB, two passes, one lane, as OWASP advises where memory is scarce: 20 ms of one core, and an edge box lives."""
_MECHANISM: Final = ScramMechanism("SCRAM-SHA-256")
_SCRAM: Final = re.compile(r"SCRAM-SHA-256\$([0-9]{1,9}):([A-Za-z0-9+/=]+)\$([A-Za-z0-9+/=]+):([A-Za-z0-9+/=]+)")
_HEAD: Final = (
    "# Users of this node: name, argon2 hash, SCRAM verifier, TubeMQ signing key. Written by `penstock user`.\n"
)


class ScramVerifier(NamedTuple):
    """SCRAM credentials derived from a password: they prove nothing to another server."""

    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes


class Credential(NamedTuple):
    """One user of the file. Two are equal exactly where nothing about the user was changed."""

    name: str
    hash: str
    scram: str = ""
    tube: str = ""
    """The TubeMQ signing key: secret, unlike the other fields. Empty: the user cannot use the tube."""

    def verifier(self) -> ScramVerifier | None:
        """The third field, or None where there is none."""
        found = _SCRAM.fullmatch(self.scram)
        if found is None:
            return None
        salt, stored, server = (base64.b64decode(found[i], validate=True) for i in (2, 3, 4))
        return ScramVerifier(int(found[1]), salt, stored, server)


def make_credential(name: str, password: bytes) -> Credential:
    """Hash a password for the file; takes some 30 ms.

    Raises:
        ConfigError: the name or the password cannot be used.
    """
    if problem := _name_problem(name):
        raise ConfigError(f"user name {name!r} cannot be used", option="user", why=problem, do="choose another name")
    if not 0 < len(password) <= LONGEST_PASSWORD:
        raise ConfigError(
            "the password cannot be used",
            option="password",
            why=f"it has {len(password)} bytes; 1 to {LONGEST_PASSWORD} are allowed",
            do="choose another one",
        )
    scram = ""
    # A password that SCRAM cannot carry (not UTF-8, control characters) still works as a plain one.
    with suppress(ScramException, UnicodeDecodeError):
        info = _MECHANISM.make_auth_info(password.decode(), SCRAM_ITERATIONS, secrets.token_bytes(16))
        salt, stored, server = (base64.b64encode(part).decode() for part in info[:3])
        scram = f"SCRAM-SHA-256${SCRAM_ITERATIONS}:{salt}${stored}:{server}"
    return Credential(name, _HASHER.hash(password), scram, tube_key(name, password) if can_sign(name) else "")


_NOBODY: Final = "$argon2id$v=19$m=19456,t=2,p=1$AAAAAAAAAAAAAAAAAAAAAA$" + "A" * 43


def verify_password(credential: Credential | None, password: bytes) -> bool:
    """Whether it is the user's password; takes as long for a user that does not exist (None), to say nothing of that.

    Some 20 ms of one core without the interpreter's lock: call it in a thread.
    """
    if len(password) > LONGEST_PASSWORD:
        return False
    try:
        _HASHER.verify(_NOBODY if credential is None else credential.hash, password)
    except (VerificationError, InvalidHashError):
        return False
    return credential is not None


def read_passwords(path: Path) -> dict[str, Credential]:
    """All users of the file at ``path``, by name.

    Raises:
        ConfigError: it cannot be read, or a line of it cannot be used; the line is named, never its hash.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}",
            where=str(path),
            do="check the path and its permissions; `penstock user create` makes the file",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8", where=str(path), do="write UTF-8") from error
    found: dict[str, Credential] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        where = f"{path}:{number}"
        name, *fields = line.split("\t")
        credential = Credential(name, *fields) if 1 <= len(fields) <= 3 else None
        problem = "expected name, hash, verifier and key with tabs between them" if credential is None else ""
        if credential is not None:
            problem = _line_problem(credential) or ("the name stands there twice" if name in found else "")
        if credential is None or problem:
            raise ConfigError(
                f"{where}: this line cannot be used", where=where, why=problem, do="set it with `penstock user`"
            )
        found[name] = credential
    if len(found) > MAX_USERS:
        raise ConfigError(f"{path}: has {len(found)} users, {MAX_USERS} are allowed", where=str(path))
    return found


def edit_passwords(path: Path, change: Callable[[dict[str, Credential]], Mapping[str, Credential]]) -> None:
    """Rewrite the file with what ``change`` makes of its users; an absent file has none.

    The new file is complete, on disk and readable by its owner only (mode 0600) before it takes the place of the old
    one; the owner stays who it was. Two that edit at once wait for each other.

    Raises:
        ConfigError: the old file cannot be used; it is left as it is.
        StorageError: the new one cannot be written; the old one is left as it is.
    """
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            old = read_passwords(path) if path.exists() else {}
            text = _HEAD + "".join("\t".join(c).rstrip("\t") + "\n" for c in change(old).values())
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
            f"{path}: cannot be written: {error.strerror}", path=str(path), do="check the directory and its permissions"
        ) from error


def _write(path: Path, text: str, owner: os.stat_result | None) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        if owner is not None and (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
            # The administrator edits the file of the account that the node runs as.
            os.fchown(out.fileno(), owner.st_uid, owner.st_gid)
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def _name_problem(name: str) -> str:
    if not 0 < len(name) <= LONGEST_NAME:
        return f"it has {len(name)} characters; 1 to {LONGEST_NAME} are allowed"
    if not name.isprintable() or name.startswith("#") or name != name.strip():
        return "it begins with #, begins or ends with a blank, or holds what cannot be printed"
    return ""


def _line_problem(credential: Credential) -> str:
    if problem := _name_problem(credential.name):
        return f"its name: {problem}"
    try:
        extract_parameters(credential.hash)
    except InvalidHashError:
        return "its second field is no argon2 hash"
    try:
        if credential.scram and credential.verifier() is None:
            return "its third field is no SCRAM-SHA-256 verifier"
    except binascii.Error:
        return "its third field holds base64 that is none"
    if credential.tube and TUBE_KEY.fullmatch(credential.tube) is None:
        return "its fourth field is no TubeMQ signing key"
    return ""
