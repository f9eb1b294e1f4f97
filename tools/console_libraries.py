"""Download the front-end libraries of the console, pinned by version and hash, into the package.

Usage: python tools/console_libraries.py [--check]

``requirements/console/package-lock.json`` has the versions and the hashes, which npm verifies; it has no addresses, so
that any registry can be used. The files of ``FILES`` are copied unchanged into ``console/web/vendor``, which git
ignores and the wheel contains, with their licences. Nothing is built from them. ``--check`` only reports whether they
exist.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements" / "console"
VENDOR = ROOT / "src" / "penstock" / "console" / "web" / "vendor"
STAMP = VENDOR / "stamp"
FILES = {
    "preact.mjs": "preact/dist/preact.mjs",
    "hooks.mjs": "preact/hooks/dist/hooks.mjs",
    "htm.mjs": "htm/dist/htm.mjs",
    "uplot.js": "uplot/dist/uPlot.iife.min.js",
    "uplot.css": "uplot/dist/uPlot.min.css",
    "pico.css": "@picocss/pico/css/pico.min.css",
    "dagre.mjs": "@dagrejs/dagre/dist/dagre.esm.js",
    "LICENSE-preact": "preact/LICENSE",
    "LICENSE-htm": "htm/LICENSE",
    "LICENSE-uplot": "uplot/LICENSE",
    "LICENSE-pico": "@picocss/pico/LICENSE.md",
    "LICENSE-dagre": "@dagrejs/dagre/LICENSE",
    "LICENSE-graphlib": "@dagrejs/graphlib/LICENSE",
}
"""Files in ``vendor``, by their paths in the packages."""


def pins() -> str:
    """Digest of the pinned versions and of the list of files."""
    text = (PINS / "package-lock.json").read_bytes() + repr(FILES).encode()
    return sha256(text).hexdigest()


def present() -> bool:
    """Return True if the files of these pins exist."""
    return (
        STAMP.is_file() and STAMP.read_text(encoding="ascii") == pins() and all((VENDOR / f).is_file() for f in FILES)
    )


def problem() -> str:
    """Return the reason why the files cannot be downloaded; "" if they can."""
    return "" if shutil.which("npm") else "npm is not installed"


def fetch() -> None:
    """Download the files with npm. Raises OSError or CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="penstock-console-") as name:
        folder = Path(name)
        for pin in ("package.json", "package-lock.json"):
            shutil.copyfile(PINS / pin, folder / pin)
        subprocess.run(
            ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        VENDOR.mkdir(parents=True, exist_ok=True)
        for target, source in FILES.items():
            shutil.copyfile(folder / "node_modules" / source, VENDOR / target)
    STAMP.write_text(pins(), encoding="ascii")


def main() -> int:
    """Download missing files. The exit status is 1 if they cannot be downloaded: the node then has no web console."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only report whether the files exist")
    check = parser.parse_args().check
    if present():
        return 0
    reason = "they were not fetched" if check else problem()
    if not reason:
        try:
            fetch()
        except (OSError, subprocess.CalledProcessError) as error:
            reason = str(error)
        else:
            print(f"console: libraries fetched into {VENDOR}")
            return 0
    print(f"console: no web console, its libraries are missing: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
