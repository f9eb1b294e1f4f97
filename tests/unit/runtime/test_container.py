"""The memory limit of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.runtime.io.container import memory_limit


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "536870912\n", 1 << 29),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "1073741824\n", 1 << 30),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("other", "1\n", None),
    ],
)
def test_the_limit_is_that_of_the_cgroup(tmp_path: Path, name: str, text: str, limit: int | None) -> None:
    path = tmp_path / "sys/fs/cgroup" / name
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="ascii")
    assert memory_limit(tmp_path) == limit
