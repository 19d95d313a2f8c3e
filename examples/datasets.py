"""A Dataset and an IterableDataset of one's own: what the workers do and how long training waits, with no code for it."""

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import fanfold


class Waves(Dataset):
    """Items by index: the loader deals them out to its workers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(0, index, 256).sin()


class Stream(IterableDataset):
    """Items in a row: each worker takes its share, or all would deliver the same."""

    def __iter__(self):
        worker = get_worker_info()
        first, apart = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, 64, apart):
            yield torch.linspace(0, index, 256).cos()


if __name__ == "__main__":
    model = torch.nn.Linear(256, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with fanfold.init(project="datasets", ops={"every": 1}, system=False) as run:
        for data in (Waves(), Stream()):
            for batch in DataLoader(data, batch_size=8, num_workers=2):
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                run.log({"loss": loss})

    rows = fanfold.open(run.path).ops()
    in_workers = {row["op"]: row["count"] for row in rows if row["role"] == "worker"}
    sin, cos = in_workers["aten::sin"], in_workers["aten::cos"]
    waited = sum(row["total_ns"] for row in rows if row["kind"] == "data") / 1e6
    print(f"in the workers: {sin} x sin, {cos} x cos; training waited {waited:.0f} ms for data")
