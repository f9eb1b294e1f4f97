"""The names that programs import from ``penstock.tube``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock import tube
from penstock.tube.consumer import Consumer
from penstock.tube.reader import RangeReader


def test_every_public_name_exists() -> None:
    assert tube.Consumer is Consumer
    assert tube.RangeReader is RangeReader
    assert sorted(tube._HOMES) == tube.__all__
    for name in tube.__all__:
        assert getattr(tube, name).__name__ == name


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'penstock\.tube' has no attribute 'Producers'"):
        tube.Producers  # noqa: B018 - asked for, not used


def test_pure_modules_stay_free_of_asyncio() -> None:
    code = "import sys, penstock.tube.codec.framing; sys.exit('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
