"""Facts about a run: machine, code, command line and packages, with secrets masked."""
