"""Log epochs: recognition of a possible loss, and storage."""

from __future__ import annotations

import pytest

from penstock.tube.storage.notes import begin_epoch, decode_epochs, encode_epochs, may_have_lost


@pytest.mark.parametrize(
    ("previous", "durability", "boot", "lost"),
    [
        (None, "memory", "b", False),
        ({"boot": "b"}, "memory", "b", True),
        ({"boot": "b"}, "flushed", "b", False),
        ({"boot": "a"}, "flushed", "b", True),
        ({"boot": ""}, "flushed", "", True),
        ({"boot": "a"}, "durable", "b", False),
    ],
)
def test_possible_data_loss_depends_on_durability_and_boot(
    previous: dict[str, str] | None, durability: str, boot: str, lost: bool
) -> None:
    assert may_have_lost(previous, durability, boot) == lost


def test_epochs_are_different_and_bounded() -> None:
    epochs = begin_epoch(begin_epoch([], 28), 84)
    assert [begin for _, begin in epochs] == [28, 84]
    assert decode_epochs(encode_epochs(epochs)) == epochs
    for end in range(1500):
        epochs = begin_epoch(epochs, end)
    assert [begin for _, begin in epochs] == list(range(500, 1500))
    assert len({epoch for epoch, _ in epochs}) > 990
    assert all(1 << 30 <= epoch < 1 << 31 for epoch, _ in epochs), "a positive int32, of the same length each"
