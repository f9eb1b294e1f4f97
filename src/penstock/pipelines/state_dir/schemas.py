"""Schemas that a pipeline has looked up in a registry, and ids that were unknown there when a batch met them.

<state>/schemas/<registry>/<id>.json                the schema with this id
<checkpoint>/schemas/<batch>-<registry>-<id>.json   what a batch has decided about an id that was not stored before it

The schema of an id never changes. But an id may be registered between two attempts of a batch. If the first attempt
has committed the rows of the batch and not its dead letters, a message with this id would be in neither of them, or in
both. So what a batch knows of an id is decided once, before any of its rows leaves a task:

* An id that is stored when an attempt begins, and about which the batch has decided nothing, is known. Later attempts
  find it stored as well.
* About any other id, the first task that meets it asks the registry, and creates the file of the decision: the schema,
  or that the id is unknown. A task that finds the file, also while it asks, uses what it says. Then it stores the
  schema, for other batches.

Each unknown id costs a request and a file. Their number has a limit, since a topic may have any messages: a process
that has asked for ``MOST_UNKNOWN`` unknown ids of a batch creates ``<batch>-limit.json``, and fails, so that no row of
the attempt is committed. The next attempt begins with ``<batch>-known.json``: the ids that are stored by then, without
those decided as unknown. For it and later ones this file is the only decision. All other ids are unknown, and no task
asks for them.

The driver tells the tasks of an attempt which ids were stored (``BatchSchemas``). Sinks that share a query have the
same decisions: a task creates the file in the checkpoint of each. Messages whose id was unknown are dead letters, which
are redriven.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.errors import StorageError, UnavailableError
from penstock.pipelines.state_dir.layout import create_json, first_json, listed, read_json, sync_names
from penstock.spark.files.object_storage import ObjectPath, StoragePath, absolute_path, storage_path

__all__ = ["MOST_UNKNOWN", "SCHEMAS", "BatchSchemas", "StoredSchema", "decided_schemas", "remove_old_decisions"]

MOST_UNKNOWN = 100
"""Number of unknown ids of a batch for which a process asks."""

SCHEMAS = "penstock.schemas"
"""Property of a Spark job: ``BatchSchemas`` as text."""
_STORED = re.compile(r"([0-9]+)\.json")
_LIMIT, _KNOWN = "limit", "known"
_DECISION = re.compile(rf"(([0-9]+)-([0-9a-f]+-[0-9]+|{_LIMIT}|{_KNOWN}))\.json")


class StoredSchema(NamedTuple):
    """A schema in a registry; without ``text``, the id was unknown. ``kind`` and others: see ``RegisteredSchema``.

    The text of Protobuf is a descriptor set in base64, see ``registered_files``, with those that it refers to.
    """

    text: str | None
    kind: str = "AVRO"
    references: tuple[str, ...] = ()


class BatchSchemas(NamedTuple):
    """Ids of schemas that an attempt of a batch knows.

    ``state``: directory of the stored ones. ``batches``: the checkpoints and numbers of the batch, by sink. ``known``:
    ids that were stored when the attempt began, each as ``<registry>-<id>``, without those of decisions. ``fixed``: the
    contents of all schemas in base64, by id, in a test case, which has no registry. ``limited``: all other ids are
    unknown.
    """

    state: StoragePath | None
    batches: tuple[tuple[StoragePath, int], ...] = ()
    known: frozenset[str] = frozenset()
    fixed: Mapping[str, str] | None = None
    limited: bool = False

    @classmethod
    def begin(
        cls, state: StoragePath, registries: Iterable[str], batches: Sequence[tuple[StoragePath, int]]
    ) -> BatchSchemas:
        """Begin an attempt of ``batches``, which are computed together, with schemas of ``registries``."""
        directory = absolute_path(state / "schemas")
        known = set[str]()
        for registry in registries:
            # A worker that was killed may not have synced a name.
            sync_names(directory / registry)
            known |= {f"{registry}-{match[1]}" for match in listed(directory / registry, _STORED)}
        # After the stored ones: an id that is decided now is not among them, or decided as known.
        decided = [decided_schemas(checkpoint, batch) for checkpoint, batch in batches]
        for each in decided:
            known -= each.keys()
        made = cls(directory, tuple((absolute_path(path), batch) for path, batch in batches), frozenset(known))
        return made._with_limit(decided) if any({_LIMIT, _KNOWN} & each.keys() for each in decided) else made

    def _with_limit(self, decided: Sequence[Mapping[str, dict[str, Any]]]) -> BatchSchemas:
        """Return the schemas of an attempt after one that met too many unknown ids; ``decided``: by batch."""
        assert self.state is not None
        found = next((each[_KNOWN] for each in decided if _KNOWN in each), None)
        if found is None:
            known = set(self.known)
            for name, decision in ((name, each[name]) for each in decided for name in each.keys() - {_LIMIT}):
                if decision["text"] is not None:
                    # A task that was killed may have decided, and not stored it.
                    registry, _, schema_id = name.rpartition("-")
                    create_json(self.state / registry / f"{schema_id}.json", decision)
                    known.add(name)
            found = {"ids": sorted(known)}
        for path, batch in self.batches:
            file = path / "schemas" / f"{batch}-{_KNOWN}.json"
            if first_json(file, found) != found:
                raise _different_decisions("the schema ids", file)
        return self._replace(known=frozenset(found["ids"]), limited=True)

    def limit(self) -> UnavailableError:
        """Let the next attempt of the batches begin with a limit, and return the error that ends this one."""
        for path, batch in self.batches:
            create_json(path / "schemas" / f"{batch}-{_LIMIT}.json", {})
        return UnavailableError(
            f"a batch has messages with more than {MOST_UNKNOWN} schema ids that the schema registry does not have",
            applied=False,
            why="the topic has messages in another encoding, or of another registry",
            hint="nothing: the batch is repeated, and does not ask the registry for other ids; their messages are dead "
            "letters",
        )

    def as_text(self) -> str:
        """Return it as a property of a Spark job."""
        state = None if self.state is None else _as_data(self.state)
        batches = [[_as_data(path), batch] for path, batch in self.batches]
        return json.dumps(
            {
                "state": state,
                "batches": batches,
                "known": sorted(self.known),
                "fixed": self.fixed,
                "limited": self.limited,
            },
            sort_keys=True,
        )

    @classmethod
    def parse(cls, text: str) -> BatchSchemas:
        """Return what :meth:`as_text` has written."""
        data = json.loads(text)
        state = None if data["state"] is None else storage_path(*data["state"])
        batches = tuple((storage_path(*path), batch) for path, batch in data["batches"])
        return cls(state, batches, frozenset(data["known"]), data["fixed"], data["limited"])

    def find(self, registry: str, schema_id: int, look_up: Callable[[], StoredSchema]) -> StoredSchema:
        """Return the schema with the id ``schema_id`` in ``registry``; ``look_up`` asks the registry.

        Raises:
            StorageError: a file cannot be read or written.
        """
        if self.fixed is not None:
            return StoredSchema(self.fixed.get(str(schema_id)))
        assert self.state is not None
        name, stored = f"{registry}-{schema_id}", self.state / registry / f"{schema_id}.json"
        if name in self.known:
            return _schema(read_json(stored))
        if self.limited:
            return StoredSchema(None)
        paths = [path / "schemas" / f"{batch}-{name}.json" for path, batch in self.batches]
        found = next((each for each in map(_read, paths) if each is not None), None) or _as_json(look_up())
        for path in paths:
            # Another task may have decided first, and all of them ask for the files in the same order.
            found = first_json(path, found)
        for path in paths:
            if read_json(path) != found:
                raise _different_decisions(f"the schema id {schema_id}", path)
        made = _schema(found)
        if made.text is not None:
            create_json(stored, found)
        return made


def _different_decisions(what: str, path: StoragePath) -> StorageError:
    return StorageError(
        f"sinks that share a query have decided differently about {what}",
        path=str(path),
        why="another run has begun one of these batches: this run may have lost its lease",
        hint="check which run holds the lease (penstock pipeline status)",
    )


def decided_schemas(checkpoint: StoragePath, batch: int) -> dict[str, dict[str, Any]]:
    """Return the decisions of ``batch`` about ids, by ``<registry>-<id>``, and about the limit of unknown ids."""
    directory = checkpoint / "schemas"
    found = [match for match in listed(directory, _DECISION) if int(match[2]) == batch]
    if found:
        sync_names(directory)
    return {match[3]: read_json(directory / match[0]) for match in found}


def remove_old_decisions(checkpoint: StoragePath, batch: int) -> None:
    """Remove the decisions of batches that cannot be repeated any more when ``batch`` begins."""
    directory = checkpoint / "schemas"
    for match in listed(directory, _DECISION):
        # Spark keeps the plans of old batches, but repeats the last one only.
        if int(match[2]) < batch - 1:
            (directory / match[0]).unlink(missing_ok=True)


def _schema(data: Mapping[str, Any]) -> StoredSchema:
    return StoredSchema(data["text"], data["kind"], tuple(data["references"]))


def _as_json(schema: StoredSchema) -> dict[str, Any]:
    # As a file has it: what is read is compared with it.
    return {"text": schema.text, "kind": schema.kind, "references": [*schema.references]}


def _read(path: StoragePath) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except FileNotFoundError:
        return None


def _as_data(path: StoragePath) -> list[str | None]:
    return [str(path), path.endpoint, path.region] if isinstance(path, ObjectPath) else [str(path)]
