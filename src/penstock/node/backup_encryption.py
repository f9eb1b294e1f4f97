"""Encryption of backups with age: to public keys (recipients), so that the host that backs up cannot decrypt them.

Every file is a file of the age format, which ``age`` decrypts as well. The library, pyrage, reads and writes streams in
blocks of 64 KiB, so that memory does not depend on the size of a file. It is imported when it is needed: it belongs to
the extra ``encryption``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.errors import ConfigError, StorageError
from penstock.runtime.io.files import DirectFiles

if TYPE_CHECKING:
    from pyrage import ssh, x25519

    Identity: TypeAlias = x25519.Identity | ssh.Identity
    Recipient: TypeAlias = x25519.Recipient | ssh.Recipient

__all__ = [
    "SUFFIX",
    "EncryptedFile",
    "Recipients",
    "create_identity",
    "decrypt",
    "read_identities",
    "read_recipients",
]

SUFFIX: Final = ".age"
"""End of the name of an encrypted file."""
_SECRET: Final = "AGE-SECRET-KEY-"  # noqa: S105 # how identities begin
_ENCRYPTED: Final = (b"age-encryption.org/", b"-----BEGIN AGE ENCRYPTED FILE")
_SSH: Final = "-----BEGIN "


class Recipients(NamedTuple):
    """The public keys that a backup is encrypted to. ``names``: as text, sorted."""

    names: tuple[str, ...]
    keys: Sequence[Recipient]


def read_recipients(path: Path) -> Recipients:
    """Read a file with one public key per line, of age or SSH.

    Raises:
        StorageError: the file cannot be read.
        ConfigError: it has no public key, or a line that is none.
    """
    from pyrage import RecipientError, ssh, x25519

    found: dict[str, Recipient] = {}
    for number, line in _lines(_text(path, _read(path))):
        if line.startswith((_SECRET, _SSH)):
            raise ConfigError(
                f"{path} contains a secret key in line {number}",
                why="a backup is encrypted to public keys, and the host that backs up should not have the secret one",
                hint="set the file with the public key, which `penstock keygen` prints",
            )
        # Without the comment of a key of SSH.
        name = " ".join(line.split()[:2]) if line.startswith("ssh-") else line
        try:
            found[name] = (ssh if line.startswith("ssh-") else x25519).Recipient.from_str(name)
        except RecipientError as error:
            raise ConfigError(
                f"line {number} of {path} is not a public key: {_short(line)!r}",
                why=str(error),
                hint="it begins with age1, ssh-ed25519 or ssh-rsa; plugins of age are not supported",
            ) from error
    if not found:
        raise ConfigError(
            f"{path} contains no public key", hint="create a key: penstock keygen backup.key > backup.pub"
        )
    return Recipients(tuple(sorted(found)), list(found.values()))


def read_identities(path: Path) -> list[Identity]:
    """Read the secret keys of a file: of age, one per line, or one of SSH.

    Raises:
        StorageError: the file cannot be read.
        ConfigError: it has no secret key, or a line that is none; lines are not quoted.
    """
    from pyrage import IdentityError, ssh, x25519

    content = _read(path)
    if content.lstrip().startswith(_ENCRYPTED):  # before it is decoded: such a file can be binary
        raise ConfigError(
            f"{path} is encrypted with a passphrase",
            hint=f"pass it through a pipe: age --decrypt {path} | penstock restore --identity-file /dev/stdin ...",
        )
    text = _text(path, content)
    try:
        if text.lstrip().startswith(_SSH):
            return [ssh.Identity.from_buffer(text.encode())]
        found: list[Identity] = []
        for number, line in _lines(text):
            if not line.startswith(_SECRET):
                raise ConfigError(
                    f"line {number} of {path} is not a secret key",
                    why="it is a public key, which encrypts only" if line.startswith(("age1", "ssh-")) else None,
                    hint=f"set the file that `penstock keygen` created: its key begins with {_SECRET}",
                )
            found.append(x25519.Identity.from_str(line))
    except IdentityError as error:
        raise ConfigError(f"{path} contains no valid secret key", why=str(error)) from error
    if not found:
        raise ConfigError(f"{path} contains no secret key")
    return found


def create_identity(path: Path) -> str:
    """Create a file with a new secret key, readable by its owner only; return the public key.

    Raises:
        StorageError: the file exists or cannot be written.
    """
    from pyrage import x25519

    identity = x25519.Identity.generate()
    public = str(identity.to_public())
    created = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(f"# created: {created}\n# public key: {public}\n{identity}\n")
                file.flush()
                os.fsync(file.fileno())
            DirectFiles().sync_dir(path.parent)
        except OSError:
            path.unlink()  # a part of a key cannot be used
            raise
    except OSError as error:
        raise StorageError(
            f"{path} cannot be created: {error.strerror}",
            path=str(path),
            hint="choose another name: a backup cannot be restored without its key"
            if isinstance(error, FileExistsError)
            else None,
        ) from error
    return public


class EncryptedFile:
    """A new file with the encrypted form of what is written to it.

    A thread encrypts, because the library reads its input from an object. At most two pieces are held.
    """

    def __init__(self, path: Path, recipients: Recipients) -> None:
        """Create the file. Raises OSError."""
        self._output = _Output(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self._input = _Input()
        self._error: Exception | None = None
        self._thread = Thread(target=self._encrypt, args=(recipients.keys,), daemon=True)
        self._thread.start()

    @property
    def stored_bytes(self) -> int:
        """Bytes on disk, after :meth:`close`."""
        return self._output.size

    @property
    def sha256(self) -> str:
        """SHA-256 of the encrypted bytes, after :meth:`close`."""
        return self._output.hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Encrypt ``data``. Raises OSError: the file cannot be written."""
        if self._error is not None:
            raise self._error
        if data:
            self._input.pieces.put(data)

    def close(self) -> None:
        """Write the end of the file, durably. Raises OSError."""
        self._input.pieces.put(b"")
        self._thread.join()
        try:
            if self._error is not None:
                raise self._error
            os.fsync(self._output.descriptor)
        finally:
            os.close(self._output.descriptor)

    def _encrypt(self, keys: Sequence[Recipient]) -> None:
        import pyrage

        try:
            pyrage.encrypt_io(self._input, self._output, keys)  # type: ignore[arg-type] # read, write and flush suffice
        except BaseException as error:  # noqa: BLE001 # also a panic of the library: the file is not complete
            self._error = self._output.error or OSError(str(error))
        else:
            # The last bytes are written when the library drops its buffer, which ignores errors.
            self._error = self._output.error
        while self._input.more():  # a writer must not wait for a file that has failed
            pass


class _Input:
    """A queue as an object that can be read."""

    def __init__(self) -> None:
        self.pieces: Queue[bytes] = Queue(1)
        self._rest = memoryview(b"")
        self._ended = False

    def more(self) -> bool:
        """Get the next piece; False at the end."""
        if not self._ended:
            self._rest = memoryview(self.pieces.get())
            self._ended = not self._rest
        return not self._ended

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; empty at the end."""
        if not self._rest and not self.more():
            return b""
        part, self._rest = self._rest[:size], self._rest[size:]
        return bytes(part)


class _Output:
    """A file descriptor as an object that can be written; remembers an error, which the library may ignore."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = 0
        self.hash = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.descriptor, view) :]
        except OSError as error:
            self.error = self.error or error
            raise
        self.hash.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held."""


def decrypt(path: Path, descriptor: int, identities: Sequence[Identity]) -> None:
    """Decrypt the file ``path`` to the file ``descriptor``.

    Raises:
        StorageError: it is damaged or truncated, or no identity is of one of its recipients.
        OSError: a file cannot be read or written.
    """
    import pyrage

    out = _Output(descriptor)
    with path.open("rb") as file:
        try:
            pyrage.decrypt_io(file, out, identities)  # type: ignore[arg-type] # as above
        except (OSError, pyrage.DecryptError) as error:
            if out.error is None:
                raise StorageError(
                    f"{path} cannot be decrypted",
                    path=str(path),
                    why=f"age: {error}",
                    hint="set the key of one of its recipients, or use another backup if the file is damaged",
                ) from error
    if out.error is not None:
        raise out.error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}", path=str(path)) from error


def _text(path: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file", why="a file of keys has one key per line") from error


def _lines(text: str) -> Iterable[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if (stripped := line.strip()) and not stripped.startswith("#"):
            yield number, stripped


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "..."
