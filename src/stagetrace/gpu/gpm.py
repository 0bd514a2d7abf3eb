"""Performance counters that newer cards (Hopper on) keep: two looks at them give what happened in between."""

from __future__ import annotations

from typing import Any

#: Ours → the library's number for it. All are percentages.
METRICS = {"sm_active": 2, "sm_occupancy": 3, "tensor_active": 5, "dram_active": 10}


class Counters:
    """Those of one card, or of a slice of one (then ``parent`` is the card)."""

    def __init__(self, nvml: Any, handle: Any, parent: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._parent = parent
        self._looks: list[Any] = []
        self._request: Any = None
        self._absent = False

    def read(self) -> dict[str, float]:
        """Shares, 0 to 1, since the last call; nothing at the first, nor where there are none."""
        nvml = self._nvml
        if self._absent:
            return {}
        if self._request is None:
            self._absent = not self._prepare()
            return {}
        self._looks.reverse()
        self._look(self._looks[1])
        self._request.sample1, self._request.sample2 = self._looks
        nvml.nvmlGpmMetricsGet(self._request)
        answers = zip(METRICS, self._request.metrics, strict=False)
        return {name: metric.value / 100 for name, metric in answers if not metric.nvmlReturn}

    def _prepare(self) -> bool:
        """Whether there are any: then a first look has been taken."""
        nvml = self._nvml
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(self._parent or self._handle).isSupportedDevice:
                return False
            self._looks = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
            self._look(self._looks[1])
        except (nvml.NVMLError, AttributeError):  # an older driver, or older bindings
            return False
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(METRICS)
        for index, number in enumerate(METRICS.values()):
            request.metrics[index].metricId = number
        self._request = request
        return True

    def _look(self, into: Any) -> None:
        if self._parent is None:
            self._nvml.nvmlGpmSampleGet(self._handle, into)
        else:
            instance = self._nvml.nvmlDeviceGetGpuInstanceId(self._handle)
            self._nvml.nvmlGpmMigSampleGet(self._parent, instance, into)
