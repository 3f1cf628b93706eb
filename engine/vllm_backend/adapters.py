"""Adapters as vLLM's LoRA: what names one in its engine."""

from __future__ import annotations

from pitstop.engine.errors import RemoteError, UnsupportedPolicy
from pitstop.engine.request import Adapter
from pitstop.engine.vllm_backend.incarnation import Incarnation
from pitstop.engine.vllm_backend.sampling import lora_request


async def load(life: Incarnation, adapter: Adapter) -> None:
    """Have an engine load an adapter.

    Raises:
        UnsupportedPolicy: the engine was started without LoRA.
        RemoteError: vLLM refuses it; says why.
    """
    if life.llm.vllm_config.lora_config is None:
        raise UnsupportedPolicy("this engine runs no adapters: launch it with engine_args={'enable_lora': True}")
    what = f"load adapter {adapter.name}"
    if not await life.call(what, life.llm.engine_core.add_lora_async(lora_request(adapter))):
        raise RemoteError(f"replica {life.replica} failed to {what}", replica=life.replica)


async def unload(life: Incarnation, adapter: Adapter) -> None:
    """Have an engine forget an adapter; that it has none of that number is as well."""
    await life.call(f"unload adapter {adapter.name}", life.llm.engine_core.remove_lora_async(adapter.number))


async def unload_all(life: Incarnation) -> None:
    """Have an engine forget every adapter, so that the next request that names one loads it again.

    The memory in which adapters run is neither a parameter nor a buffer: a sleep that discards weights discards it too,
    and vLLM would go on taking it for loaded.
    """
    if life.llm.vllm_config.lora_config is not None:
        for number in await life.call("list its adapters", life.llm.engine_core.list_loras_async()):
            await life.call("unload its adapters", life.llm.engine_core.remove_lora_async(number))
