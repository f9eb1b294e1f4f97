"""Steps on rows: parsing, expressions, windows and look-ups as transformations of Spark's data frames."""
