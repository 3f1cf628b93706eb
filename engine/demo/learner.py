"""The policy under training: a Hugging Face model with fp32 weights, bf16 arithmetic, AdamW."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pitstop.engine.demo.grpo import Group, answer_logprobs, informative, pack, policy_loss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """What is learned with. `low` and `high` bound the importance ratio from 1 (the upper one wider, as in DAPO)."""

    learning_rate: float = 1.5e-5
    low: float = 0.2
    high: float = 0.28
    max_norm: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Learned:
    """What one step came to. `drift`: mean distance of log-probabilities between this policy and the rollouts'."""

    loss: float
    clipped: float
    drift: float
    norm: float
    groups: int
    tokens: int
    seconds: float


class Learner:
    """Loads a checkpoint and improves it."""

    def __init__(self, checkpoint: Path, hyper: Hyper, *, seed: int = 0, threads: int | None = None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if threads:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._hyper = hyper
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._model.train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=hyper.learning_rate, betas=hyper.betas, weight_decay=0.0, fused=True
        )

    @property
    def parameters(self) -> int:
        """How many numbers are learned."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return what a refit sends: fp32, so that it asks for `cast="inventory"`."""
        return iter(self._model.named_parameters())

    def step(self, groups: Sequence[Group], free: Callable[[], None] = lambda: None) -> Learned:
        """Improve the policy by one batch. `free` returns when the weights may change: the last version was sent."""
        import torch

        begun = time.perf_counter()
        useful = informative(groups)
        if not useful:
            free()
            return Learned(0.0, 0.0, 0.0, 0.0, 0, 0, time.perf_counter() - begun)
        packed = pack(useful)
        with torch.autocast("cpu", torch.bfloat16):
            logprobs = answer_logprobs(self._model, packed)
        loss = policy_loss(logprobs, packed.behaviour, packed.advantages, low=self._hyper.low, high=self._hyper.high)
        loss.value.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._hyper.max_norm)
        free()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Learned(
            loss.value.item(),
            loss.clipped,
            loss.drift,
            float(norm),
            len(useful),
            packed.tokens.numel(),
            time.perf_counter() - begun,
        )
