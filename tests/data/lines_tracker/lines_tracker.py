"""A tracker as somebody outside would write it, from the docs alone: a GeneralTracker that appends lines to a file."""

import json

from fanfold.trackers import GeneralTracker


class Lines(GeneralTracker):
    name = "lines-of-json"
    requires_logging_directory = False

    def __init__(self, run_name, path="lines.jsonl"):
        super().__init__()
        self.path = path

    @property
    def tracker(self):
        return self.file

    def start(self):
        self.file = open(self.path, "a")  # noqa: SIM115 - closed in finish()

    def store_init_configuration(self, values):
        print(json.dumps({"config": values}, default=str), file=self.file, flush=True)

    def log(self, values, step=None, **kwargs):
        print(json.dumps({"step": step, "values": values}, default=str), file=self.file, flush=True)

    def finish(self):
        self.file.close()
