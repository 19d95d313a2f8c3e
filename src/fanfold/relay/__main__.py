"""The relay process, `python -m fanfold.relay`. A run starts it; `fanfold sync --follow` does the same by hand."""

import sys

from .process import main

sys.exit(main())
