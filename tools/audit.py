"""Look for known vulnerabilities of the pinned packages, in the lists of PyPI and of the npm registry.

Usage: python -m tools.audit

pip-audit asks PyPI for every package of ``requirements/*.txt``, npm its registry for the libraries of the web console.
Where a list cannot be reached, or does not have a package, nothing is known about the package: pip-audit alone reports
success then.

Exit status: 0 if every package was looked up and none has a known vulnerability, 1 if some have one, 2 if some could
not be looked up.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.console_libraries import PINS
from tools.release import REQUIREMENTS, ROOT, console_libraries

LIMIT_S = 600.0
"""Time in seconds in which a list must have answered for all packages of a file."""

_PIN = re.compile(r"^([\w.-]+)==([^ ;\\]+)", re.MULTILINE)


@dataclass
class Audit:
    """What is known about the pinned packages, by their names and versions.

    ``vulnerable``: the vulnerabilities of a package. ``unknown``: why it could not be looked up.
    """

    packages: set[str] = field(default_factory=set)
    vulnerable: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the vulnerabilities, the reasons why packages were not looked up, and the counts."""
        found = [f"{package}: {text}" for package, text in sorted(self.vulnerable.items())]
        for reason in sorted(set(self.unknown.values())):
            packages = sorted(package for package, why in self.unknown.items() if why == reason)
            found.append(f"{len(packages)} not looked up: {reason}: {', '.join(packages)}")
        counts = f"{len(self.vulnerable)} with a known vulnerability, {len(self.unknown)} not looked up"
        return [*found, f"{len(self.packages)} packages: {counts}"]

    def add_python(self, file: Path, pip_audit: Path) -> None:
        """Look up the packages of a file of requirements with the program ``pip_audit``."""
        pinned = {name: f"{name} {version}" for name, version in _PIN.findall(file.read_text(encoding="utf-8"))}
        options = ["--require-hashes", "--disable-pip", "--format=json", "--progress-spinner=off"]
        answer, reason = _json([str(pip_audit), *options, "-r", str(file)])
        if "dependencies" not in answer:
            self._add_unknown(pinned.values(), reason)
            return
        for each in answer["dependencies"]:  # without those that a marker excludes here
            package = pinned[each["name"]]
            self.packages.add(package)
            if "skip_reason" in each:
                self.unknown[package] = "the list of PyPI does not have them"
            elif each["vulns"]:
                texts = (f"{vuln['id']}, fixed in {_versions(vuln['fix_versions'])}" for vuln in each["vulns"])
                self.vulnerable[package] = "; ".join(texts)

    def add_console(self, npm: str | None) -> None:
        """Look up the libraries of the web console with the program ``npm``, if there is one."""
        pinned = {each["name"]: f"{each['name']} {each['version']}" for each in console_libraries()}
        if npm is None:
            self._add_unknown(pinned.values(), "npm is not installed")
            return
        answer, reason = _json([npm, "audit", "--package-lock-only", "--json"], PINS)
        if "vulnerabilities" not in answer:
            # npm's message ends with the address of its registry.
            self._add_unknown(pinned.values(), f"npm: {answer.get('message', reason).partition(' - ')[0]}")
            return
        self.packages |= set(pinned.values())
        for name, each in answer["vulnerabilities"].items():
            texts = [via["url"] if isinstance(via, dict) else f"because of {via}" for via in each["via"]]
            self.vulnerable[pinned[name]] = "; ".join(texts)

    def _add_unknown(self, packages: Iterable[str], reason: str) -> None:
        packages = list(packages)
        self.packages |= set(packages)
        self.unknown |= dict.fromkeys(packages, reason)


def _json(command: list[str], folder: Path = ROOT) -> tuple[dict[str, Any], str]:
    """Return the JSON object that a command writes, empty if it writes none, and then the reason."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {}, f"no answer in {LIMIT_S:.0f} s"
    said = done.stderr.strip().splitlines() or [f"{command[0]} has exit status {done.returncode}"]
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    return (answer if isinstance(answer, dict) else {}), said[-1]


def _versions(versions: list[str]) -> str:
    return " and ".join(versions) or "no version"


def requirement_files() -> list[Path]:
    """Return the files with pinned packages of Python."""
    return [file for file in sorted(REQUIREMENTS.glob("*.txt")) if _PIN.search(file.read_text(encoding="utf-8"))]


def audit(environment: Path) -> Audit:
    """Return what is known about all pinned packages. ``environment``: folder for one with pip-audit, made anew.

    Raises:
        CalledProcessError: the pinned pip-audit cannot be installed.
    """
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "--require-hashes"]
    subprocess.run([*pip, "--only-binary", ":all:", "-r", str(REQUIREMENTS / "audit.txt")], check=True)
    found = Audit()
    for file in requirement_files():
        found.add_python(file, environment / "bin" / "pip-audit")
    found.add_console(shutil.which("npm"))
    return found


def main() -> int:
    try:
        found = audit(ROOT / "build" / "audit")
    except subprocess.CalledProcessError as error:
        print(f"audit: pip-audit cannot be installed: {error}", file=sys.stderr)
        return 2
    print("\n".join(found.lines()))
    return 1 if found.vulnerable else 2 if found.unknown else 0


if __name__ == "__main__":
    sys.exit(main())
