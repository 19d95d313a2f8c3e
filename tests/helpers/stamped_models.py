"""Small models in every format that can hold a stamp, how each is saved, and what its own loader must still find."""

from __future__ import annotations

import contextlib
import os
import zipfile
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")  # must be set before keras is imported

import gguf
import keras
import numpy as np
import onnx
import skops.io
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file  # imported by name before any run: the hooks must still reach it
from sklearn.linear_model import LinearRegression
from torch import save as torch_save

import fanfold


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 4)


def same_weights(loaded: Any) -> bool:
    return all(torch.equal(value, model().state_dict()[name]) for name, value in loaded.items()) and len(loaded) == 2


def export() -> Any:
    return torch.export.export(model(), (torch.ones(2, 3),))


def onnx_model() -> onnx.ModelProto:
    tensor = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [tensor("x", 1, [2])], [tensor("y", 1, [2])])
    return onnx.helper.make_model(graph, producer_name="test")


def save_jit(path: Path) -> None:
    torch.jit.save(torch.jit.script(model()), str(path))


def check_jit(path: Path) -> None:
    assert torch.equal(torch.jit.load(str(path))(torch.ones(2, 3)), model()(torch.ones(2, 3)))


def check_pt(path: Path) -> None:
    assert same_weights(torch.load(path, weights_only=True))
    assert same_weights(torch.load(path, weights_only=True, mmap=True))
    assert zipfile.ZipFile(path).testzip() is None


def check_safetensors(path: Path) -> None:
    assert same_weights(load_file(path))
    with safe_open(path, "np") as file:
        assert np.array_equal(file.get_tensor("weight"), model().weight.detach().numpy())


def check_pt2(path: Path) -> None:
    assert torch.equal(torch.export.load(path).module()(torch.ones(2, 3)), model()(torch.ones(2, 3)))


def check_onnx(path: Path) -> None:
    onnx.checker.check_model(str(path), full_check=True)
    loaded = onnx.load(str(path))
    assert [node.op_type for node in loaded.graph.node] == ["Relu"]
    assert len(loaded.metadata_props) <= 1


def keras_model() -> keras.Model:
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    made.set_weights([model().weight.detach().numpy().T, model().bias.detach().numpy()])
    return made


def check_keras(path: Path) -> None:
    kernel, bias = keras.models.load_model(path).get_weights()
    assert np.array_equal(kernel.T, model().weight.detach().numpy())
    assert np.array_equal(bias, model().bias.detach().numpy())
    if path.suffix == ".keras":
        assert sorted(zipfile.ZipFile(path).namelist()) == ["config.json", "metadata.json", "model.weights.h5"]


def check_weights(path: Path) -> None:
    loaded = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    loaded.load_weights(path)
    assert np.array_equal(loaded.get_weights()[1], model().bias.detach().numpy())


def regression() -> LinearRegression:
    return LinearRegression().fit(np.eye(3), np.arange(3.0))


def check_skops(path: Path) -> None:
    assert np.array_equal(skops.io.load(path).coef_, regression().coef_)
    assert skops.io.loads(path.read_bytes()).intercept_ == regression().intercept_
    assert zipfile.ZipFile(path).testzip() is None


def save_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_array("tokenizer.ggml.tokens", [f"word {number}" for number in range(100)])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_custom_alignment(64)
    for name, value in model().state_dict().items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_gguf(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    assert same_weights({tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors})
    assert reader.data_offset % 64 == 0
    assert [reader.fields["tokenizer.ggml.tokens"].contents(index) for index in (0, 99)] == ["word 0", "word 99"]
    assert reader.fields["general.name"].contents() == "small"


def save_numpy(path: Path) -> None:
    np.savez(path, **{name: value.numpy() for name, value in model().state_dict().items()})


def check_numpy(path: Path) -> None:
    with np.load(path) as loaded:
        assert loaded.files == ["weight", "bias"]
        assert same_weights({name: torch.tensor(loaded[name]) for name in loaded.files})


FORMATS = {
    "torch.save": ("m.pt", lambda path: torch_save(model().state_dict(), path), check_pt),
    "TorchScript": ("m.ts", save_jit, check_jit),
    "torch.export": ("m.pt2", lambda path: torch.export.save(export(), path), check_pt2),
    "safetensors": ("m.safetensors", lambda path: save_file(model().state_dict(), path, {"note": "mine"}), check_safetensors),
    "ONNX": ("m.onnx", lambda path: onnx.save(onnx_model(), str(path)), check_onnx),
    "Keras": ("m.keras", lambda path: keras_model().save(path), check_keras),
    "HDF5": ("m.h5", lambda path: keras_model().save(path), check_keras),
    "HDF5, weights alone": ("m.weights.h5", lambda path: keras_model().save_weights(path), check_weights),
    "skops": ("m.skops", lambda path: skops.io.dump(regression(), path), check_skops),
    "GGUF": ("m.gguf", save_gguf, check_gguf),
}
BY_HAND = FORMATS | {"NumPy archive": ("m.npz", save_numpy, check_numpy)}  # not hooked, because numpy saves any kind of data


@contextlib.contextmanager
def training(tmp_path: Path) -> Any:
    """A run that has logged a step and has a secret."""
    with fanfold.init(
        "p", dir=tmp_path / "runs", quiet=True, system=False, config={"lr": 0.1, "api_key": "sk-very-secret"}
    ) as run:
        run.log({"loss": 1.0}, step=41)
        yield run
