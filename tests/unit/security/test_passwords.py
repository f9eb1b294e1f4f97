"""The password file: what it holds, how it is rewritten, what is refused."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from penstock.errors import ConfigError, StorageError
from penstock.security.passwords import (
    Credential,
    edit_passwords,
    make_credential,
    read_passwords,
    read_salt_key,
    verify_password,
)
from penstock.security.tube_key import tube_key


def put(path: Path, *credentials: Credential) -> None:
    edit_passwords(path, lambda old: old | {c.name: c for c in credentials})


def test_the_key_of_salts_is_kept_and_found_in_files_with_any_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    put(path, make_credential("ann", b"secret"))
    key = read_salt_key(path)
    assert key is not None
    put(path, make_credential("bob", b"secret"))
    assert read_salt_key(path) == key
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_salt_key(path) == key
    path.write_bytes(b"")
    assert read_salt_key(path) is None


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    ann, bob = make_credential("ann b", "pässword".encode()), make_credential("bob", b"\xff\x00 not UTF-8")
    put(path, ann)
    put(path, bob)
    assert read_passwords(path) == {"ann b": ann, "bob": bob}
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["passwords"], "nothing is left beside it"
    assert verify_password(ann, "pässword".encode())
    assert not verify_password(ann, b"password")
    assert verify_password(bob, b"\xff\x00 not UTF-8")
    assert not verify_password(None, b"anything")
    assert not verify_password(ann, b"x" * 65_535)
    assert ann.verifier() is not None
    assert bob.verifier() is None, "SCRAM cannot carry it"
    text = path.read_text()
    assert "pässword" not in text
    assert make_credential("ann b", "pässword".encode()) != ann, "salted anew"


def test_the_key_of_the_tube_is_the_same_everywhere_and_not_the_password(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    ann, spaced = make_credential("ann", b"secret"), make_credential("ann b", b"secret")
    assert ann.tube == tube_key("ann", b"secret")
    assert len(ann.tube) == 49
    assert spaced.tube == "", "the protocol separates names by blanks"
    assert len({ann.tube, tube_key("bob", b"secret"), tube_key("ann", b"other")}) == 3
    put(path, bob := make_credential("bob", b"\xff"), ann)
    assert read_passwords(path)["bob"] == bob, "without SCRAM, with a key"
    path.write_text("\n".join(line.rpartition("\t")[0] for line in path.read_text().splitlines()[1:]))
    assert read_passwords(path)["ann"] == ann._replace(tube="")


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    path.write_text("# mine\n")
    path.chmod(0o666)
    put(path, make_credential("a", b"b"))
    assert path.stat().st_mode & 0o777 == 0o600


def test_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real" / "passwords")
    put(link, make_credential("a", b"b"))
    assert link.is_symlink()
    assert list(read_passwords(tmp_path / "real" / "passwords")) == ["a"]


def test_two_that_edit_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    hashed = make_credential("x", b"x")
    threads = [threading.Thread(target=put, args=(path, hashed._replace(name=f"user-{n}"))) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_passwords(path)) == 20


@pytest.mark.parametrize("name", ["", "x" * 257, "#a", " a", "a ", "a\tb", "a\nb", "a\x7f"])
def test_names_that_cannot_be_used(name: str) -> None:
    with pytest.raises(ConfigError, match="user name"):
        make_credential(name, b"x")


@pytest.mark.parametrize("password", [b"", b"x" * 1025])
def test_passwords_that_cannot_be_used(password: bytes) -> None:
    with pytest.raises(ConfigError, match="password") as caught:
        make_credential("a", password)
    assert "xx" not in str(caught.value)


GOOD = make_credential("a", b"b").hash


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ann", "tabs between"),
        ("ann:" + GOOD, "tabs between"),
        ("ann\tplain", "not an argon2 hash"),
        ("ann\t" + GOOD + "\tSCRAM-SHA-256$x", "not a SCRAM-SHA-256 verifier"),
        ("ann\t" + GOOD + "\tSCRAM-SHA-256$4096:a$b:c", "base64"),
        ("ann\t" + GOOD + "\t\tmore", "not a TubeMQ signing key"),
        ("ann\t" + GOOD + "\t\t\tmore", "tabs between"),
        ("ok\t" + GOOD, "twice"),
        (" x\t" + GOOD, "its name"),
    ],
)
def test_lines_that_cannot_be_used(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "passwords"
    path.write_text(f"# head\n\nok\t{GOOD}\n{line}\n")
    with pytest.raises(ConfigError, match=words) as caught:
        read_passwords(path)
    assert caught.value.where == f"{path}:4"
    assert GOOD not in str(caught.value)
    before = path.read_bytes()
    with pytest.raises(ConfigError):
        put(path, make_credential("new", b"x"))
    assert path.read_bytes() == before


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_passwords(tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="byte 0 is not UTF-8"):
        read_passwords(tmp_path / "latin")
    with pytest.raises(StorageError, match="cannot be written"):
        put(tmp_path / "no" / "directory", make_credential("a", b"b"))


def test_a_rewrite_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "passwords"
    put(path, make_credential("a", b"b"))
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        put(path, make_credential("c", b"d"))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["passwords"]
