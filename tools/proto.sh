#!/usr/bin/env bash
# Generates *_pb2.py and .pyi from the .proto files beside them: messages of TubeMQ, Sparkplug, and etcd for the cluster.
# The compiler is pinned (requirements/proto.txt) to the oldest protobuf line that penstock supports: code it generates
# runs with every later release of the supported range. It lives in an environment of its own, since its protobuf is
# older than the one the tests run with. PROTO_VENV names an environment to keep between runs.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${1:-python3}"
if [[ -n "${PROTO_VENV:-}" ]]; then
  venv="$PROTO_VENV"
else
  venv="$(mktemp -d)"
  trap 'rm -rf "$venv"' EXIT
fi
if [[ ! -x "$venv/bin/python" ]] || ! "$venv/bin/python" -c 'import grpc_tools' 2>/dev/null; then
  "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r requirements/proto.txt
fi
cd src
"$venv/bin/python" -W ignore -m grpc_tools.protoc -I . --python_out=. --pyi_out=. penstock/{tube/codec,mqtt,cluster}/proto/*.proto
# The generator leaves the mapping that stands for a message without type arguments, which strict typing refuses.
sed -i 's/, _Mapping\]/, _Mapping[str, object]]/g' penstock/{tube/codec,mqtt,cluster}/proto/*_pb2.pyi
