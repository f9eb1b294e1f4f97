"""Pipelines as programs that do not need penstock's runtime: `script.py` first, then `code.py` for the layout."""
