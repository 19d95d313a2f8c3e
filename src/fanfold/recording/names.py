"""A default name for a run: two words and a number, derived from its id and therefore the same on every rank."""

from __future__ import annotations

from zlib import crc32

_FIRST = (
    "amber ample azure bold brave brisk bright calm candid clear clever cobalt coral crisp deft eager early fair "
    "fleet fond frank fresh gentle glad golden grand hardy honest ivory jolly keen kind lively loyal lucid lunar "
    "mellow merry mighty modest neat noble olive patient plain polar proud pure quick quiet rapid ready rustic sage "
    "serene sharp silver smooth solar solid spry steady stellar sunny swift tidy vivid warm wise witty zesty"
).split()
_SECOND = (
    "acorn alder anchor arbor aspen badger beacon birch brook canyon cedar cliff comet condor coral crane creek "
    "delta dune eagle ember falcon fern finch fjord forest fox garnet glacier grove harbor hawk heron ibex island "
    "jasper juniper kestrel lagoon lake lark lichen lynx maple marsh meadow mesa moss oak ocean orchid osprey otter "
    "owl pebble pine plover prairie quartz raven reef ridge river robin sparrow spruce stone summit swan thistle "
    "tide valley walnut willow wren"
).split()


def name_for(run_id: str) -> str:
    """Return a readable name for a run id."""
    number = crc32(run_id.encode())
    first, rest = divmod(number, len(_SECOND))
    return f"{_FIRST[first % len(_FIRST)]}-{_SECOND[rest]}-{number % 89 + 10}"
