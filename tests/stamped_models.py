"""Small models in every format that holds a stamp, how each is saved, and what its own loader must still find."""

from __future__ import annotations

import contextlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file  # by name, before any run: the hooks must reach it all the same
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


FORMATS = {
    "torch.save": ("m.pt", lambda path: torch_save(model().state_dict(), path), check_pt),
    "TorchScript": ("m.ts", save_jit, check_jit),
    "torch.export": ("m.pt2", lambda path: torch.export.save(export(), path), check_pt2),
    "safetensors": ("m.safetensors", lambda path: save_file(model().state_dict(), path, {"note": "mine"}), check_safetensors),
    "ONNX": ("m.onnx", lambda path: onnx.save(onnx_model(), str(path)), check_onnx),
}


@contextlib.contextmanager
def training(tmp_path: Path) -> Any:
    """A run that has logged a step and knows a secret."""
    with fanfold.init(
        "p", dir=tmp_path / "runs", quiet=True, system=False, config={"lr": 0.1, "api_key": "sk-very-secret"}
    ) as run:
        run.log({"loss": 1.0}, step=41)
        yield run
