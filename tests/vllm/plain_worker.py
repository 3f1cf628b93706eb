"""A CPU worker whose linear layers compute from their parameters as they are, as they do on a GPU."""

from __future__ import annotations

from typing import Any

import vllm.v1.worker.cpu_worker
from vllm import _custom_ops


class PlainWorker(vllm.v1.worker.cpu_worker.CPUWorker):
    """vLLM packs weights for the CPU where it may."""

    def load_model(self, **options: Any) -> Any:
        """Load without packing."""
        _custom_ops._supports_onednn = False
        return super().load_model(**options)
