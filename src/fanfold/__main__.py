"""`python -m fanfold` is the command line too."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
