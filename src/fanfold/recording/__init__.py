"""Recording: a run as the training program sees it, from `init()` and `log()` to the end of the process."""
