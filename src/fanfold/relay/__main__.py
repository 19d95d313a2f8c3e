"""`python -m fanfold.relay`: the relay process. Started by a run; `fanfold sync --follow` is the same by hand."""

import sys

from .process import main

sys.exit(main())
