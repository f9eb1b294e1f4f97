"""Describe the structure of the source tree: numbers per package, and the diagram of ARCHITECTURE.md.

Usage: python -m tools.structure [SOURCE] [--diagram] [--write]

``--diagram`` prints the packages and their imports as Mermaid text; ``--write`` puts it into ARCHITECTURE.md, where a
test compares it with the imports.

An import inside a function or below ``if TYPE_CHECKING`` counts as an import. The level of a module is the length of
the longest chain of run-time imports that ends at it; an import is upward if its target is not on a lower level.
The numbers are descriptive, not limits.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"

GENERATED = ("penstock.tube.codec.proto", "penstock.cluster.proto")

ARCHITECTURE = SOURCE.parent / "ARCHITECTURE.md"
FENCE = re.compile(r"(?<=```mermaid\n).*?(?=```)", re.DOTALL)
OPEN_TO_ALL = frozenset({"errors", "__init__"})
"""Modules that every package may import: omitted from the diagram, where they would only add arrows."""

PACKAGES = (
    "penstock.runtime", "penstock.security", "penstock.cluster", "penstock.mqtt.codec", "penstock.mqtt.engine",
    "penstock.mqtt",
    "penstock.statestore.engine", "penstock.statestore.service", "penstock.statestore", "penstock.tube.engine",
    "penstock.tube.storage", "penstock.tube.client", "penstock.tube", "penstock.node", "penstock.spark",
    "penstock.pipelines", "penstock.cli", "penstock.demo", "penstock.testing", "penstock",
)  # fmt: skip
"""Rows of the table; a module is counted in every package that contains it."""


@dataclass
class Module:
    """One source file: its lines, classes, and imports from this tree (dotted names)."""

    name: str
    lines: int
    classes: list[str]
    methods: list[tuple[str, str]]
    """(class, method) of every method."""
    at_run_time: set[str] = field(default_factory=set)
    for_types: set[str] = field(default_factory=set)

    @property
    def imports(self) -> set[str]:
        return self.at_run_time | self.for_types


def read(source: Path = SOURCE) -> dict[str, Module]:
    """Return every hand-written module below ``source`` by its dotted name."""
    found: dict[str, tuple[Path, bool]] = {}
    for path in sorted(source.rglob("*.py")):
        package = path.name == "__init__.py"
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if package else parts)
        if not name.startswith(GENERATED) and name != "penstock.__main__":  # that one only starts `cli`
            found[name] = path, package
    modules = {}
    # One tree at a time: the garbage collector visits all nodes that are kept, again and again.
    for name, (path, package) in found.items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        module = modules[name] = Module(
            name,
            text.count("\n"),
            [node.name for node in tree.body if isinstance(node, ast.ClassDef)],
            [
                (c.name, f.name)
                for c in classes
                for f in c.body
                if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))
            ],
        )
        typing_only = {id(node) for guard in _type_checking(nodes) for node in ast.walk(guard)}
        for node in nodes:
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            imports = module.for_types if id(node) in typing_only else module.at_run_time
            imports.update(target for target in _targets(node, name, package, found) if target != name)
        module.for_types -= module.at_run_time
    return modules


def _type_checking(nodes: Iterable[ast.AST]) -> Iterator[ast.If]:
    for node in nodes:
        if isinstance(node, ast.If):
            names = (getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node.test))
            if "TYPE_CHECKING" in names:
                yield node


def _targets(node: ast.AST, name: str, package: bool, known: Iterable[str]) -> Iterator[str]:  # noqa: FBT001 -- a fact about name
    """Return the modules of the tree that an import statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = name.split(".") if package else name.split(".")[:-1]
            base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
        for alias in node.names:
            full = f"{base}.{alias.name}"
            if full in known:
                yield full
            elif base in known:
                yield base


def within(modules: Mapping[str, Module], package: str) -> dict[str, Module]:
    """Return the modules of ``package``."""
    return {name: m for name, m in modules.items() if name == package or name.startswith(f"{package}.")}


def reachable(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Map each module to all modules that it imports, directly or not."""
    found: dict[str, set[str]] = {}
    for name in modules:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            for target in modules[waiting.pop()].imports & modules.keys():
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        found[name] = seen
    return found


def levels(modules: Mapping[str, Module]) -> dict[str, int]:
    """Map each module to its level; level 0 imports no other of ``modules`` at run time."""
    found: dict[str, int] = {}

    def level(name: str, above: frozenset[str]) -> int:
        if name not in found:
            below = (modules[name].at_run_time & modules.keys()) - above - {name}
            found[name] = 1 + max((level(target, above | {name}) for target in below), default=-1)
        return found[name]

    for name in modules:
        level(name, frozenset())
    return found


def circles(modules: Mapping[str, Module]) -> list[list[str]]:
    """Return groups of modules that import each other, directly or not; the largest first."""
    reach = reachable(modules)
    groups = {
        frozenset({name, *(t for t in reach[name] if name in reach[t])}) for name in modules if name in reach[name]
    }
    return sorted((sorted(group) for group in groups), key=len, reverse=True)


def figures(modules: Mapping[str, Module], package: str) -> tuple[int | str, ...]:
    """Return one row of the table: modules, lines, levels, imports, upward imports, circles (modules in each)."""
    own = within(modules, package)
    level = levels(own)
    imports = [(name, target) for name, m in own.items() for target in m.imports & own.keys()]
    upward = sum(level[target] >= level[name] for name, target in imports)
    rings = "+".join(str(len(circle)) for circle in circles(own)) or "0"
    return len(own), sum(m.lines for m in own.values()), max(level.values()) + 1, len(imports), upward, rings


def importers(modules: Mapping[str, Module]) -> Counter[str]:
    """Map each module to the number of modules that import it."""
    return Counter(target for m in modules.values() for target in m.imports)


def package_imports(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Map each package or module directly below the root to those that it imports."""
    found: dict[str, set[str]] = {}
    for name, module in modules.items():
        own = _part(name)
        if own in OPEN_TO_ALL:
            continue
        targets = {_part(target) for target in module.imports} - {own} - OPEN_TO_ALL
        found.setdefault(own, set()).update(targets)
    return found


def _part(name: str) -> str:
    return [*name.split("."), "__init__"][1]


def without_shortcuts(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Omit imports that a longer chain of imports implies; all imports inside a circle are kept."""
    reach: dict[str, set[str]] = {}
    for name in imports:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            new = imports.get(waiting.pop(), set()) - seen
            seen |= new
            waiting.extend(new)
        reach[name] = seen
    return {
        name: {
            target
            for target in targets
            if not any(target in reach[other] for other in targets - {target} if name not in reach[other])
        }
        for name, targets in imports.items()
    }


def diagram(modules: Mapping[str, Module]) -> str:
    """Return the packages as Mermaid text: an arrow points to the imported package; implied imports are omitted."""
    lines = ["flowchart TD"]
    reduced = without_shortcuts(package_imports(modules))
    lines += [f"    {name} --> {target}" for name in sorted(reduced) for target in sorted(reduced[name])]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, default=SOURCE, help="the tree (default: %(default)s)")
    parser.add_argument("--diagram", action="store_true", help="print the diagram of the packages instead")
    parser.add_argument("--write", action="store_true", help="write the diagram into ARCHITECTURE.md")
    options = parser.parse_args()
    modules = read(options.source)
    if options.write:
        text = ARCHITECTURE.read_text(encoding="utf-8")
        ARCHITECTURE.write_text(FENCE.sub(lambda _: diagram(modules), text), encoding="utf-8")
        return 0
    if options.diagram:
        print(diagram(modules), end="")
        return 0
    print("| package | modules | lines | levels | imports | upward | circles |")
    print("| --- | --: | --: | --: | --: | --: | --- |")
    for package in PACKAGES:
        if within(modules, package):
            print(f"| `{package}` | " + " | ".join(map(str, figures(modules, package))) + " |")
    used = importers(modules)
    classes = Counter(name for m in modules.values() for name in m.classes)
    methods = Counter(name for m in modules.values() for name in {method for _, method in m.methods})
    lengths = sorted(m.lines for m in modules.values())
    print()
    print(f"modules with exactly one importer: {sum(used[name] == 1 for name in modules)}")
    print(f"class names used in several modules: {sum(count > 1 for count in classes.values())}")
    print(f"modules with a class that has a method take: {methods['take']}, end: {methods['end']}, of: {methods['of']}")
    print(f"lines of a module: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
