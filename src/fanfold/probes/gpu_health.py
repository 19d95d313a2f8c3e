"""The health of GPUs: Xid events, ECC errors, remapped rows, throttling, NVLink and PCIe errors. Each new fault is an alert.

Values that a GPU cannot answer are left out without a warning: most GPUs lack some of them. The vendor's library is passed in,
so that a recorded sequence of its answers can take its place: hardware cannot be broken for a test.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import outcome

Query = Callable[[], dict[str, float]]
REPEAT_SECONDS = 600.0  # before the same kind of fault of the same GPU is reported again
MANY_REPLAYS = 10.0  # PCIe packets sent again between two samples
SLOW_SAMPLES = 3  # in a row
MAX_EVENTS = 64  # at one sample
UNKNOWN = -1  # the GPU of an event that cannot be told


class Fault(NamedTuple):
    """Something wrong with a GPU, to be reported."""

    gpu: int
    kind: str
    text: str
    level: str = "error"


# What NVIDIA's driver documentation calls these codes; the others are reported by number.
XIDS = {
    13: "graphics engine exception, mostly a bug in a kernel",
    31: "memory page fault, mostly a bug in a kernel",
    43: "the GPU stopped processing",
    45: "work was removed after an error, or because the process was killed",
    48: "uncorrectable memory error",
    61: "internal microcontroller breakpoint",
    62: "internal microcontroller halt",
    63: "a faulty memory row was remapped",
    64: "a faulty memory row could not be remapped",
    68: "video processor exception",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's system processor timed out",
    120: "error of the GPU's system processor",
    121: "C2C link error",
    140: "unrecovered memory error",
}
BY_PROGRAMS = frozenset({13, 31, 43, 45, 68, 69})  # mostly the fault of the program, not of the hardware

# Reasons for which the driver lowers the clocks. A power cap and idle time are normal; these are not.
SLOWDOWNS = {0x08: "hardware slowdown", 0x20: "too hot (driver)", 0x40: "too hot (hardware)", 0x80: "power brake"}

# Counters that only grow: how a rise is reported, above what rise, and how bad it is.
COUNTERS = {
    "ecc_uncorrected": ("uncorrectable memory errors (ECC)", 0.0, "error"),
    "remapped_rows": ("memory rows were replaced because they are faulty", 0.0, "warning"),
    "remap_failed": ("a faulty memory row could not be replaced", 0.0, "error"),
    "nvlink_errors": ("NVLink errors", 0.0, "warning"),
    "pcie_replays": ("PCIe packets had to be sent again", MANY_REPLAYS, "warning"),
}


class FaultFinder:
    """Compares the samples of one GPU, and finds what got worse since the one before."""

    def __init__(self, gpu: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._gpu, self._clock = gpu, clock
        self._before: dict[str, float] = {}
        self._answered = False
        self._slow = 0
        self._reported: dict[str, float] = {}

    def __call__(self, values: Mapping[str, float], xids: tuple[int, ...] = ()) -> list[Fault]:
        found = [self._xid(number) for number in xids]
        if self._answered and not values:
            found.append(Fault(self._gpu, "lost", "it no longer answers; it may have fallen off the bus"))
        for name, (text, most, level) in COUNTERS.items():
            rise = values.get(name, 0.0) - self._before.get(name, values.get(name, 0.0))
            if rise > most:
                found.append(Fault(self._gpu, name, f"{text}: {rise:.0f} more, {values[name]:.0f} in all", level))
        self._answered = self._answered or bool(values)
        self._before = {name: value for name, value in values.items() if name in COUNTERS}
        reasons = [word for bit, word in SLOWDOWNS.items() if int(values.get("throttle", 0.0)) & bit]
        self._slow = self._slow + 1 if reasons else 0
        if self._slow >= SLOW_SAMPLES:
            found.append(Fault(self._gpu, "throttle", f"its clocks are lowered: {', '.join(reasons)}", "warning"))
        return [fault for fault in found if self._is_new(fault)]

    def _xid(self, number: int) -> Fault:
        level = "warning" if number in BY_PROGRAMS else "error"
        return Fault(
            self._gpu, f"xid {number}", f"Xid {number}: {XIDS.get(number, 'see the list of Xid errors of NVIDIA')}", level
        )

    def _is_new(self, fault: Fault) -> bool:
        now = self._clock()
        if now - self._reported.get(fault.kind, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return False
        self._reported[fault.kind] = now
        return True


class NvidiaHealth:
    """Health of NVIDIA GPUs through NVML: further metrics of each, and the Xid events of all."""

    def __init__(self, nvml: Any, handles: Mapping[int, Any]) -> None:
        self._nvml = nvml
        self.queries = {gpu: answering(nvml.NVMLError, nvidia_health(nvml, handle)) for gpu, handle in handles.items()}
        self._places = {self._bus(handle): gpu for gpu, handle in handles.items()}
        self._events: Any = None
        with contextlib.suppress(nvml.NVMLError):
            self._events = nvml.nvmlEventSetCreate()
            for handle in handles.values():
                with contextlib.suppress(nvml.NVMLError):  # MIG slices and virtual GPUs have no events
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    def _bus(self, handle: Any) -> str:
        return str(outcome(lambda: self._nvml.nvmlDeviceGetPciInfo(handle).busId)[0])

    def xids(self) -> dict[int, tuple[int, ...]]:
        """Return the Xid events since the last call, by GPU."""
        found: dict[int, tuple[int, ...]] = {}
        if self._events is None:
            return found
        for _ in range(MAX_EVENTS):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:  # none is waiting
                break
            gpu = self._places.get(self._bus(event.device), UNKNOWN)  # a GPU that fell off the bus may not say which it is
            found[gpu] = (*found.get(gpu, ()), int(event.eventData))
        return found


def answering(error: type[Exception] | tuple[type[Exception], ...], queries: Mapping[str, Query]) -> dict[str, Query]:
    """Return the queries that a GPU answers."""
    kept = {}
    for name, query in queries.items():
        with contextlib.suppress(*(error if isinstance(error, tuple) else (error,)), AttributeError):
            query()
            kept[name] = query
    return kept


def nvidia_health(nvml: Any, gpu: Any) -> dict[str, Query]:
    """Return the NVML queries about the health of one GPU."""

    def errors(kind: int) -> float:
        return float(nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, nvml.NVML_VOLATILE_ECC))

    def remapped() -> dict[str, float]:
        corrected, uncorrected, _, failed = nvml.nvmlDeviceGetRemappedRows(gpu)
        return {"remapped_rows": float(corrected + uncorrected), "remap_failed": float(failed)}

    def throttle() -> dict[str, float]:
        ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        return {"throttle": float(ask(gpu))}

    return {
        "mem_mhz": lambda: {"mem_mhz": float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM))},
        "power_limit_w": lambda: {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000.0},
        "throttle": throttle,
        "ecc_corrected": lambda: {"ecc_corrected": errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)},
        "ecc_uncorrected": lambda: {"ecc_uncorrected": errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)},
        "remapped_rows": remapped,
        "pcie_replays": lambda: {"pcie_replays": float(nvml.nvmlDeviceGetPcieReplayCounter(gpu))},
        "nvlink_errors": lambda: {"nvlink_errors": nvlink_errors(nvml, gpu)},
        "activity": Activity(nvml, gpu),
    }


def nvlink_errors(nvml: Any, gpu: Any) -> float:
    """Return the NVLink errors of all links that are up."""
    kinds = (nvml.NVML_NVLINK_ERROR_DL_REPLAY, nvml.NVML_NVLINK_ERROR_DL_RECOVERY, nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT)
    total, asked = 0, 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        with contextlib.suppress(nvml.NVMLError):
            if nvml.nvmlDeviceGetNvLinkState(gpu, link):
                total += sum(int(nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, kind)) for kind in kinds)
                asked += 1
    if not asked:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return float(total)


class Activity:
    """What a Hopper or newer GPU did since the last sample: shares of time its parts were active (NVML's GPM counters)."""

    NAMES = (
        ("sm_active", "NVML_GPM_METRIC_SM_UTIL"),
        ("sm_occupancy", "NVML_GPM_METRIC_SM_OCCUPANCY"),
        ("tensor_active", "NVML_GPM_METRIC_ANY_TENSOR_UTIL"),
        ("dram_active", "NVML_GPM_METRIC_DRAM_BW_UTIL"),
    )

    def __init__(self, nvml: Any, gpu: Any) -> None:
        self._nvml, self._gpu = nvml, gpu
        self._samples: list[Any] = []

    def __call__(self) -> dict[str, float]:
        nvml = self._nvml
        if not self._samples:
            if not nvml.nvmlGpmQueryDeviceSupport(self._gpu).isSupportedDevice:
                raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
            self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
            nvml.nvmlGpmSampleGet(self._gpu, self._samples[0])
            return {}
        before, after = self._samples
        nvml.nvmlGpmSampleGet(self._gpu, after)
        wanted = nvml.c_nvmlGpmMetricsGet_t()
        wanted.version, wanted.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(self.NAMES)
        wanted.sample1, wanted.sample2 = before, after
        for place, (_, metric) in enumerate(self.NAMES):
            wanted.metrics[place].metricId = getattr(nvml, metric)
        nvml.nvmlGpmMetricsGet(wanted)
        self._samples = [after, before]
        metrics = ((name, wanted.metrics[place]) for place, (name, _) in enumerate(self.NAMES))
        found = {name: float(metric.value) for name, metric in metrics if metric.nvmlReturn == nvml.NVML_SUCCESS}
        return {name: value for name, value in found.items() if math.isfinite(value)}


def amd_health(smi: Any, gpu: Any) -> dict[str, Query]:
    """Return the AMD SMI queries about the health of one GPU."""

    def ecc() -> dict[str, float]:
        counts = smi.amdsmi_get_gpu_total_ecc_count(gpu)
        return {"ecc_corrected": float(counts["correctable_count"]), "ecc_uncorrected": float(counts["uncorrectable_count"])}

    def replays() -> dict[str, float]:
        return {"pcie_replays": float(smi.amdsmi_get_pcie_info(gpu)["pcie_metric"]["pcie_replay_count"])}

    def limit() -> dict[str, float]:
        return {"power_limit_w": float(smi.amdsmi_get_power_info(gpu)["power_limit"])}

    def clock() -> dict[str, float]:
        info = smi.amdsmi_get_clock_info(gpu, smi.AmdSmiClkType.MEM)
        return {"mem_mhz": float(info["clk"] if "clk" in info else info["cur_clk"])}

    return {"mem_mhz": clock, "power_limit_w": limit, "ecc": ecc, "pcie_replays": replays}
