"""Values that can be logged besides numbers: images, audio, video, tables, histograms, figures and text, one class each."""

from fanfold.media.audio import Audio
from fanfold.media.base import Encoded, Media, decode
from fanfold.media.convert import coerce
from fanfold.media.figure import Figure
from fanfold.media.histogram import Histogram
from fanfold.media.image import Image
from fanfold.media.table import Table
from fanfold.media.text import Html, Text
from fanfold.media.video import Video

__all__ = [
    "Audio",
    "Encoded",
    "Figure",
    "Histogram",
    "Html",
    "Image",
    "Media",
    "Table",
    "Text",
    "Video",
    "coerce",
    "decode",
]
