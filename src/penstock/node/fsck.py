"""Check of a data directory whose node is stopped: everything that a start reads, and the checksum of every value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

from penstock.errors import StorageError
from penstock.node.backup import environment_kind, locked_directory, open_environment
from penstock.runtime.io.wal_frames import RowChanges
from penstock.statestore.engine.record import decode_change, decode_record
from penstock.statestore.service.rows import NODE
from penstock.tube.storage.fsck import check as check_broker

__all__ = ["Checked", "Damage", "check_directory"]

_ROWS_BYTES: Final = 1 << 20
_LEAST: Final = 4


class Damage(NamedTuple):
    """A problem. ``damaged``: data are lost; otherwise the next start corrects it."""

    path: str
    text: str
    damaged: bool


class Checked(NamedTuple):
    """Contents of a data directory, and its problems."""

    rows: int
    segments: int
    messages: int
    bytes: int
    problems: list[Damage]

    @property
    def ok(self) -> bool:
        """True if nothing is damaged."""
        return not any(problem.damaged for problem in self.problems)


def check_directory(path: Path) -> Checked:
    """Read everything in the data directory ``path``. Commits that LMDB does not contain are applied, as by a start.

    Raises:
        StorageError, UnavailableError: it is in use, is no data directory, or lacks a part.
    """
    problems: list[Damage] = []
    rows = segments = messages = size = 0
    with locked_directory(path) as root:
        brokers = sorted(found for found in (root / "tube").glob("broker-*") if found.is_dir())
        names = ["statestore", "mqtt", "tube/master", *(f"tube/{broker.name}/meta" for broker in brokers)]
        for name in names:
            if (root / name / "data.mdb").is_file():
                rows += _check_environment(root, name, problems)
        for broker in brokers:
            try:
                report = check_broker(broker)
            except StorageError as error:
                problems.append(Damage(str(broker), str(error.what), damaged=True))
                continue
            segments, messages, size = segments + report.segments, messages + report.messages, size + report.bytes
            harmless = {"torn tail", "index behind", "set aside"}
            problems += [Damage(each.path, each.text, each.kind not in harmless) for each in report.findings]
    return Checked(rows, segments, messages, size, problems)


def _check_environment(root: Path, name: str, problems: list[Damage]) -> int:
    """Read every row of an environment; their number."""
    kind = environment_kind(name)
    assert kind is not None
    try:
        environment = open_environment(root, name)
    except StorageError as error:
        problems.append(Damage(str(root / name), f"{error.what}; {error.why or ''}".rstrip("; "), damaged=True))
        return 0
    count = 0
    try:
        for number, table in enumerate(kind.tables):
            intact = _CHECKS.get(name, {}).get(table, _is_intact)
            after = b""
            while table not in {"meta", "quarantine"}:
                body, after = environment.copy_rows(number, after, _ROWS_BYTES)
                changes = RowChanges()
                changes.add(body)
                rows = changes.tables.get(number, {})
                count += len(rows)
                for key, value in rows.items():
                    if value is not None and not intact(value):
                        text = f"row {key.hex()} of table {table}: its checksum does not match"
                        problems.append(Damage(str(root / name / "data.mdb"), text, damaged=True))
                if not after:
                    break
    except StorageError as error:
        problems.append(Damage(str(root / name), error.what, damaged=True))
    finally:
        environment.close()
    return count


def _is_intact(value: bytes) -> bool:
    """True for a value that begins with the CRC-32 of the rest."""
    return len(value) >= _LEAST and int.from_bytes(value[:_LEAST], "big") == crc32(value[_LEAST:])


_CHECKS: Final[Mapping[str, Mapping[str, Callable[[bytes], bool]]]] = {
    "statestore": {
        "keys": lambda value: decode_record(value) is not None,
        "fences": lambda value: decode_record(value) is not None,
        "changes": lambda value: decode_change(value, NODE) is not None,
    },
    "mqtt": {"incoming": lambda value: len(value) == 1},  # the state of a received QoS 2 message
}
