"""CodeCarbon's reporting callback: the energy used by training, measured on each node by a separate process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ...errors import SettingError
from ...probes import energy
from ..events import TrainerCallback

STOP_SECONDS = 20.0


class CodeCarbonCallback(TrainerCallback):
    """Write `emissions.csv` to `output_dir`; `figures` holds the latest measurements. CodeCarbon reads its own settings."""

    def __init__(self) -> None:
        energy.check({})
        if _on_rocm():
            raise SettingError(
                "CodeCarbon cannot measure AMD GPUs (https://github.com/mlco2/codecarbon/pull/490), so nothing was started. "
                "Leave codecarbon out of report_to."
            )
        self.tracker: energy.EnergyProbe | None = None
        self.figures: dict[str, float] = {}

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.tracker is None and state.is_local_process_zero:
            self.tracker = self._make(Path(args.output_dir).absolute())

    def _make(self, folder: Path) -> energy.EnergyProbe:
        asked = {"online": True, "output_dir": str(folder), "output_methods": ["csv"]}  # online: it looks up its location
        return energy.EnergyProbe(self.figures.update, arguments=asked, log=folder / "codecarbon.log")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_init_end(args, state, control, **kwargs)
        if self.tracker is not None:
            self.tracker.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.tracker is not None:
            self.tracker.stop(STOP_SECONDS)


def _on_rocm() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.version.hip)
