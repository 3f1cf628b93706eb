"""A worker whose linear layers keep their weights as vLLM has them on a GPU: nothing is packed away."""

from __future__ import annotations

from typing import Any

import vllm.v1.worker.cpu_worker
from vllm import _custom_ops


class PlainCPUWorker(vllm.v1.worker.cpu_worker.CPUWorker):
    """Named by `worker_cls`. Dense models only."""

    def load_model(self, **options: Any) -> None:
        _custom_ops._supports_onednn = False
        super().load_model(**options)
