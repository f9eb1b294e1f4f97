"""Sphinx configuration: MyST Markdown pages, no request to another host."""

from __future__ import annotations

import penstock

project = "penstock"
author = "the penstock developers"
copyright = f"2026, {author}"
version = release = penstock.__version__
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"penstock {version}"
html_copy_source = False
nitpicky = True
