"""Test cases of a pipeline file, run on given records without a broker."""
