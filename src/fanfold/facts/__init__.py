"""What a run knows about itself: machine, code, command line and packages, with secrets masked."""
