"""Faults of GPUs become alerts. No GPU can be broken here: NVML's answers are a recorded sequence, in the form an H200 gives them."""

from types import SimpleNamespace

import fanfold
from fanfold.callbacks.throughput import peak_of
from fanfold.probes import gpus
from fanfold.probes.gpu_health import REPEAT_SECONDS, FaultFinder
from fanfold.recording.probes import gpu_alert
from fanfold.store import open_run


class Refused(Exception):
    """NVML's error."""


class RecordedNvml:
    """NVML with one GPU per row, each a list of samples: counters, clock reasons and Xids at that sample."""

    NVMLError = Refused
    NVML_ERROR_NOT_SUPPORTED, NVML_SUCCESS, NVML_VOLATILE_ECC = 3, 0, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY, NVML_NVLINK_ERROR_DL_CRC_FLIT = 0, 1, 2
    NVML_NVLINK_MAX_LINKS = 2
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *samples):
        self.samples, self.at, self.pending = samples, -1, []

    def next(self):
        self.at += 1
        now = self.samples[min(self.at, len(self.samples) - 1)]
        self.pending += [
            SimpleNamespace(device=gpu, eventData=xid) for gpu, facts in enumerate(now) for xid in facts.get("xids", ())
        ]

    def _of(self, gpu, name):
        facts = self.samples[min(max(self.at, 0), len(self.samples) - 1)][gpu]
        if facts.get("lost"):
            raise Refused("GPU is lost")
        return facts.get(name, 0)

    def nvmlDeviceGetCount(self):
        return len(self.samples[0])

    def nvmlDeviceGetHandleByIndex(self, gpu):
        return gpu

    def nvmlDeviceGetUUID(self, gpu):
        return f"GPU-{gpu}"

    def nvmlDeviceGetPciInfo(self, gpu):
        self._of(gpu, "")
        return SimpleNamespace(busId=f"0000:0{gpu}:00.0")

    def nvmlEventSetCreate(self):
        return "set"

    def nvmlDeviceRegisterEvents(self, gpu, kinds, events):
        assert (kinds, events) == (8, "set")

    def nvmlEventSetWait_v2(self, events, timeout):
        if not self.pending:
            raise Refused("timeout")
        return self.pending.pop(0)

    def nvmlDeviceGetUtilizationRates(self, gpu):
        self._of(gpu, "")
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetMemoryInfo(self, gpu):
        self._of(gpu, "")
        return SimpleNamespace(used=1, total=2)

    def nvmlDeviceGetPowerUsage(self, gpu):
        self._of(gpu, "")
        return 700_000

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu):
        self._of(gpu, "")
        return 700_000

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        self._of(gpu, "")
        return 60

    def nvmlDeviceGetClockInfo(self, gpu, clock):
        self._of(gpu, "")
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu):
        return self._of(gpu, "reasons")

    def nvmlDeviceGetTotalEccErrors(self, gpu, kind, which):
        return self._of(gpu, ("corrected", "uncorrected")[kind])

    def nvmlDeviceGetRemappedRows(self, gpu):
        return 0, self._of(gpu, "remapped"), 0, self._of(gpu, "failed")

    def nvmlDeviceGetPcieReplayCounter(self, gpu):
        return self._of(gpu, "replays")

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        self._of(gpu, "")
        if link:
            raise Refused("not supported")
        return 1

    def nvmlDeviceGetNvLinkErrorCounter(self, gpu, link, kind):
        return self._of(gpu, "nvlink") if kind == 2 else 0

    def nvmlGpmQueryDeviceSupport(self, gpu):
        raise Refused("not supported")


def faults_of(*samples):
    """Sample recorded GPUs; return the faults of each sample."""
    nvml = RecordedNvml(*samples)
    found = []
    reader = gpus.Gpus(report=lambda fault, count: found[-1].append((fault.gpu, fault.kind, fault.level, count)))
    reader._gpus, reader._xids = gpus.nvidia_gpus(nvml, None)
    for _ in samples:
        nvml.next()
        found.append([])
        values = reader()
    return found, values


def test_each_fault_is_reported_when_it_appears_and_for_the_right_gpu():
    healthy = {"corrected": 2, "replays": 5}
    samples = [
        [healthy, healthy],
        [healthy, {**healthy, "uncorrected": 1}],
        [{**healthy, "xids": (79,)}, {**healthy, "uncorrected": 1, "remapped": 1}],
        [{**healthy, "nvlink": 3, "xids": (31,)}, {**healthy, "uncorrected": 1, "remapped": 1, "failed": 1, "replays": 100}],
    ]
    found, values = faults_of(*samples)
    assert found[0] == []
    assert found[1] == [(1, "ecc_uncorrected", "error", 2)]
    assert found[2] == [(0, "xid 79", "error", 2), (1, "remapped_rows", "warning", 2)]
    assert found[3] == [
        (0, "xid 31", "warning", 2),  # mostly the program's fault
        (0, "nvlink_errors", "warning", 2),
        (1, "remap_failed", "error", 2),
        (1, "pcie_replays", "warning", 2),
    ]
    assert values["system/gpu/1/ecc_uncorrected"] == 1.0
    assert values["system/gpu/0/power_limit_w"] == 700.0


def test_errors_from_before_the_run_and_a_power_cap_are_no_faults():
    found, values = faults_of(*[[{"uncorrected": 7, "nvlink": 9, "reasons": 0x04}]] * 5)
    assert found == [[]] * 5
    assert values["system/gpu/0/throttle"] == 4.0


def test_a_gpu_that_stays_too_hot_is_reported_once():
    found, _ = faults_of(*[[{"reasons": 0x40}]] * 6)
    assert [len(one) for one in found] == [0, 0, 1, 0, 0, 0]


def test_a_gpu_that_falls_off_the_bus_is_reported_though_it_cannot_say_which_it_is():
    """NVML answers every question about such a GPU with an error, also the one about the place of its Xid event."""
    found, values = faults_of([{}, {}], [{}, {}], [{}, {"lost": True, "xids": (79,)}])
    assert found == [[], [], [(-1, "xid 79", "error", 2), (1, "lost", "error", 2)]]
    assert "system/gpu/0/power_w" in values
    assert "system/gpu/1/power_w" not in values
    (fault,) = FaultFinder(-1)({}, (79,))
    assert gpu_alert(fault, "n7", None)[1] == "A GPU on n7: Xid 79: the GPU has fallen off the bus."


def test_the_same_fault_is_reported_again_after_a_while():
    now = [0.0]
    finder = FaultFinder(0, clock=lambda: now[0])
    assert [len(finder({}, (48,))), len(finder({}, (48,)))] == [1, 0]
    now[0] = REPEAT_SECONDS
    assert len(finder({}, (48,))) == 1


def test_an_alert_names_node_gpu_and_rank(tmp_path):
    found, _ = faults_of([{}, {}], [{}, {"xids": (94,)}])
    assert found[1] == [(1, "xid 94", "error", 2)]
    run = fanfold.init("p", id="r", dir=tmp_path, quiet=True, system=False)
    (fault,) = FaultFinder(1)({}, (94,))
    node = run._member.me.node
    run.alert(*gpu_alert(fault, node, rank=9)[:2], level=gpu_alert(fault, node, rank=9)[2])
    run.finish()
    (alert,) = open_run(tmp_path / "p" / "r").alerts
    assert alert["title"] == f"GPU 1 on {node}, rank 9: xid 94"
    assert (alert["text"], alert["level"]) == (f"GPU 1 on {node}, rank 9: Xid 94: contained memory error.", "error")


def test_peaks_are_those_of_the_device_named():
    assert peak_of("NVIDIA H200") == 989e12
    assert peak_of("NVIDIA GB200") == 2500e12
    assert peak_of("NVIDIA H100 80GB HBM3", "fp8") == 2 * 989e12
    assert peak_of("AMD Instinct MI355X") == 2517e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert peak_of("NVIDIA RTX A1000 Laptop GPU") is None
    assert peak_of("NVIDIA L4") == 121e12
