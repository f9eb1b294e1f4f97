"""Index records, byte for byte."""

from __future__ import annotations

from penstock.tube.storage.index import INDEX_RECORD, as_array, filler, is_sound

# tubemq.md section 22 E: message id 42 of partition 10001 at data offset 0.
GOLDEN = bytes.fromhex("00002711000000000000000000000065000178620000018bcfe56800")


def test_golden_record() -> None:
    assert INDEX_RECORD.pack(10001, 0, 101, 96354, 1700000000000) == GOLDEN
    read = as_array(GOLDEN)
    assert read[0].tolist() == (10001, 0, 101, 96354, 1700000000000)


def test_soundness() -> None:
    def entry(position: int, size: int, time: int = 5) -> bytes:
        return INDEX_RECORD.pack(0, position, size, -1, time)

    assert is_sound(as_array(b""), 100, 0)
    assert not is_sound(as_array(b""), 100, 1)
    whole = entry(100, 60) + entry(160, 70)
    assert is_sound(as_array(whole), 100, 130)
    assert not is_sound(as_array(whole), 100, 131)
    assert not is_sound(as_array(whole), 90, 140)
    assert not is_sound(as_array(entry(100, 60) + entry(161, 69)), 100, 130)
    assert not is_sound(as_array(entry(100, 60) + entry(159, 71)), 100, 130)
    assert not is_sound(as_array(entry(100, 60, 9) + entry(160, 70, 8)), 100, 130)
    assert not is_sound(as_array(entry(100, 8) + entry(108, 122)), 100, 130)
    assert is_sound(as_array(entry(100, 60) + filler(160, 5) + entry(178, 52, 6)), 100, 130)
    assert is_sound(as_array(entry(100, 60) + filler(160, 5)), 100, 130)
