"""Count the generic calls in the C code that mypyc generated for the core's hot functions.

Usage: python -m tools.generic_calls [--write]

A generic call goes through CPython's object protocol: an attribute or method of a class that is not native, a call of a
callable value, arithmetic on objects. It costs ten to fifty times a native one. ``--write`` stores the counts as the
budget with which a test compares the code.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

from penstock.compiled import build_folder

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "tests" / "architecture" / "generic_calls.json"

HOT = (
    "link___ServerLink___data_received",
    "link___ServerLink___send_now",
    "server___MqttServer___received",
    "decoder___Decoder___add",
    "decoder___Decoder___next_type",
    "decoder___Decoder___publish",
    "property_blocks___decode_publish_properties",
    "property_blocks____check_user_properties",
    "property_blocks___PropertyBlock___user_property",
    "connection___BrokerConnection___receive",
    "connection___BrokerConnection___proceed",
    "publish___handle_publish",
    "publish____answer_later",
    "publish____inbound",
    "core___BrokerCore___route",
    "core___BrokerCore___respond",
    "core___BrokerCore___fan_out",
    "message___Message_____init__",
    "session___Session___deliver",
    "session___Session___acknowledge",
    "output___PacketWriter___send_publish",
    "output___PacketWriter___puback",
    "output___PacketWriter___take_output",
    "encoder___write_publish_head",
    "inflight___Inflight___assign",
    "inflight___Inflight___pop",
    "inflight___Inflight___free_id",
    "output___BrokerOutput___end_read",
    "connection_state___PendingAck___settle",
    "connection_state___PendingAck___record",
    "connection_state___ConnectionState___answer_settled",
    "binding___read_request",
    "binding___answer_payload",
    "binding___answer_properties",
    "commands___parse_payload",
    "commands____parse_elements",
    "commands____parse",
    "commands____parse_set",
    "deduplication___RecentWrites___note",
    "resp3___element",
    "resp3____header",
    "engine___store___Engine___execute",
    "engine___store___Engine____carry_out",
    "engine___store___Engine____set",
    "engine___store___Engine____get",
    "requests___read_preconditions",
    "hlc____read",
    "hlc___Hlc___padded_pieces",
    "hlc___StoreClock___next",
    "hlc___Hlc___is_before",
    "service___service___StateStoreService___receive",
    "service___service___StateStoreService____answer",
    "service___service___StateStoreService____release",
    "delivery___ResponseSender___answer",
    "writer___ChangeWriter___submit",
    "writer___ChangeWriter___add_answer",
    "writer___ChangeWriter___begin_commit",
    "writer___ChangeWriter___end_commit",
    "commit_queue___CommitQueue___request",
    "commit_queue___CommitQueue___wait",
    "commit_queue___CommitQueue____end_commit",
    "storage___Storage___commit",
    "rows___write_rows",
    "wal___LoggedEnvironment___commit_body",
    "wal_segments___PendingCommits___append",
    "wal_segments___SegmentLog___append",
    "wal_frames___encode_frame",
    "files___DirectFile___write",
    "files___DirectFile___sync",
    "framing___FrameDecoder___feed",
    "framing___FrameDecoder____whole_bytewise",
    "framing___encode_frames",
    "varint___RisingVarints___encode",
    "varint___encode_varint",
    "send_decoder___SendCollector___collect",
    "send_decoder___SendCollector___add",
    "send_decoder___SendDecoder___recognise",
    "send_decoder___encode_sent",
    "produce_handler___ProduceHandler___send_all",
    "produce_handler___ProduceHandler____store",
    "produce_handler___ProduceHandler____append",
    "storage___record___encode_run",
    "storage___record____record_sum",
    "segment___Segment___add",
    "storage___store___Store___append_many",
    "storage___store___Store____appended",
)
"""Functions that run for every SET, GET, message or send, by their names in the C code."""

_GENERIC = re.compile(
    r"PyObject_VectorcallMethod|PyObject_Vectorcall\(|CPyObject_GetAttr\(|CPyObject_GetSlice|PyObject_GetItem|"
    r"PyObject_RichCompare|PyNumber_"
)
_FUNCTION = re.compile(r"^[A-Za-z_].*?CPyDef_(\w+)\(.*\{$")


def count(build: Path) -> dict[str, int]:
    """Return the number of generic calls of each hot function in the C files of a build folder."""
    found: Counter[str] = Counter(dict.fromkeys(HOT, 0))
    seen: set[str] = set()
    for path in sorted((build / "build").rglob("*.c")):
        name = ""
        for line in path.read_text(errors="replace").splitlines():
            start = _FUNCTION.match(line)
            if start:
                name = start.group(1)
                seen.add(name)
            elif name in found:
                found[name] += len(_GENERIC.findall(line))
    missing = sorted(set(HOT) - seen)
    if missing:
        raise SystemExit(f"generic_calls: not in the build: {', '.join(missing)}: adapt the list to the code")
    return dict(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the counts as the budget")
    options = parser.parse_args()
    counts = count(build_folder(ROOT / "src" / "penstock"))
    for name, calls in counts.items():
        print(f"{calls:5}  {name}")
    print(f"{sum(counts.values()):5}  in all")
    if options.write:
        BUDGET.write_text(json.dumps(counts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
