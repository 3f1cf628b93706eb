"""vLLM as a generation backend. Importing this loads neither vLLM nor torch: they are imported where an engine starts."""

from pitstop.engine.vllm_backend.arguments import EngineArgumentRejected
from pitstop.engine.vllm_backend.backend import VllmBackend
from pitstop.engine.vllm_backend.render import TokenizerRenderer

__all__ = ["EngineArgumentRejected", "TokenizerRenderer", "VllmBackend"]
