"""The command line: results on standard output, everything else on standard error, exit status 0, 1 or 2."""
