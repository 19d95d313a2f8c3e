"""A destination as somebody outside would write it, from the docs alone: rows of JSON in a file, media as files beside it."""

import json
from collections import Counter
from pathlib import Path

from fanfold.trackers import Destination


class Rows(Destination):
    name = "rows-of-json"
    delivery = "readable"  # counts() knows what has arrived

    def __init__(self, run_name, path="rows.jsonl"):
        super().__init__(run_name)
        self.path = Path(path)

    def open(self, identity, remote=None):
        self.run = self.path.open("a", buffering=1)  # a row is written whole, whatever happens after it

    def close(self, status):
        self.put(status=status)
        self.run.close()

    def put(self, **row):
        print(json.dumps(row), file=self.run)

    def number(self, key, value, point):
        self.put(key=key, step=point.step, value=value)

    def take_text(self, item):
        self.put(key=item.key, step=item.step, text=item.text)

    def take_file(self, item):  # every kind that has no method of its own
        data, extension = item.content
        path = self.path.with_name(f"{item.key}-{item.step}-{item.at}.{extension}")
        path.write_bytes(data)
        self.put(key=item.key, step=item.step, file=path.name)

    def set_config(self, values):
        self.put(config=values)

    def describe(self, *, name, tags, notes, group):
        self.put(tags=list(tags))

    def counts(self):
        rows = map(json.loads, self.path.read_text().splitlines())
        return dict(Counter(row["key"] for row in rows if "key" in row))
