"""The results that lie in a folder as one Markdown page, so that what is read is what was measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import generator

__all__ = ["page", "write_page"]

HEAD = """# Results

Written by `python -m benchmarks` from the JSON beside it. The ratio is penstock's median to that server's, same run.
"""


def write_page(folder: Path) -> None:
    """Write ``README.md`` of ``folder`` anew from its results."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    (folder / "README.md").write_text(page(results), encoding="utf-8")


def page(results: dict[str, Any]) -> str:
    """The page of results by the name of their benchmark."""
    lines = [HEAD]
    for name, result in results.items():
        if "machine" not in result:  # a comparison of versions, which the benchmarks' own page describes
            continue
        machine = result["machine"]
        versions = ", ".join(f"{k} {v}" for k, v in (machine["versions"] | machine.get("peers", {})).items())
        core = f", core {machine['core']}" if "core" in machine else ""
        where = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f} before it"
        lines += [
            f"## {name}",
            "",
            f"{where}, Python {machine['python']}{core}; {versions}.",
            "",
            "| case | server | median | least - greatest | unit | ratio |",
            "| --- | --- | ---: | ---: | --- | ---: |",
        ]
        ours = {(f["case"], f["unit"]): f["runs"] for f in result["figures"] if f["server"] == "penstock"}
        lines += [_row(figure, ours.get((figure["case"], figure["unit"]))) for figure in result["figures"]]
        lines.append("")
    return "\n".join(lines)


def _row(figure: dict[str, Any], ours: list[float] | None) -> str:
    runs = figure["runs"]
    is_peer = figure["server"] != "penstock" and ours is not None
    ratio = f"{statistics.median(ours) / statistics.median(runs):.2f}" if is_peer and ours else ""
    if max(figure.get("generator_cpu") or [0.0]) > generator.BOUND:
        ratio += " (generator-bound)"
    number = ",.0f" if statistics.median(runs) >= 100 else ",.2f"
    spread = f"{min(runs):{number}} - {max(runs):{number}}" if len(runs) > 1 else ""
    return (
        f"| {figure['case']} | {figure['server']} | {statistics.median(runs):{number}} | {spread} | {figure['unit']}"
        f" | {ratio.strip()} |"
    )
