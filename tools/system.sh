#!/usr/bin/env bash
# Install the Debian packages that the file names, where apt and root are there. A registry may be slow: it tries again.
set -euo pipefail
mapfile -t wanted < <(grep -vE '^(#|$)' "$1")
missing=()
for package in "${wanted[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ "${#missing[@]}" -eq 0 ]; then
  echo "make system: ${wanted[*]}: installed"
  exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
  echo "make system: cannot install ${missing[*]}" >&2
  echo "  why: this needs apt-get and root" >&2
  echo "  hint: install them with your system's package manager; make test skips what it does not find" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
for attempt in 1 2 3 4 5; do
  if apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; then
    echo "make system: installed ${missing[*]}"
    exit 0
  fi
  echo "make system: attempt $attempt failed, waiting" >&2
  sleep $((attempt * 5))
done
exit 1
