"""The black box of a run: evidence of hangs, crashes and memory errors, kept for after the job. See docs/blackbox.md."""
