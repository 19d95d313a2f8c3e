"""Media: what is snapshotted is what comes back, from real libraries, and nothing hostile gets through."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import json
import math
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import msgspec
import numpy as np
import pandas as pd
import PIL.Image
import plotly.graph_objects as go
import plotly.io
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fanfold import errors
from fanfold.media import (
    Audio,
    Figure,
    Histogram,
    Html,
    Image,
    Media,
    Table,
    Text,
    Video,
    audio,
    coerce,
    dataframes,
    decode,
    pixels,
)

mpl.use("Agg")
import matplotlib.pyplot as plt

moment = dt.datetime  # without a zone, as users' own times mostly are
RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (20, 30, 3), dtype=np.uint8)


def again(media: Media) -> Media:
    """Encode, carry the facts through msgpack as a frame does, and decode."""
    encoded = media.encode()
    facts = msgspec.msgpack.decode(msgspec.msgpack.encode({**encoded.meta, "ext": encoded.ext}))
    return decode(media.kind, facts, bytes(encoded.data))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> errors.Notices:
    """Count what is said, from zero."""
    fresh = errors.Notices()
    for module in (pixels, audio, dataframes):
        monkeypatch.setattr(module, "notices", fresh)
    return fresh


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    yield
    plt.close("all")


def same(left: object, right: object) -> bool:
    """Equal in type and value, NaN included, bit for bit for floats."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return np.float64(left).tobytes() == np.float64(right).tobytes() or (math.isnan(left) and math.isnan(right))
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return left == right


# Image


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_uint8_pixels_come_back_exactly_in_either_layout(channels):
    picture = RNG.integers(0, 256, (20, 30, channels), dtype=np.uint8)
    assert np.array_equal(again(Image(picture)).array(), picture)
    assert np.array_equal(again(Image(np.moveaxis(picture, -1, 0))).array(), picture)
    assert np.array_equal(np.asarray(PIL.Image.open(io.BytesIO(Image(picture).encode().data))), picture.squeeze())


def test_two_axes_are_one_channel():
    grey = RGB[..., 0]
    back = again(Image(grey))
    assert back.array().shape == (20, 30, 1)
    assert np.array_equal(back.array()[..., 0], grey)
    assert Image(grey).encode().meta == {"width": 30, "height": 20}


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_pil_images_keep_mode_and_pixels(mode):
    if mode == "I;16":
        original = PIL.Image.fromarray(RNG.integers(0, 65536, (20, 30), dtype=np.uint16))
    else:
        original = PIL.Image.fromarray(RGB).convert(mode)
    back = again(Image(original)).pil()
    assert back.mode == mode
    assert np.array_equal(np.asarray(back), np.asarray(original))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV"])
def test_pil_modes_that_png_lacks_become_rgb(mode):
    original = PIL.Image.fromarray(RGB).convert(mode)
    assert np.array_equal(again(Image(original)).array(), np.asarray(original.convert("RGB")))


def test_floats_up_to_one_are_scaled_and_larger_ones_are_not(said):
    exact = RGB.astype(np.float32)
    assert np.array_equal(again(Image(exact / 255)).array(), RGB)
    assert np.array_equal(again(Image(exact.astype(np.float64))).array(), RGB)
    assert not said.counts


def test_bools_and_16_bit_integers_span_the_whole_range():
    assert np.array_equal(Image(RGB > 127).array(), (RGB > 127) * np.uint8(255))
    assert np.array_equal(Image(RGB.astype(np.uint16) * 257).array(), RGB)
    assert Image(np.array([[128, 129, 65535]], np.uint16)).array()[..., 0].tolist() == [[0, 1, 255]]


def test_integers_out_of_range_are_clipped_with_one_warning(said, caplog):
    for _ in range(2):
        assert Image(np.array([[-5, 999]])).array().tolist() == [[[0], [255]]]
    assert said.counts == {"image values out of range": 2}
    assert len(caplog.records) == 1


def test_normalised_floats_are_rescaled_to_their_range():
    torch = pytest.importorskip("torch")
    mean, std = torch.tensor([0.485, 0.456, 0.406])[:, None, None], torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    picture = torch.linspace(0, 1, 3 * 16 * 16).reshape(3, 16, 16)
    shown = Image((picture - mean) / std).array()
    assert (shown.min(), shown.max()) == (0, 255)
    assert 60 < shown.mean() < 200  # neither black nor white
    bright = Image((picture / 8 + 0.875 - mean) / std)  # all above 0: nearly white pictures, normalised
    assert bright.array().max() == 255
    assert bright.encode().meta["rescaled"] == pytest.approx([1.7, 2.64], abs=0.1)
    for batch in (Image(torch.stack([picture * 4 - 2] * 2)), Video((torch.stack([picture * 4 - 2] * 3)).numpy(), fps=4)):
        assert batch.encode().meta["rescaled"] == pytest.approx([-2, 2])


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.2, 0.4], [51, 102]),  # within 0..1: as it is, and not stretched
        ([0.0, 100.0, 200.0], [0, 100, 200]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.0, 2.0, 4.0], [0, 128, 255]),
        ([0.0, 500.0, 1000.0], [0, 128, 255]),
        ([-1.0, math.nan, 3.0], [0, 0, 255]),
        ([-1.0, math.inf, 3.0, -math.inf], [0, 255, 255, 0]),
        ([-2.0, -2.0], [128, 128]),
        ([math.nan, math.nan], [0, 0]),
        ([0.5, math.inf], [128, 255]),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_which_float_is_which_brightness(values, shown, dtype):
    assert Image(np.array([values], dtype)).array()[0, :, 0].tolist() == shown


def test_rescaling_warns_once_for_each_key(runs_dir, caplog):
    import fanfold

    run = fanfold.init("p", system=False)
    odd = np.linspace(-2, 2, 64, dtype=np.float32).reshape(8, 8)
    for step in range(3):
        run.log(
            {"a": fanfold.Image(odd), "b": [fanfold.Image(odd), fanfold.Image(odd)], "fine": fanfold.Image(odd / 4 + 0.5)},
            step=step,
        )
    run.finish()
    warned = [record.message for record in caplog.records if "rescaled" in record.message]
    assert len(warned) == 2
    assert "'a' has floats from -2 to 2, outside 0..1" in warned[0]


def test_huge_float64_values_do_not_warn(said):
    assert Image(np.array([[1e300, -1e300]])).array().tolist() == [[[255], [0]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_torch_tensors_become_pixels(dtype):
    levels = torch.tensor([[0.0, 1.0], [0.5, 0.25]]) if dtype.is_floating_point else torch.tensor([[0, 255], [128, 64]])
    picture = again(Image(levels.to(dtype).requires_grad_(dtype.is_floating_point)))
    assert picture.array()[..., 0].tolist() == [[0, 255], [128, 64]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint8])
def test_jax_arrays_become_pixels(dtype):
    levels = [[0, 1.0], [0.5, 0.25]] if dtype != jnp.uint8 else [[0, 255], [128, 64]]
    assert again(Image(jnp.array(levels, dtype))).array()[..., 0].tolist() == [[0, 255], [128, 64]]


def test_a_traced_jax_value_is_refused_where_it_is_logged():
    def step(x):
        Histogram(x)
        return x

    with pytest.raises(TypeError, match="outside"):
        jax.jit(step)(jnp.arange(3.0))


def test_a_jax_array_survives_donation_of_its_buffer():
    values = jnp.arange(8.0)
    histogram = Histogram(values)
    values.delete()
    assert again(histogram).max == 7


@pytest.mark.parametrize("shape", [(5, 6, 7), (2, 5, 6, 7), (4,), (2, 2, 2, 2, 2)])
def test_a_layout_that_cannot_be_told_is_refused_with_the_choices(shape):
    with pytest.raises(ValueError, match=r"layout.*NCHW"):
        Image(np.zeros(shape, np.uint8))


def test_where_a_shape_fits_both_the_librarys_habit_decides():
    both = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
    assert np.array_equal(Image(both).array(), both)
    assert np.array_equal(Image(torch.from_numpy(both)).array(), np.moveaxis(both, 0, -1))


def test_a_given_layout_decides():
    cube = RNG.integers(0, 256, (3, 20, 3), dtype=np.uint8)
    assert np.array_equal(Image(cube, layout="HWC").array(), cube)
    assert np.array_equal(Image(cube, layout="CHW").array(), np.moveaxis(cube, 0, -1))
    with pytest.raises(ValueError, match="channels"):
        Image(np.zeros((5, 6, 7)), layout="HWC")
    with pytest.raises(ValueError, match="Use one of"):
        Image(cube, layout="WHC")


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_a_batch_is_laid_out_in_a_grid(layout):
    batch = RNG.integers(0, 256, (3, 8, 9, 3), dtype=np.uint8)
    sheet = again(Image(batch if layout == "NHWC" else np.moveaxis(batch, -1, 1))).array()
    assert sheet.shape == (18, 20, 3)
    assert np.array_equal(sheet[:8, :9], batch[0])
    assert np.array_equal(sheet[:8, 11:], batch[1])
    assert np.array_equal(sheet[10:, :9], batch[2])


@pytest.mark.parametrize("convert", [np.array, torch.tensor, PIL.Image.fromarray], ids=["numpy", "torch", "pil"])
def test_an_image_is_what_it_was_when_made(convert):
    given = convert(RGB)
    image = Image(given)
    if isinstance(given, PIL.Image.Image):
        given.paste((0, 0, 0), (0, 0, 30, 20))
    else:
        given[:] = 0
    assert np.array_equal(image.array(), RGB)


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "webp", "bmp", "tiff"])
def test_encoded_pictures_are_kept_as_they_came(kind, tmp_path):
    path = tmp_path / f"picture.{kind}"
    PIL.Image.fromarray(RGB).save(path)
    raw, shown = path.read_bytes(), np.asarray(PIL.Image.open(path).convert("RGB"))
    image = Image(str(path), caption="ü")
    path.write_bytes(b"overwritten")
    assert image.encode().data == raw
    assert image.encode().meta == {"caption": "ü", "width": 30, "height": 20}
    assert np.array_equal(again(Image(raw)).array(), shown)
    assert again(image).caption == "ü"


def test_boxes_are_copied_and_bounded():
    boxes = [{"position": {"minX": np.float32(0.5)}, "class_id": np.int64(3), "label": "cat"}]
    image = Image(RGB, boxes=boxes)
    boxes[0]["label"] = "dog"
    assert again(image).boxes == [{"position": {"minX": 0.5}, "class_id": 3, "label": "cat"}]
    with pytest.raises(ValueError, match="images of their own"):
        Image(RGB, masks=[{"mask": np.ones((600, 600))}])
    with pytest.raises(TypeError, match="lists and dicts"):
        Image(RGB, boxes=[object()])


@pytest.mark.parametrize("value", [5, object(), np.array(["a"]), np.zeros((4, 4), complex), None])
def test_what_is_no_picture_is_refused_in_three_parts(value):
    with pytest.raises(TypeError, match=r"Image got .*\. Nothing is recorded .*\. Pass "):
        Image(value)


@pytest.mark.parametrize("kind", [Image, Audio, Video])
def test_a_missing_file_and_unknown_bytes_are_refused(kind):
    with pytest.raises(ValueError, match="Check the path"):
        kind("no/such/file")
    with pytest.raises(ValueError, match="none of"):
        kind(b"%!PS-Adobe-3.0 EPSF-3.0")


def without_pillow(code: str) -> subprocess.CompletedProcess[bytes]:
    start = "import sys; sys.modules['PIL'] = None\nimport numpy as np\nfrom fanfold.media import *\n"
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, check=False, timeout=60)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_without_pillow_a_png_is_written_all_the_same(channels):
    code = f"a = np.arange(20*30*{channels}).astype(np.uint8).reshape(20, 30, {channels})\n"
    done = without_pillow(code + "sys.stdout.buffer.write(Image(a).encode().data)")
    expected = np.arange(20 * 30 * channels).astype(np.uint8).reshape(20, 30, channels)
    picture = PIL.Image.open(io.BytesIO(done.stdout))
    picture.verify()
    assert np.array_equal(again(Image(done.stdout)).array(), expected), done.stderr


def test_without_pillow_reading_back_names_what_to_install():
    done = without_pillow("i = Image(np.zeros((2, 2)))\ndecode('image', {}, i.encode().data).array()")
    assert b"MissingExtra" in done.stderr
    assert b"pip install 'fanfold[media]'" in done.stderr


# Values still on a device. The meta device has no bytes at all: whatever reads it raises.


@pytest.mark.parametrize("kind", [Image, Histogram, lambda t: Audio(t, sample_rate=8000)], ids=["image", "histogram", "audio"])
def test_a_device_tensor_waits_for_its_host_copy_and_is_not_read(kind):
    host = np.linspace(-1, 1, 40, dtype=np.float32).reshape(20, 2)
    media = kind(torch.empty(20, 2, device="meta", requires_grad=True))
    assert media.waiting() == [media]
    assert not media.pending.requires_grad
    with pytest.raises(RuntimeError, match="resolve"):
        media.encode()
    media.resolve(host)
    host_before = host.copy()
    host[:] = 0  # the ring the copy landed in is used again
    assert media.waiting() == []
    assert media.encode() == kind(host_before).encode()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16])
def test_a_landed_copy_may_be_raw_bits_of_a_type_numpy_lacks(dtype):
    numbers = torch.tensor([0.5, -2.0, 1.5, 0.0]).to(dtype)
    bits = numbers.view(torch.uint8 if dtype.itemsize == 1 else torch.int16).numpy()
    histogram = Histogram(torch.empty(4, device="meta", dtype=dtype))
    histogram.resolve(bits)
    assert (histogram.min, histogram.max, histogram.mean) == (-2.0, 1.5, 0.0)


def test_device_values_in_a_table_wait_as_parts_of_it():
    table = Table(columns=["picture", "score", "n"])
    table.add_data(Image(torch.empty(4, 4, device="meta")), torch.empty((), device="meta"), 1)
    first, second = table.waiting()
    first.resolve(np.eye(4))
    second.resolve(np.float32(0.25))
    second.resolve(np.float32(9))  # logged twice: the first copy stays
    assert table.waiting() == []
    picture, score, n = again(table).rows[0]
    assert np.array_equal(picture.array()[..., 0], np.eye(4, dtype=np.uint8) * 255)
    assert (score, n) == (0.25, 1)


def test_a_device_value_inside_a_list_cell_waits_too():
    table = Table(columns=["a"], data=[[[1, {"x": torch.empty(2, device="meta")}]]])
    logged = coerce(table)
    table.add_data(torch.empty((), device="meta"))
    (part,) = logged.waiting()
    assert len(table.waiting()) == 2
    part.resolve(np.array([3.0, 4.0]))
    assert again(logged).rows[0][0][1]["x"].tolist() == [3.0, 4.0]


def test_a_device_column_waits_too():
    table = Table({"x": torch.empty(3, device="meta", dtype=torch.int64)})
    (column,) = table.waiting()
    column.resolve(np.array([1, 2, 2**62]))
    assert again(table).rows == [[1], [2], [2**62]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_synchronises_with_a_real_device():
    tensor = torch.rand(16, 16, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        media = [Image(tensor), Histogram(tensor), Audio(tensor, sample_rate=8000), coerce(tensor), Table({"x": tensor[0]})]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(len(part.waiting()) == 1 for part in media)


# Audio


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.uint8])
@pytest.mark.parametrize("shape", [(500,), (500, 2)])
def test_integer_samples_come_back_exactly(dtype, shape):
    limits = np.iinfo(dtype)
    samples = RNG.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
    back = again(Audio(samples, sample_rate=16000))
    assert np.array_equal(back.array(), samples)
    assert back.array().dtype == dtype
    assert back.sample_rate == 16000


def test_float_samples_are_kept_to_16_bits_and_read_by_the_standard_library():
    sine = np.sin(np.linspace(0, 100, 8000)).astype(np.float32)
    encoded = Audio(torch.from_numpy(sine), sample_rate=8000, caption="sine").encode()
    assert encoded.meta == {"sample_rate": 8000, "caption": "sine", "channels": 1, "seconds": 1.0}
    with wave.open(io.BytesIO(encoded.data)) as file:
        assert (file.getframerate(), file.getnframes(), file.getsampwidth()) == (8000, 8000, 2)
    assert np.abs(decode("audio", {}, encoded.data).array() / 32767 - sine).max() < 1 / 65000


def test_channels_first_is_turned_round_and_loud_samples_are_said_once(said):
    samples = np.stack([np.full(100, 2.0), np.full(100, -0.5)])
    assert Audio(samples, sample_rate=100).array().tolist() == [[32767, -16384]] * 100
    assert said.counts == {"audio values out of range": 1}


def test_encoded_sound_is_kept_as_it_came(tmp_path):
    path = tmp_path / "a.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 3, 44100, 0, "NONE", ""))
        file.writeframes(b"\x01\x00\x00\xff\xff\xff")  # 24 bits: 1 and -1
    sound = again(Audio(path))
    assert sound.data == path.read_bytes()
    assert sound.sample_rate == 44100
    assert sound.array().tolist() == [256, -256]
    flac = again(Audio(b"fLaC and so on", sample_rate=48000))
    assert (flac.data, flac.sample_rate) == (b"fLaC and so on", 48000)
    with pytest.raises(ValueError, match=r"Audio\.data"):
        flac.array()


@pytest.mark.parametrize(
    ("samples", "rate", "message"),
    [
        (np.zeros(4), None, "sample_rate"),
        (np.zeros(4), -1, "Hz"),
        (np.zeros((99, 99)), 8000, "channels"),
        (np.zeros((2, 2, 2)), 8000, "shape"),
    ],
)
def test_sound_that_cannot_be_told_is_refused(samples, rate, message):
    with pytest.raises(ValueError, match=message):
        Audio(samples, sample_rate=rate)


def test_complex_and_64_bit_samples_are_refused():
    for dtype in (complex, np.int64):
        with pytest.raises(TypeError, match="int16"):
            Audio(np.zeros(4, dtype), sample_rate=8000)


# Video


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NHW"])
def test_frames_of_few_colours_come_back_exactly_even_when_some_repeat(layout):
    grey = np.repeat(RNG.integers(0, 2, (4, 10, 12), dtype=np.uint8) * 255, [1, 3, 1, 2], axis=0)
    film = np.repeat(grey[..., None], 3, axis=-1)
    given = {"NHWC": film, "NCHW": np.moveaxis(film, -1, 1), "NHW": grey}[layout]
    back = again(Video(given, fps=15))
    assert back.fps == 15
    assert np.array_equal(back.frames(), film)


def test_a_film_lasts_as_long_as_its_frames():
    film = RNG.integers(0, 256, (30, 6, 7, 3), dtype=np.uint8)
    picture = PIL.Image.open(io.BytesIO(Video(film, fps=30).data))
    delays = []
    for index in range(picture.n_frames):
        picture.seek(index)
        delays.append(picture.info["duration"])
    assert sum(delays) == 1000


def test_a_still_film_keeps_its_number_of_frames():
    assert again(Video(np.zeros((5, 6, 7, 3), np.uint8), fps=4)).frames().shape == (5, 6, 7, 3)


def test_encoded_film_is_kept_as_it_came(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"\x00\x00\x00\x18ftypisom....")
    film = again(Video(path, caption="c"))
    assert (film.data, film.caption, film.encode().ext) == (path.read_bytes(), "c", "mp4")
    with pytest.raises(ValueError, match=r"Video\.data"):
        film.frames()


@pytest.mark.parametrize(("shape", "fps"), [((4, 4), 4), ((2, 5, 4, 6), 4), ((4, 10, 10, 3), 0), ((4, 10, 10, 3), 1000)])
def test_film_that_cannot_be_told_is_refused(shape, fps):
    with pytest.raises(ValueError, match="Video"):
        Video(np.zeros(shape, np.uint8), fps=fps)


# Histogram


def test_counts_and_edges_are_those_of_numpy():
    values = RNG.normal(size=700_001)
    counts, edges = np.histogram(values, 64)
    back = again(Histogram(values))
    assert np.array_equal(back.counts, counts)
    assert np.array_equal(back.edges, edges)
    assert (back.min, back.max, back.count) == (values.min(), values.max(), values.size)
    assert back.mean == pytest.approx(values.mean(), rel=1e-12)
    assert back.std == pytest.approx(values.std(), rel=1e-12)


@settings(deadline=None, max_examples=150)
@given(
    values=hnp.arrays(
        st.sampled_from([np.float64, np.float32, np.float16, np.int64, np.uint64, np.int8, np.bool_]),
        hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=12),
    ),
    bins=st.integers(1, 300),
)
def test_any_array_gives_a_histogram_that_counts_each_value_once(values, bins):
    back = again(Histogram(values, bins=bins))
    wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    assert back.counts.sum() == back.count == finite.size
    assert (back.nan, back.pos_inf, back.neg_inf) == (np.isnan(wide).sum(), np.isposinf(wide).sum(), np.isneginf(wide).sum())
    assert 1 <= len(back.counts) <= bins
    assert len(back.edges) == len(back.counts) + 1
    assert (back.edges[1:] > back.edges[:-1]).all()
    if finite.size:
        assert (back.min, back.max) == (finite.min(), finite.max())
        assert np.array_equal(back.counts, np.histogram(finite, back.edges)[0])
    else:
        assert (back.min, back.max, back.mean) == (None, None, None)


@pytest.mark.parametrize(("low", "top"), [(0, 1), (-0.1, 0.7), (1e-300, 3e-300), (1e6, 1e6 + 1e-3), (-1e300, 3e300)])
def test_values_on_and_beside_an_edge_fall_into_the_right_bin(low, top):
    for bins in (7, 49, 64, 1000):
        edges = Histogram([low, top], bins=bins).edges
        values = np.concatenate([edges, np.nextafter(edges[1:], -np.inf), np.nextafter(edges[:-1], np.inf)])
        assert np.array_equal(Histogram(values, bins=bins).counts, np.histogram(values, edges)[0])


@pytest.mark.parametrize(
    "values", [[sys.float_info.max, 0.0], [sys.float_info.max] * 3, [-sys.float_info.max, sys.float_info.max], [5e-324, 0.0]]
)
def test_the_largest_and_smallest_floats_are_counted_without_a_warning(values):
    back = again(Histogram(values, bins=3))
    assert back.count == len(values)
    assert (back.min, back.max) == (min(values), max(values))
    assert min(values) <= back.mean <= max(values)


def test_a_list_and_each_library_give_the_same_histogram():
    values = [0.5, 1.5, 2.0, -4.0]
    expected = Histogram(np.array(values)).encode()
    for form in (
        values,
        tuple(values),
        torch.tensor(values),
        torch.tensor(values).bfloat16(),
        jnp.array(values),
        [values[:2], values[2:]],
    ):
        assert Histogram(form).encode() == expected


def test_a_ready_histogram_is_kept_as_it_is():
    counts, edges = np.histogram(RNG.normal(size=1000), 10)
    back = again(Histogram(np_histogram=(counts, edges)))
    assert np.array_equal(back.counts, counts)
    assert np.array_equal(back.edges, edges)
    assert (back.count, back.min) == (1000, None)


@pytest.mark.parametrize(
    "pair", [([1], [0]), ([1, 2], [0, 1]), ([-1], [0, 1]), ([1], [1, 0]), ([1], [0, math.nan]), 5, ([10**400], [0, 1])]
)
def test_an_unfitting_ready_histogram_is_refused(pair):
    with pytest.raises(ValueError, match=r"numpy\.histogram"):
        Histogram(np_histogram=pair)


@pytest.mark.parametrize("value", [["a"], np.array(["a"]), np.zeros(3, complex), "text", 5, [[1], [2, 3]], [None]])
def test_a_histogram_of_no_numbers_is_refused(value):
    with pytest.raises(TypeError, match="Histogram"):
        Histogram(value)


def test_bins_are_bounded_and_content_is_given_once():
    for arguments in ({"bins": 0}, {"bins": 10**9}, {"bins": 2.5}, {"np_histogram": ([1], [0, 1])}):
        with pytest.raises(ValueError, match="Histogram"):
            Histogram([1, 2], **arguments)


# Table

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(),
    st.datetimes(),
    st.datetimes(timezones=st.just(dt.timezone(dt.timedelta(hours=5, minutes=30)))),
    st.dates(),
    st.times(),
    st.timedeltas(),
)
cells = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3), max_leaves=5
)
one_kind = st.sampled_from([st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.integers(2**63, 2**66), cells])


@st.composite
def tables(draw):
    width, height = draw(st.integers(1, 4)), draw(st.integers(0, 6))
    columns = [draw(st.lists(draw(one_kind), min_size=height, max_size=height)) for _ in range(width)]
    return [f"c{i}" for i in range(width)], [list(row) for row in zip(*columns, strict=True)]


@settings(deadline=None, max_examples=200)
@given(tables())
def test_any_rows_come_back_with_their_types(content):
    columns, rows = content
    grown = Table(columns=columns)
    for row in rows:
        grown.add_data(*row)
    for table in (Table(columns=columns, data=rows), grown):
        back = again(table)
        assert back.columns == columns
        assert same(back.rows, rows)
        assert same(table.rows, rows)


@settings(deadline=None, max_examples=100)
@given(
    hnp.arrays(
        st.sampled_from(["<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "<u2", "|u1", "|b1", ">f8", ">i4"]),
        st.integers(0, 20),
    )
)
def test_any_numeric_column_comes_back_bit_for_bit(values):
    back = again(Table({"x": values})).column("x")
    assert back.dtype == values.dtype.newbyteorder("<")
    assert back.tobytes() == values.astype(values.dtype.newbyteorder("<")).tobytes()


def test_columns_of_every_library_and_bfloat16_as_float32():
    table = Table(
        {"np": np.arange(2), "torch": torch.tensor([0.5, 1.5]).bfloat16(), "jax": jnp.array([1, 2]), "list": ["a", None]}
    )
    back = again(table)
    assert back.column("torch").dtype == np.float32
    assert back.rows == [[0, 0.5, 1, "a"], [1, 1.5, 2, None]]


def test_media_in_cells_come_back_as_media():
    table = Table(columns=["step", "picture", "sound", "plot", "hist"])
    table.add_data(
        1, PIL.Image.fromarray(RGB), Audio(np.arange(9, dtype=np.int16), sample_rate=8), go.Figure(), Histogram([1, 2])
    )
    step, picture, sound, plot, hist = again(table).rows[0]
    assert step == 1
    assert np.array_equal(picture.array(), RGB)
    assert sound.array().tolist() == list(range(9))
    assert plot.json == go.Figure().to_json()
    assert hist.count == 2
    assert again(again(table)).rows[0][1].array().tolist() == RGB.tolist()


def test_array_cells_and_odd_scalars_come_back_plain():
    stamp = pd.Timestamp("2024-05-06 07:08:09.123456789")
    table = Table(columns=list("abcdefg"))
    table.add_data(
        np.arange(6).reshape(2, 3),
        np.float32(0.5),
        stamp,
        pd.NaT,
        np.datetime64("2024-01-01", "ns"),
        np.str_("x"),
        torch.tensor(3),
    )
    array, *rest = again(table).rows[0]
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert rest == [0.5, moment(2024, 5, 6, 7, 8, 9, 123456), None, moment(2024, 1, 1), "x", 3]


def test_rows_may_be_dicts_or_a_two_dimensional_array():
    assert again(Table(data=[{"a": 1, "b": 2}, {"a": 3, "c": 4}])).rows == [[1, 2, None], [3, None, 4]]
    assert again(Table(columns=["a", "b"], data=np.arange(4).reshape(2, 2))).rows == [[0, 1], [2, 3]]


def test_rows_added_after_logging_are_not_in_what_was_logged():
    table = Table(columns=["a"], data=[[1]])
    logged = coerce(table)
    table.add_data(2)
    logged_again = coerce(table)
    table.add_data("three")
    logged_again.add_data(9)
    assert [again(each).rows for each in (logged, logged_again, table)] == [[[1]], [[1 + 0], [2], [9]], [[1], [2], ["three"]]]


def test_caller_may_change_lists_arrays_and_frames_after_making_a_table():
    numbers, values, nested, frame = [1, 2], np.array([1, 2]), [[1], [2]], pd.DataFrame({"a": [1, 2]})
    made = [Table({"a": numbers}), Table({"a": values}), Table({"a": nested}), Table(dataframe=frame)]
    numbers[0] = values[0] = nested[0][0] = 99
    frame.loc[0, "a"] = 99
    assert [table.rows for table in made] == [[[1], [2]], [[1], [2]], [[[1]], [[2]]], [[1], [2]]]


def test_lone_surrogates_are_written_out():
    assert again(Table(columns=["\udc80"], data=[["a\ud800"]])).rows == [["a\\ud800"]]
    assert again(Text("\udc80")).text == "\\udc80"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Table(columns=["a"], data=[[1, 2]]),
        lambda: Table(columns=["a", "a"]),
        lambda: Table({"a": [1], "b": [1, 2]}),
        lambda: Table(columns=["a"]).add_data(1, 2),
        lambda: Table(data=[[1]]),
        lambda: Table({"a": [1]}, data=[[1]]),
        lambda: Table(dataframe=pd.DataFrame([[1, 2]], columns=["a", "a"])),
        lambda: Table({"a": np.zeros((2, 2))}),
        lambda: Table(columns=[str(i) for i in range(20_000)]),
    ],
)
def test_an_uneven_table_is_refused(make):
    with pytest.raises(ValueError, match="Nothing is recorded"):
        make()


@pytest.mark.parametrize("cell", [object(), 1j, Table(columns=["a"]), np.array([1j])])
def test_a_cell_no_table_keeps_is_refused(cell):
    with pytest.raises(TypeError, match="Nothing is recorded"):
        Table(columns=["a"]).add_data(cell)


FRAME = {
    "int": np.array([1, 2**60 + 1, -(2**63)]),
    "uint": np.array([0, 1, 2**64 - 1], np.uint64),
    "float": [0.1, np.nan, -np.inf],
    "half": np.array([0.5, 1, 2], np.float16),
    "bool": [True, False, True],
    "text": ["a", "ü", ""],
    "time": pd.to_datetime(["2020-01-01T00:00", "2021-06-05T04:03:02.000000001", None], format="ISO8601").as_unit("ns"),
    "zone": pd.to_datetime(["2020-01-01", None, "2021-07-01"]).tz_localize("Europe/Paris"),
    "span": pd.to_timedelta([1, 2, None], unit="s"),
    "maybe": pd.array([1, None, 2**60 + 1], "Int64"),
    "maybe_bool": pd.array([True, None, False], "boolean"),
    "maybe_float": pd.array([0.5, None, 2], "Float32"),
}


def test_a_pandas_frame_comes_back_equal():
    frame = pd.DataFrame(FRAME)
    pd.testing.assert_frame_equal(again(Table(dataframe=frame)).to_pandas(), frame)
    assert again(Table(dataframe=frame)).rows[1][9] is None


def test_a_pandas_index_is_kept_where_it_says_something():
    described = pd.DataFrame({"x": [1.0, 3.0]}).describe()
    assert again(Table(dataframe=described)).rows[1] == ["mean", 2.0]
    assert again(Table(dataframe=pd.DataFrame({"x": [1, 2, 3]})[1:])).rows == [[2], [3]]


def test_objects_in_a_frame_that_no_table_keeps_become_text_and_are_said(said):
    frame = pd.DataFrame({"c": pd.Categorical(["u", None]), "o": [1j, "x"]})
    assert again(Table(dataframe=frame)).rows == [["u", "1j"], [None, "x"]]
    assert said.counts == {"table cell complex": 1}


def test_a_polars_frame_comes_back_equal():
    frame = pl.DataFrame(
        {
            "int": [1, None, 2**60 + 1],
            "float": [0.1, float("nan"), None],
            "bool": [True, None, False],
            "text": ["a", None, "ü"],
            "day": [dt.date(2020, 1, 1), None, dt.date(1, 1, 1)],
            "time": [moment(2020, 1, 1, 1, 1, 1, 1), None, moment(1950, 1, 1)],
            "span": [dt.timedelta(days=-1), None, dt.timedelta(microseconds=1)],
            "list": [[1, 2], None, []],
            "struct": [{"a": 1}, {"a": 2}, {"a": None}],
            "bytes": [b"a", None, b""],
        }
    ).with_columns(zone=pl.col("time").dt.replace_time_zone("Asia/Tokyo"), small=pl.col("int").is_null().cast(pl.Int8))
    back = again(Table(dataframe=frame)).to_polars()
    assert back.schema == frame.schema
    assert back.equals(frame)


def test_an_arrow_table_comes_back_equal():
    table = pa.table(
        {
            "int": pa.array([1, None, 2**60 + 1]),
            "float": pa.array([0.5, None, 1.5], pa.float32()),
            "bool": [True, None, False],
            "text": ["a", None, "ü"],
            "time": pa.array([0, None, 10**18], pa.timestamp("ns")),
            "zone": pa.array([0, None, 10**9], pa.timestamp("s", "America/New_York")),
            "span": pa.array([1, None, -5], pa.duration("ms")),
            "day": pa.array([0, None, 5], pa.date32()),
            "list": [[1, 2], None, []],
        }
    )
    back = again(Table(dataframe=table)).to_arrow()
    assert back.schema == table.schema
    assert back.equals(table)
    chunked = pa.concat_tables([table, table])
    assert again(Table(dataframe=chunked)).to_arrow().combine_chunks().equals(chunked.combine_chunks())


def test_mixed_and_media_columns_reach_every_frame():
    table = again(Table(columns=["mixed", "picture"], data=[[1, Image(RGB)], ["x", None]]))
    assert table.to_pandas()["mixed"].tolist() == [1, "x"]
    assert table.to_polars()["mixed"].to_list() == ["1", "x"]
    assert table.to_polars()["picture"][0].array().tolist() == RGB.tolist()
    assert table.to_arrow()["picture"][0].as_py().startswith(b"\x89PNG")
    huge = again(Table({"x": [2**200, None]}))
    assert huge.to_polars()["x"].to_list() == huge.to_arrow()["x"].to_pylist() == [str(2**200), None]


def test_an_80_megabyte_table_encodes_within_a_second():
    numbers = RNG.random((1_000_000, 10))
    table = Table(columns=list("abcdefghij"), data=numbers)
    start = time.perf_counter()
    encoded = table.encode()
    took = time.perf_counter() - start
    back = decode("table", encoded.meta, encoded.data)
    assert all(np.array_equal(back.column(name), numbers[:, i]) for i, name in enumerate("abcdefghij"))
    assert took < 1


def test_an_unknown_column_names_the_known_ones():
    with pytest.raises(KeyError, match=r"'b'.*\['a'\]"):
        Table({"a": [1]}).column("b")


# Figure, Html, Text


def drawn() -> plt.Figure:
    figure, axes = plt.subplots()
    axes.plot([1, 3, 2])
    return figure


def test_matplotlib_is_drawn_at_once_from_figure_axes_or_pyplot():
    figure = drawn()
    expected = io.BytesIO()
    figure.savefig(expected, format="png")
    made = [Figure(figure), Figure(figure.axes[0]), Figure(plt)]
    figure.axes[0].clear()
    for each in made:
        back = again(each)
        assert np.array_equal(Image(back.png).array(), Image(expected.getvalue()).array())
        assert back.json is None
        assert back.html.startswith("<img")


def test_an_image_of_a_matplotlib_figure_is_its_picture():
    """wandb.Image takes figures, so scripts that came from W&B pass them."""
    figure = drawn()
    expected = io.BytesIO()
    figure.savefig(expected, format="png")
    for plot in (figure, figure.axes[0], plt):
        made = again(Image(plot, caption="c"))
        assert np.array_equal(made.array(), Image(expected.getvalue()).array())
        assert made.caption == "c"
    plt.close(figure)


def test_pyplot_without_a_figure_is_refused_and_opens_none():
    with pytest.raises(ValueError, match="Draw one first"):
        Figure(plt)
    assert plt.get_fignums() == []


def test_plotly_is_kept_as_json():
    figure = go.Figure(go.Scatter(x=np.arange(3), y=[1, 3, 2]), layout={"title": "</script>"})
    made = Figure(figure, caption="c")
    expected = figure.to_json()
    figure.data = []
    back = again(made)
    assert (back.json, back.png, back.caption) == (expected, None, "c")
    assert plotly.io.from_json(back.json).to_dict()["layout"] == json.loads(expected)["layout"]
    assert "Plotly.newPlot" in back.html


def test_text_and_html_come_back_whether_short_or_long(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("<p>ü", encoding="utf-8")
    for text in ("", "ü", "long ü" * 5000):
        assert again(Text(text)).text == text
        assert again(Html(text)).html == text
    assert Text("short").encode().data == b""
    assert len(Text("x" * 5000).encode().data) == 5000
    for page in (path, str(path)):
        assert again(Html(page)).html == "<p>ü"
    assert Html("<a href='x.html'>x.html").html == "<a href='x.html'>x.html"
    with pytest.raises(ValueError, match="Check the path"):
        Html(str(tmp_path / "missing.html"))
    for kind in (Text, Html, Figure):
        with pytest.raises(TypeError, match="Nothing is recorded"):
            kind(5)


# coerce


def test_known_objects_become_the_media_they_stand_for():
    pil = PIL.Image.fromarray(RGB)
    made = {
        Image: [pil],
        Figure: [drawn(), drawn().axes[0], plt, go.Figure()],
        Table: [pd.DataFrame(FRAME), pl.DataFrame({"a": [1]}), pa.table({"a": [1]}), pa.record_batch({"a": [1]})],
        Histogram: [
            np.arange(3),
            np.eye(2, dtype=bool),
            torch.arange(3),
            torch.ones(2).bfloat16(),
            jnp.arange(3),
            [1, 2.5],
            (True, 2),
            [np.float32(1)],
        ],
    }
    for kind, values in made.items():
        for value in values:
            assert type(coerce(value)) is kind
    image = Image(RGB)
    assert coerce(image) is image
    assert [type(each) for each in coerce([pil, image])] == [Image, Image]


NOT_MEDIA = [1, 2.5, "text", None, {}, [], (), ["a"], [1, "a"], [pd.NaT], object(), sys]
NOT_MEDIA += [np.float32(1), np.array(1), np.array([1]), np.array(["a", "b"]), np.zeros(2, complex)]
NOT_MEDIA += [torch.tensor(1.0), [torch.tensor(1.0)], jnp.array(1)]


@pytest.mark.parametrize("value", NOT_MEDIA, ids=lambda value: type(value).__name__)
def test_anything_else_is_not_media(value):
    assert coerce(value) is None


def test_no_heavy_library_is_imported_for_the_user():
    code = (
        "import sys\nfrom fanfold.media import coerce, Text, Histogram, Table\n"
        "for value in (1, 'a', [1, 2], ['a'], object(), Text('x'), {}): coerce(value)\n"
        "Histogram([1, 2]); Table(columns=['a'], data=[[1]]); Text('x').encode()\n"
        "heavy = {'numpy', 'torch', 'jax', 'PIL', 'pandas', 'polars', 'pyarrow', 'matplotlib', 'plotly'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


# Untrusted bytes


def look(media: Media) -> None:
    """Use every accessor, as a dashboard would."""
    for name in ("array", "frames", "pil", "to_arrow"):
        if hasattr(media, name):
            getattr(media, name)()
    for name in ("rows", "counts", "edges", "text", "json", "png"):
        getattr(media, name, None)


GOOD = [
    Image(RGB),
    Audio(np.arange(50, dtype=np.int16), sample_rate=8000),
    Video(RNG.integers(0, 256, (3, 6, 7, 3), dtype=np.uint8), fps=4),
    Table({"a": np.arange(5), "b": [1, "x", None, 2**70, moment(2020, 1, 1)], "c": [Image(RGB)] * 5, "d": [np.eye(2)] * 5}),
    Table(dataframe=pd.DataFrame(FRAME)),
    Figure(go.Figure(go.Scatter(y=[1, 2]))),
    Text("x" * 5000),
]
ENCODED = [(media.kind, media.encode()) for media in GOOD]


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.data_too_large])
@given(st.data())
@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_are_read_or_refused_and_nothing_else(data):
    kind, encoded = data.draw(st.sampled_from(ENCODED))
    raw = bytearray(encoded.data)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
    with contextlib.suppress(errors.JournalError, ValueError):
        look(decode(kind, encoded.meta, bytes(raw[:end])))


@settings(deadline=None, max_examples=200)
@given(
    kind=st.sampled_from(sorted(Media.kinds)),
    meta=st.dictionaries(
        st.sampled_from(["caption", "counts", "edges", "min", "nan", "sample_rate", "fps", "frames", "text", "boxes"]),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda x: st.lists(x, max_size=3), max_leaves=4
        ),
    ),
    data=st.binary(max_size=40) | st.sampled_from([bytes(encoded.data) for _, encoded in ENCODED]),
)
def test_facts_that_lie_are_read_or_refused_and_nothing_else(kind, meta, data):
    with contextlib.suppress(errors.JournalError, ValueError):
        look(decode(kind, meta, data))


def packed(rows: object = 1, version: object = 1, **column: object) -> bytes:
    return msgspec.msgpack.encode({"version": version, "rows": rows, "columns": [{"name": "a", **column}]})


def ext(code: int, body: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        packed(dtype="|O", data=b"12345678"),
        packed(dtype="<U0", data=b""),
        packed(dtype="<c16", data=bytes(16)),
        packed(dtype="<U1", data=bytes(4)),
        packed(dtype="f8,f8", data=bytes(16)),
        packed(dtype="<f8", data=b"1234"),
        packed(2, dtype="<f8", data=b"12345678"),
        packed(2**40, cells=[1]),
        packed(-1, cells=[]),
        packed(1),
        packed(1, dtype="<f8", data=b"12345678", valid=b""),
        packed(version=99, cells=[1]),
        packed(cells=[ext(99, 1)]),
        packed(cells=[ext(6, ["table", {}, packed(cells=[1])])]),
        packed(cells=[ext(6, ["image", {}, b"nothing"])]),
        packed(cells=[ext(6, ["nonsense", {}, b""])]),
        packed(cells=[ext(6, 5)]),
        packed(cells=[ext(7, ["<f8", [2**40, 0], b""])]),
        packed(cells=[ext(7, ["<f8", [2], b"12345678"])]),
        packed(cells=[ext(2, "not a date")]),
        packed(cells=[ext(1, "zz")]),
        msgspec.msgpack.encode({"version": 1, "rows": 2**40, "columns": []}),
        msgspec.msgpack.encode({"version": 1, "rows": 0, "columns": [{"name": "a", "cells": []}] * 2}),
        msgspec.msgpack.encode({"version": 1, "rows": 0, "columns": [{"name": str(i), "cells": []} for i in range(20_000)]}),
    ],
)
def test_a_hostile_table_is_refused_as_unreadable(blob):
    with pytest.raises(errors.JournalError, match="rest of the run"):
        decode("table", {}, blob)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 60_000])
def test_a_picture_that_unpacks_to_more_than_pillow_allows_is_refused(side):
    small = bytearray(pixels.write_png(np.zeros((1, 1, 1), np.uint8)))
    small[16:24] = side.to_bytes(4, "big") * 2
    small[29:33] = pixels.zlib.crc32(small[12:29]).to_bytes(4, "big")
    with pytest.raises(errors.JournalError, match="pixels"):
        decode("image", {}, bytes(small)).array()


def test_a_film_is_not_spread_to_a_size_it_only_claims():
    encoded = Video(np.zeros((2, 200, 200, 3), np.uint8), fps=4).encode()
    assert decode("video", {"fps": 4, "frames": 2**23}, encoded.data).frames().shape[0] <= 2


def test_unknown_kinds_and_other_formats_are_refused():
    with pytest.raises(errors.JournalError, match="known: audio, figure"):
        decode("hologram", {}, b"")
    for kind in ("image", "audio", "video"):
        with pytest.raises(errors.JournalError, match="none of"):
            decode(kind, {}, b"%!PS-Adobe-3.0 EPSF-3.0")
    for blob in (b"\x80\x04pickle", b"[1]", b"{" * 100_000):
        with pytest.raises(errors.JournalError, match="Figure could not be read back"):
            decode("figure", {}, blob)


def test_pickle_is_never_used():
    sources = Path(pixels.__file__).parent.glob("*.py")
    assert not [path.name for path in sources if "pickle" in path.read_text(encoding="utf-8")]
