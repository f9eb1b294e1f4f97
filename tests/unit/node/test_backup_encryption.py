"""Encrypted backups: unreadable without the key, incremental and verified without it, restored with it."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pyrage
import pytest

from penstock.cli.main import main
from penstock.errors import ConfigError, OutOfSpaceError, PenstockError, StorageError
from penstock.node.backup import Item
from penstock.node.backup_directory import (
    MANIFEST,
    BackupReceiver,
    Manifest,
    _check_space,
    read_manifest,
    restore,
    verify,
)
from penstock.node.backup_encryption import (
    EncryptedFile,
    create_identity,
    decrypt,
    read_identities,
    read_recipients,
)
from penstock.node.fsck import check_directory
from penstock.tube.storage.broker_storage import BrokerStorage
from tests.tools import require_tool
from tests.unit.node.test_backup import LIMITS, append, back_up, changed_manifest, data_directory, flipped, values

SECRET = b"The quick brown fox"


def keys(folder: Path, name: str = "backup") -> tuple[Path, Path]:
    """The files of a new secret key and of its public key."""
    secret, public = folder / f"{name}.key", folder / f"{name}.pub"
    public.write_text(f"# where backups are restored\n\n{create_identity(secret)}\n")
    return secret, public


def encrypted_backup(folder: Path) -> tuple[Manifest, Path]:
    secret, public = keys(folder)
    return back_up(
        data_directory(folder / "data"), folder / "backups", recipients=read_recipients(public)
    ).manifest, secret


def test_an_encrypted_backup_is_restored_with_its_key_only(tmp_path: Path) -> None:
    found, secret = encrypted_backup(tmp_path)
    manifest = json.loads((found.path / MANIFEST).read_text())
    assert manifest["format"] == 2, "earlier versions, which know 1, refuse every greater one"
    stored = [path for path in found.path.rglob("*") if path.is_file() and path.name != MANIFEST]
    assert len(stored) == len(found.files) > 5
    for path in stored:
        content = path.read_bytes()
        assert content.startswith(b"age-encryption.org/v1\n")
        assert not any(text in content for text in (b"value-1", b"secret", b"000001"))
        assert path.stat().st_mode & 0o777 == 0o600
    assert verify(found) == []
    other, _ = keys(tmp_path, "other")
    for identities, reason in (
        ([], f"is encrypted\n  why: to {found.recipients[0]}"),
        (read_identities(other), f"does not decrypt {found.path}\n  why: it is encrypted to {found.recipients[0]}"),
    ):
        with pytest.raises(StorageError) as caught:
            restore(found, tmp_path / "new", identities=identities)
        assert reason in str(caught.value)
        assert not (tmp_path / "new").exists()
    target = restore(found, tmp_path / "new", identities=[*read_identities(other), *read_identities(secret)]).path
    assert values(target) == {b"key-1": b"value-1", b"key-2": b"value-2", b"key-3": b"value-3"}
    assert (target / "tube" / "admin-token").read_text() == "secret\n"
    assert (target / "tube" / "admin-token").stat().st_mode & 0o777 == 0o600
    storage = BrokerStorage(target / "tube" / "broker-1")
    assert storage.open_store("events", 10).end_offset == 30 * 28
    storage.close(clean=True)
    assert check_directory(target).ok


def test_unchanged_files_are_linked_while_the_keys_are_the_same(tmp_path: Path) -> None:
    first, secret = encrypted_backup(tmp_path)
    data, backups = tmp_path / "data", tmp_path / "backups"
    storage = BrokerStorage(data / "tube" / "broker-1", limits=LIMITS)
    append(storage, 5)
    storage.close(clean=True)
    _, other = keys(tmp_path, "other")
    both = tmp_path / "both.pub"
    both.write_text((tmp_path / "backup.pub").read_text() + other.read_text())
    second = back_up(data, backups, recipients=read_recipients(tmp_path / "backup.pub"))
    segment = next(name for name in sorted(first.files) if name.endswith(".tube"))
    assert second.linked_bytes > 3 * 4000
    assert first.path_of(segment).samefile(second.manifest.path_of(segment))
    restore(second.manifest, tmp_path / "new", identities=read_identities(secret))
    assert check_directory(tmp_path / "new").ok
    # With another key in addition nothing is linked: it could not decrypt the earlier files.
    third = back_up(data, backups, recipients=read_recipients(both))
    assert (third.linked_bytes, len(third.manifest.recipients)) == (0, 2)
    restore(third.manifest, tmp_path / "newer", identities=read_identities(tmp_path / "other.key"))
    plain = back_up(data, backups)
    assert (plain.linked_bytes, plain.manifest.recipients) == (0, ())
    assert json.loads((plain.manifest.path / MANIFEST).read_text())["format"] == 1
    assert verify(plain.manifest) == verify(second.manifest) == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flipped, "statestore/rows.age: its SHA-256 does not match"),
        (lambda path: os.truncate(path, 100), "statestore/rows.age: 100 bytes instead of"),
        (lambda path: path.unlink(), "statestore/rows.age: No such file or directory"),
    ],
    ids=["flipped", "truncated", "missing"],
)
def test_a_damaged_encrypted_file_is_named_without_the_key(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    found, secret = encrypted_backup(tmp_path)
    damage(found.path_of("statestore/rows"))
    assert [reason in line for line in verify(found)] == [True]
    with pytest.raises(StorageError) as caught:
        restore(found, tmp_path / "new", identities=read_identities(secret))
    assert reason in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_truncated_file_with_a_matching_checksum_is_not_restored(tmp_path: Path) -> None:
    """The format of age finds what a forged manifest hides."""
    found, secret = encrypted_backup(tmp_path)
    name = next(name for name in found.files if name.endswith(".tube"))
    path = found.path_of(name)
    path.write_bytes(path.read_bytes()[:-1])
    size, digest = path.stat().st_size, backup_directory_hash(path)

    def forge(stored: dict[str, object]) -> None:
        files = stored["files"]
        assert isinstance(files, dict)
        files[name][3:] = [digest, size]

    changed_manifest(found.path, forge)
    forged = read_manifest(found.path)
    assert verify(forged) == []
    with pytest.raises(StorageError) as caught:
        restore(forged, tmp_path / "new", identities=read_identities(secret))
    assert f"{path} cannot be decrypted\n  why: age: " in str(caught.value)
    assert not (tmp_path / "new" / "format.json").exists()  # a node does not start with it


def backup_directory_hash(path: Path) -> str:
    from penstock.node.backup_directory import _hash

    return _hash(path, lambda _: None)[1]


@pytest.mark.parametrize("limit", [0, 200, 70_000], ids=["header", "end", "middle"])
def test_a_full_disk_is_reported_also_at_the_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    _, public = keys(tmp_path)
    write = os.write

    def limited(descriptor: int, data: bytes) -> int:
        nonlocal limit
        limit -= len(data)
        if limit < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr("penstock.node.backup_encryption.os.write", limited)
    data = bytes(300_000 if limit > 1000 else 10)
    file = EncryptedFile(tmp_path / "file.age", read_recipients(public))
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012 # which of them depends on the thread
        for at in range(0, len(data), 100_000):
            file.write(data[at : at + 100_000])
        file.close()
    with BackupReceiver(tmp_path / "backups", read_recipients(public)) as receiver:
        limit = 0
        receiver.take(Item({"file": "a", "at": 0, "crc": 0}))
        receiver.take(Item({"end": {"files": {"a": [0, 0, 0]}, "point_at": 0}}))
        with pytest.raises(OutOfSpaceError, match="cannot be written: No space left"):
            receiver.finish()
    assert [path.name for path in (tmp_path / "backups").iterdir()] == ["lock"]
    limit = 0
    with pytest.raises(OutOfSpaceError, match="cannot be written: No space left"):
        receive(tmp_path / "backups", public, [bytes(70_000)] * 4)  # refused after one of them
    assert [path.name for path in (tmp_path / "backups").iterdir()] == ["lock"]


def receive(directory: Path, public: Path, pieces: list[bytes]) -> None:
    """Back up one file."""
    with BackupReceiver(directory, read_recipients(public)) as receiver:
        size = 0
        for piece in pieces:
            receiver.take(Item({"file": "a", "at": size, "crc": crc32(piece)}, piece))
            size += len(piece)
        receiver.take(Item({"end": {"files": {"a": [size, 0, 0]}, "point_at": 0}}))
        receiver.finish()


def test_a_failure_of_the_library_ends_the_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    _, public = keys(tmp_path)
    monkeypatch.setattr(pyrage, "encrypt_io", fail)
    with pytest.raises(StorageError, match="backups cannot be written: no memory"):
        receive(tmp_path / "backups", public, [SECRET])
    assert [path.name for path in (tmp_path / "backups").iterdir()] == ["lock"]


def test_a_restore_needs_space_for_the_operations_that_it_decrypts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, secret = encrypted_backup(tmp_path)
    plain = back_up(tmp_path / "data", tmp_path / "plain").manifest
    most = max(file.size for name, file in found.files.items() if name.endswith(("/rows", "/commits")))
    assert found.size == plain.size == plain.restored_bytes == found.restored_bytes - most
    space = os.statvfs(tmp_path)
    free = found.size

    def statvfs(_: object) -> os.statvfs_result:
        return os.statvfs_result((1, 1, space.f_blocks, free, free, 0, 0, 0, 0, 255))

    monkeypatch.setattr("penstock.node.backup_directory.os.statvfs", statvfs)
    with pytest.raises(OutOfSpaceError, match="has no space for the restore, which needs 1 MiB"):
        restore(found, tmp_path / "new", identities=read_identities(secret))
    assert list((tmp_path / "new").iterdir()) == []
    free += most
    _check_space(tmp_path, found)


def test_streams_are_of_age_whatever_the_pieces(tmp_path: Path) -> None:
    secret, public = keys(tmp_path)
    for number, pieces in enumerate(([], [b"a"], [b"x" * 65536], [b"", b"y" * 65535, b"z" * 3], [b"0123456789"] * 500)):
        file = EncryptedFile(tmp_path / f"{number}.age", read_recipients(public))
        for piece in pieces:
            file.write(piece)
        file.close()
        stored = (tmp_path / f"{number}.age").read_bytes()
        assert (file.stored_bytes, file.sha256) == (len(stored), backup_directory_hash(tmp_path / f"{number}.age"))
        assert pyrage.decrypt(stored, read_identities(secret)) == b"".join(pieces)


def test_the_program_age_decrypts_a_backup_and_its_keys_are_accepted(tmp_path: Path) -> None:
    age, keygen = require_tool("age"), require_tool("age-keygen")
    secret, public = tmp_path / "backup.key", tmp_path / "backup.pub"
    subprocess.run([keygen, "-o", str(secret)], check=True, capture_output=True)
    public.write_bytes(subprocess.run([keygen, "-y", str(secret)], check=True, capture_output=True).stdout)
    found = back_up(data_directory(tmp_path / "data"), tmp_path / "b", recipients=read_recipients(public)).manifest
    restore(found, tmp_path / "new", identities=read_identities(secret))
    for name, file in found.files.items():
        done = subprocess.run([age, "-d", "-i", str(secret), str(found.path_of(name))], check=True, capture_output=True)
        assert len(done.stdout) == file.size
    # The other direction: a key of SSH, and a file that age encrypted to ours.
    ours, our_public = keys(tmp_path, "ours")
    done = subprocess.run([age, "-R", str(our_public)], input=SECRET, check=True, capture_output=True)
    (tmp_path / "message.age").write_bytes(done.stdout)
    with (tmp_path / "message").open("wb") as out:
        decrypt(tmp_path / "message.age", out.fileno(), read_identities(ours))
    assert (tmp_path / "message").read_bytes() == SECRET


def test_keys_of_ssh_are_accepted(tmp_path: Path) -> None:
    keygen = require_tool("ssh-keygen")
    secret, public = tmp_path / "id", tmp_path / "id.pub"
    subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-C", "a comment", "-f", str(secret)], check=True)
    recipients = read_recipients(public)
    assert recipients.names == (" ".join(public.read_text().split()[:2]),)
    encrypted = io.BytesIO()
    pyrage.encrypt_io(io.BytesIO(SECRET), encrypted, recipients.keys)
    assert pyrage.decrypt(encrypted.getvalue(), read_identities(secret)) == SECRET


IDENTITY = "AGE-SECRET-KEY-1VT8WDDCP00638FF4QMUT595X97VYRQSCXAC3VMT6700TYVKKGH7S0QPTUK"
PUBLIC = "age19jarn5qy399wmldksrn20xe7ppqq86g3c882hatv4tlen25pafyq35j5q5"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "contains no public key\n  hint: create a key: penstock keygen"),
        ("# only\n", "contains no public key"),
        (f"\n{IDENTITY}\n", "contains a secret key in line 2"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\n", "contains a secret key in line 1"),
        (f"{PUBLIC}\nage1yubikey1qwerty\n", "line 2 of FILE is not a public key: 'age1yubikey1qwerty'"),
        ("ssh-ed25519\n", "line 1 of FILE is not a public key: 'ssh-ed25519'"),
        ("\xff", "FILE is not a text file"),
    ],
    ids=range(7),
)
def test_an_invalid_file_of_public_keys_is_explained(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        read_recipients(path)
    assert reason.replace("FILE", str(path)) in str(caught.value)
    assert IDENTITY not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("# none\n", "contains no secret key"),
        (f"{PUBLIC}\n", "line 1 of FILE is not a secret key\n  why: it is a public key, which encrypts only"),
        ("hunter2\n", "line 1 of FILE is not a secret key\n  hint: set the file that"),
        (f"{IDENTITY[:-1]}\n", "FILE contains no valid secret key\n  why: "),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\n", "FILE contains no valid secret key\n  why: "),
        (
            "age-encryption.org/v1\n-> scrypt\n--- \xff",
            "FILE is encrypted with a passphrase\n  hint: pass it through a pipe: age --decrypt",
        ),
    ],
)
def test_an_invalid_file_of_secret_keys_is_explained_without_its_content(
    tmp_path: Path, content: str, reason: str
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        read_identities(path)
    text = str(caught.value)
    assert reason.replace("FILE", str(path)) in text
    assert "hunter2" not in text
    assert IDENTITY[:-1] not in text


def test_missing_files_of_keys_are_named(tmp_path: Path) -> None:
    for read in (read_recipients, read_identities):
        with pytest.raises(PenstockError, match="none cannot be read: No such file"):
            read(tmp_path / "none")
    secret, _ = keys(tmp_path)
    assert secret.stat().st_mode & 0o777 == 0o600
    with pytest.raises(StorageError, match="cannot be created: File exists"):
        create_identity(secret)


def test_a_key_that_could_not_be_stored_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="key cannot be created: No space left"):
            create_identity(tmp_path / "key")
    assert list(tmp_path.iterdir()) == []
    create_identity(tmp_path / "key")


def test_the_commands_back_up_check_and_restore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, backups, secret = data_directory(tmp_path / "data"), tmp_path / "backups", tmp_path / "backup.key"

    def run(*args: object) -> tuple[int, str, str]:
        status = main([str(arg) for arg in args])
        return status, *capsys.readouterr()

    status, public, _ = run("keygen", secret)
    assert (status, public.startswith("age1")) == (0, True)
    (tmp_path / "backup.pub").write_text(public)
    status, shown, _ = run("backup", backups, "--data-dir", data, "--recipients-file", tmp_path / "backup.pub")
    assert (status, shown.splitlines()[-1]) == (0, f"key      {public.strip()}")
    assert ": intact, " in (shown := run("fsck", backups)[1])
    assert shown.endswith(", encrypted\n")
    assert run("fsck", backups, "--identity-file", secret)[0] == 0
    run("keygen", tmp_path / "other.key")
    status, shown, _ = run("fsck", backups, "--identity-file", tmp_path / "other.key", "--json")
    row = json.loads(shown)
    assert (status, row["ok"], row["encrypted"]) == (1, False, True)
    assert "the key does not decrypt" in row["problems"][0]
    status, shown, _ = run("fsck", backups, "--identity-file", tmp_path / "other.key")
    assert (status, shown.splitlines()[0].endswith(", encrypted")) == (1, True)
    assert "\n  the key does not decrypt" in shown
    status, _, error = run("restore", backups, tmp_path / "new")
    assert (status, "--identity-file FILE" in error) == (1, True)
    assert run("restore", backups, tmp_path / "new", "--identity-file", secret)[0] == 0
    assert values(tmp_path / "new")[b"key-2"] == b"value-2"
