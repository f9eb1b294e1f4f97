#!/usr/bin/env bash
# Resolve requirements/*.in and pyproject.toml into pinned files that hold versions and hashes only: no URLs, no paths.
#
# Usage: bash tools/lock.sh PYTHON [OPTION...]: options of pip-compile. Versions in the pinned files that are still
# permitted stay; --upgrade takes the newest ones, --upgrade-package NAME that of one package.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$1
shift
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pip-tools
compile=("$work/venv/bin/pip-compile" --quiet --generate-hashes --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-header
  --strip-extras --allow-unsafe --no-annotate "$@")
cd requirements
"${compile[@]}" build.in -o build.txt
"${compile[@]}" proto.in -o proto.txt
"${compile[@]}" go.in -o go.txt
"${compile[@]}" release.in -o release.txt
"${compile[@]}" audit.in -o audit.txt
"${compile[@]}" npm.in -o npm.txt
for other in spark-*.in; do
  "${compile[@]}" "$other" -o "${other%.in}.txt"
done
"${compile[@]}" --extra spark --extra java --extra plot --extra cluster --extra kafka --extra postgresql --extra aio --extra encryption --extra otel ../pyproject.toml dev.in -o dev.txt
# What the container images install, in the versions that the tests use.
"${compile[@]}" --extra cluster --extra kafka --extra aio --extra encryption --extra otel --constraint dev.txt ../pyproject.toml -o node.txt
"${compile[@]}" --extra spark --extra java --extra postgresql --extra otel --constraint dev.txt ../pyproject.toml -o pipeline.txt
if grep -nE '://|^-' ./*.txt; then
  echo "make lock: a URL or an option came into a pinned file" >&2
  exit 1
fi
