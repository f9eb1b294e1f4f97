"""Sources that pipelines make themselves, with the columns of the tube's: files, Delta tables, the clock."""
