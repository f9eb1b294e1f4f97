"""Fuzzing: one module per subject with its targets, a corpus for each target, and the ways to run them.

A target takes any bytes and returns its outcome; it raises where a rule is broken. `targets.py` names all targets,
`test_corpus.py` runs corpus and fixed mutations without atheris, `__main__.py` runs one target with it.
"""
