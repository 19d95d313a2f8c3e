"""The training script of `fanfold demo`, run by torchrun: a small character-level transformer on made-up sentences."""

from __future__ import annotations

import math
import os
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fanfold

SUBJECTS = "the cat,a small dog,the old fox,my sister,the captain,a quiet owl,the moon,every child".split(",")
VERBS = "sees,finds,follows,paints,remembers,carries,counts,hears".split(",")
OBJECTS = "the sea,a red boat,seven stars,the long road,an empty house,the first snow,a paper kite,her name".split(",")
ENDS = "at night,in spring,without a word,once more,by the river,and smiles".split(",")
ALPHABET = "abcdefghijklmnopqrstuvwxyz .\n"
CONTEXT, BATCH, WIDTH, HEADS, LAYERS, PEAK_LR = 48, 16, 48, 4, 2, 4e-3


def corpus(seed: int, count: int = 400) -> list[int]:
    """Return random sentences, as numbers."""
    dice = random.Random(seed)
    sentences = (" ".join(map(dice.choice, (SUBJECTS, VERBS, OBJECTS, ENDS))) + ".\n" for _ in range(count))
    return [ALPHABET.index(char) for char in "".join(sentences)]


class Model(nn.Module):  # type: ignore[misc]
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH * 4, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.odds = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, text: Any) -> Any:
        length = text.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        return self.odds(self.layers(self.characters(text) + self.places(torch.arange(length)), mask=mask))


def losses(model: Any, text: Any, count: int = BATCH) -> tuple[Any, Any]:
    """Return loss and accuracy on a random batch of a text."""
    starts = torch.randint(len(text) - CONTEXT - 1, (count,)).tolist()
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    odds, wanted = model(rows[:, :-1]), rows[:, 1:]
    return nn.functional.cross_entropy(odds.flatten(0, 1), wanted.flatten()), (odds.argmax(-1) == wanted).float().mean()


def write(model: Any, text: str, length: int = 48) -> str:
    """Let the model continue a text."""
    while len(text) < length:
        tail = torch.tensor([[ALPHABET.index(char) for char in text[-CONTEXT:]]])
        text += ALPHABET[int(model(tail)[0, -1].argmax())]
    return text.partition("\n")[0]


@torch.no_grad()  # type: ignore[untyped-decorator]
def validate(run: Any, model: Any, unseen: Any, step: int) -> None:
    """Log what one rank is enough for: losses on unseen text, the weights, a sample."""
    loss, accuracy = losses(model, unseen, 64)
    weights = model.odds.weight.detach()
    grey = (weights - weights.min()) / (weights.max() - weights.min()).clamp(min=1e-9)
    picture = grey.repeat_interleave(4, 0).repeat_interleave(4, 1).numpy()
    run.log({"val/loss": loss, "val/accuracy": accuracy, "weights/output": fanfold.Histogram(weights),
             "pictures/output": fanfold.Image(picture, caption=f"output weights at step {step}"),
             "sample": write(model, "the ")}, step=step)  # fmt: skip


def train(steps: int) -> None:
    """Train one rank."""
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR)
    torch.manual_seed(100 + rank)  # each rank draws its own batches
    text, unseen = torch.tensor(corpus(rank)), torch.tensor(corpus(99, 60))
    size = sum(parameter.numel() for parameter in model.parameters())
    run = fanfold.init(
        tags=["demo"],
        notes="a character-level transformer on made-up sentences",
        config={"model": {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "parameters": size},
                "batch": BATCH, "context": CONTEXT, "lr": PEAK_LR, "steps": steps},
    )  # fmt: skip
    run.define_metric("val/*", summary="min")
    for step in range(steps):
        began = time.perf_counter()
        lr = PEAK_LR * min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = lr
        loss, accuracy = losses(model, text)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        took = time.perf_counter() - began
        run.log({"loss": loss, "accuracy": accuracy, "lr": lr, "grad_norm": norm, "step_seconds": took,
                 "throughput": BATCH * CONTEXT / took}, step=step)  # fmt: skip
        if rank == 0 and (step % max(1, steps // 12) == 0 or step == steps - 1):
            validate(run, model.module, unseen, step)
    if rank == 0:
        rows = [[begin, write(model.module, begin)] for begin in ("the ", "a small ", "my ", "every ")]
        run.log({"samples": fanfold.Table(["begin", "written"], rows)}, step=steps - 1)
    run.finish()


if __name__ == "__main__":
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this node, so its name need not resolve
    dist.init_process_group("gloo")
    try:
        train(int(sys.argv[1]))
    finally:
        dist.destroy_process_group()
