"""Histories of real processes under faults, written as data, and their checkers: start with README.md."""
