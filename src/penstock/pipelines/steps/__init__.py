"""Steps on rows: parsing, expressions, windows and lookups as transformations of Spark DataFrames."""
