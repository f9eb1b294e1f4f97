"""The command line: results on standard output, everything else on standard error, exit status 0, 1 or 2.

Each command has a module; `pipeline` and `tube` are packages. Read `main` first, the table of commands, then `options`
and `output`, which commands are built from. `declarations` describes commands; `parser` makes typer's commands of them,
and `plain_lines` reads short command lines without typer.
"""
