"""Where what is made or fetched for Spark is kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory(name: str, environ: Mapping[str, str] | None = None) -> Path:
    """The directory ``name`` of penstock in the user's cache (XDG base directory specification); it need not exist."""
    configured = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    base = Path(configured) if configured.startswith("/") else Path.home() / ".cache"
    return base / "penstock" / name
