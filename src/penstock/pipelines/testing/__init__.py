"""Test cases of a pipeline file, run on given rows without a broker."""
