"""Golden data of the state store: ``payloads.json`` says where each case comes from."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["vectors"]


@cache
def vectors() -> dict[str, Any]:
    """The golden data, as it stands in the file."""
    loaded: dict[str, Any] = json.loads((Path(__file__).parent / "payloads.json").read_text(encoding="utf-8"))
    return loaded
