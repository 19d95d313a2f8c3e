"""Import: runs of other tools become runs of ours, with their original times. One file per source, one writer for all."""
