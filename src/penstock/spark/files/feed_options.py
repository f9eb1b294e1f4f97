"""Options of the format ``penstock-delta``, without Spark: pipelines are checked before it is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from penstock.spark.files.object_storage import StoragePath, storage_path

__all__ = ["CHANGE_TYPE", "FeedOptions"]

CHANGE_TYPE: Final = "change_type"
"""Header of a record with the type of the change."""


class FeedOptions(NamedTuple):
    """The table and the limits of a batch, as options of the format."""

    path: str
    endpoint: str | None
    region: str | None
    max_versions: int
    max_files: int

    @property
    def table(self) -> StoragePath:
        """The directory of the table."""
        return storage_path(self.path, self.endpoint, self.region)

    def as_texts(self) -> dict[str, str]:
        """Return the options of the format."""
        texts = {"path": self.path, "maxVersions": str(self.max_versions), "maxFiles": str(self.max_files)}
        texts |= {} if self.endpoint is None else {"endpoint": self.endpoint}
        return texts if self.region is None else texts | {"region": self.region}

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> FeedOptions:
        """Return what ``as_texts`` has written; Spark passes names in lower case."""
        return cls(
            options["path"],
            options.get("endpoint"),
            options.get("region"),
            int(options["maxversions"]),
            int(options["maxfiles"]),
        )
