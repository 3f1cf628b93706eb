"""vLLM as a generation backend. Importing it loads neither vLLM nor torch: whatever starts an engine does."""

from pitstop.engine.vllm_backend.arguments import EngineArgumentRejected
from pitstop.engine.vllm_backend.backend import VllmBackend
from pitstop.engine.vllm_backend.config import Seat
from pitstop.engine.vllm_backend.render import TokenizerRenderer

__all__ = ["EngineArgumentRejected", "Seat", "TokenizerRenderer", "VllmBackend"]
