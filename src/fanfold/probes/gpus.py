"""GPU metrics for the system probe: NVIDIA through NVML, AMD through amdsmi, each used only if its driver is present."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fanfold import errors

from .gpu_health import UNKNOWN, Fault, FaultFinder, NvidiaHealth, amd_health, answering

Reader = Callable[[], dict[str, float]]
Xids = Callable[[], dict[int, tuple[int, ...]]]
Gpu = dict[str, Reader]
GB, MIB = 1e9, 2**20


def percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


class Gpus:
    """Reader of the GPUs this process sees, or of all of the node; `report` is called with each new fault of one of them.

    The vendor's library is opened at the first sample, in the probe's thread.
    """

    def __init__(
        self,
        wanted: Sequence[int] | None = None,
        *,
        whole_node: bool = False,
        report: Callable[[Fault, int], object] | None = None,
    ) -> None:
        self._wanted, self._whole_node, self._report = wanted, whole_node, report
        self._gpus: dict[int, Gpu] | None = None
        self._xids: Xids = dict
        self._finders: dict[int, FaultFinder] = {}

    def __call__(self) -> dict[str, float]:
        if self._gpus is None:
            self._gpus = {}  # if opening fails, it is not tried again at each sample
            gpus, self._xids = open_nvidia(whole_node=self._whole_node)
            self._gpus = gpus or open_amd(whole_node=self._whole_node)
        values: dict[str, float] = {}
        xids = self._xids()
        self._look_for_faults(UNKNOWN, {}, xids.get(UNKNOWN, ()))
        for index, gpu in self._gpus.items():
            if self._wanted is None or index in self._wanted:
                found = read_gpu(gpu)
                values.update({f"system/gpu/{index}/{name}": value for name, value in found.items()})
                self._look_for_faults(index, found, xids.get(index, ()))
        return values

    def _look_for_faults(self, index: int, values: Mapping[str, float], xids: tuple[int, ...]) -> None:
        finder = self._finders.setdefault(index, FaultFinder(index))
        for fault in finder(values, xids):
            if self._report is not None:
                self._report(fault, len(self._gpus or ()))


def read_gpu(gpu: Gpu) -> dict[str, float]:
    """Return the metrics of one GPU; a query that fails drops only its own metric."""
    values: dict[str, float] = {}
    for name, query in gpu.items():
        with errors.guard(f"read a GPU's {name}"):
            values.update(query())
    return values


def gpu_memory(used: float, total: float) -> dict[str, float]:
    """Return a GPU's memory use under its keys."""
    return {"memory": percent(used, total), "memory_gb": used / GB}


def visible(setting: str | None, ids: Sequence[str]) -> list[int | str]:
    """Resolve CUDA_VISIBLE_DEVICES to positions in `ids`, and MIG ids unchanged, in the process's own order."""
    if setting is None:
        return list(range(len(ids)))
    chosen: list[int | str] = []
    for word in setting.split(","):
        device = find_device(word.strip(), ids)
        if device is None:  # CUDA ignores everything from the first entry it does not know
            break
        chosen.append(device)
    return chosen if len(set(chosen)) == len(chosen) else []  # CUDA shows no device at all for a repeated one


def find_device(word: str, ids: Sequence[str]) -> int | str | None:
    """Resolve one entry of CUDA_VISIBLE_DEVICES: an index, an id or its unique prefix, or a MIG id."""
    if word.isdigit():
        return int(word) if int(word) < len(ids) else None
    if word.startswith("MIG-"):
        return word
    matches = [place for place, id in enumerate(ids) if word and id.lower().startswith(word.lower())]
    return matches[0] if len(matches) == 1 else None


def open_nvidia(*, whole_node: bool = False) -> tuple[dict[int, Gpu], Xids]:
    """Open NVML and the GPUs this process sees; return none without a driver, which is normal. Also return a reader of Xids."""
    setting = None if whole_node else os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting == "" or not nvidia_driver():
        return {}, dict
    try:
        import pynvml
    except ImportError:
        return {}, dict
    try:
        # Never closed: NVML is reference-counted, and closing may block on the driver while the run wants to end.
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return {}, dict
    return nvidia_gpus(pynvml, setting)


def nvidia_gpus(nvml: Any, setting: str | None) -> tuple[dict[int, Gpu], Xids]:
    """Open the GPUs that a setting of CUDA_VISIBLE_DEVICES shows."""
    ids = [nvidia_id(nvml, place) for place in range(nvml.nvmlDeviceGetCount())]
    handles: dict[int, Any] = {}
    for index, device in enumerate(visible(setting, ids)):
        with errors.guard("open a GPU"):
            handles[index] = nvidia_handle(nvml, device)
    health = NvidiaHealth(nvml, handles)
    return {index: {**nvidia_queries(nvml, gpu), **health.queries[index]} for index, gpu in handles.items()}, health.xids


def nvidia_driver() -> bool:
    """Return whether NVML can be loaded, to avoid importing pynvml on a node without a GPU."""
    if not sys.platform.startswith("linux"):
        return True
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def nvidia_id(nvml: Any, place: int) -> str:
    """Return a GPU's id; empty for one that has fallen off the bus, which keeps its index."""
    try:
        return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(place)))
    except nvml.NVMLError:
        return ""


def nvidia_handle(nvml: Any, device: int | str) -> Any:
    """Open a GPU by its index, or a MIG slice by its id."""
    if isinstance(device, int):
        return nvml.nvmlDeviceGetHandleByIndex(device)
    return nvml.nvmlDeviceGetHandleByUUID(device)


def nvidia_queries(nvml: Any, gpu: Any) -> Gpu:
    """Return the NVML queries for one GPU."""

    def memory() -> dict[str, float]:
        info = nvml.nvmlDeviceGetMemoryInfo(gpu)
        return gpu_memory(info.used, info.total)

    return {
        "util": lambda: {"util": float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)},
        "memory": memory,
        "power_w": lambda: {"power_w": nvml.nvmlDeviceGetPowerUsage(gpu) / 1000.0},
        "temp_c": lambda: {"temp_c": float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))},
        "sm_mhz": lambda: {"sm_mhz": float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))},
    }


def open_amd(*, whole_node: bool = False) -> dict[int, Gpu]:
    """Open AMD SMI and the GPUs this process sees; return an empty dict without the library or the driver."""
    try:
        import amdsmi
    except (ImportError, OSError, KeyError):  # the package is installed, but ROCm's library is not
        return {}
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException:
        return {}
    handles = amdsmi.amdsmi_get_processor_handles()
    # ROCr hides devices first; HIP's indices then refer to the remaining ones.
    hip = os.environ.get("HIP_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    for setting in () if whole_node else (os.environ.get("ROCR_VISIBLE_DEVICES"), hip):
        ids = [amd_id(amdsmi, gpu) for gpu in handles]
        handles = [handles[place] for place in visible(setting, ids) if isinstance(place, int)]
    wrong = (amdsmi.AmdSmiException, KeyError, TypeError, ValueError)  # "N/A" is no number
    return {index: {**amd_queries(amdsmi, gpu), **answering(wrong, amd_health(amdsmi, gpu))} for index, gpu in enumerate(handles)}


def amd_id(smi: Any, gpu: Any) -> str:
    """Return a GPU's id in the form ROCm's variables use."""
    return "GPU-" + str(smi.amdsmi_get_gpu_asic_info(gpu)["asic_serial"]).removeprefix("0x")


def amd_queries(smi: Any, gpu: Any) -> Gpu:
    """Return the AMD SMI queries for one GPU."""

    def memory() -> dict[str, float]:
        info = smi.amdsmi_get_gpu_vram_usage(gpu)
        return gpu_memory(info["vram_used"] * MIB, info["vram_total"] * MIB)

    def power() -> dict[str, float]:
        info = smi.amdsmi_get_power_info(gpu)
        average = info["average_socket_power"]
        return {"power_w": float(info["current_socket_power"] if average == "N/A" else average)}

    def temperature() -> dict[str, float]:
        kind, metric = smi.AmdSmiTemperatureType.JUNCTION, smi.AmdSmiTemperatureMetric.CURRENT
        return {"temp_c": float(smi.amdsmi_get_temp_metric(gpu, kind, metric))}

    def clock() -> dict[str, float]:
        info = smi.amdsmi_get_clock_info(gpu, smi.AmdSmiClkType.GFX)
        return {"sm_mhz": float(info["clk"] if "clk" in info else info["cur_clk"])}

    return {
        "util": lambda: {"util": float(smi.amdsmi_get_gpu_activity(gpu)["gfx_activity"])},
        "memory": memory,
        "power_w": power,
        "temp_c": temperature,
        "sm_mhz": clock,
    }
