"""Steps on rows: parsing, expressions, windows and lookups as transformations of Spark DataFrames.

Read `graph` first: it builds the streams of a query, and calls the function of each step in the other modules.
"""
