"""Sphinx configuration: MyST Markdown pages, no request to another host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils.nodes import document
from sphinx.application import Sphinx

import penstock

project = "penstock"
author = "the penstock developers"
copyright = f"2026, {author}"
version = release = penstock.__version__
extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"penstock {version}"
html_static_path = ["_static"]
html_css_files = ["penstock.css"]
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))
html_copy_source = False
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
nitpicky = True


def setup(app: Sphinx) -> None:
    """Keep decision records out of the full-text search: user pages come first."""
    app.connect("doctree-read", _exclude_decisions_from_search)
    if app.tags.has("no_navigation"):
        app.connect("html-page-context", _without_navigation, priority=1)  # before the theme reads the tree


def _without_navigation(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    context.pop("toctree", None)


def _exclude_decisions_from_search(app: Sphinx, _doctree: document) -> None:
    if app.env.docname.startswith("decisions/"):
        app.env.metadata[app.env.docname]["nosearch"] = "true"
