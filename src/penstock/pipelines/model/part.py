"""What every part of a pipeline file is: a frozen model that refuses names it does not know."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

from pydantic import BaseModel, ConfigDict

__all__ = ["Part", "directory"]

directory: ContextVar[Path] = ContextVar("directory of the pipeline file", default=Path())
"""Where the file stands that is being read: schema files are found from there."""


class Part(BaseModel):
    """One part of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
