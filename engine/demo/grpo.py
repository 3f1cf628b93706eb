"""GRPO in plain torch: advantages, packing, loss.

A group's answers share one row behind one copy of their prompt: the mask lets each answer see the prompt and itself
only, so the numbers are those of separate rows at a fraction of the tokens. On two cores that is the training time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer, with the rollout engine's own log-probability of every token."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    reward: float


@dataclass(frozen=True, slots=True)
class Group:
    """The answers to one prompt, which are judged against each other."""

    prompt: Sequence[int]
    answers: Sequence[Answer]


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of `prompt answer answer ...`, and for every answer token where it is predicted (`row`, `column`)."""

    tokens: Tensor
    positions: Tensor
    visible: Tensor
    row: Tensor
    column: Tensor
    targets: Tensor
    behaviour: Tensor
    advantages: Tensor


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss; the share of tokens whose gain was clipped; the mean distance of log-probabilities."""

    value: Tensor
    clipped: float
    drift: float


def advantages(rewards: Sequence[float]) -> list[float]:
    """How much better each answer is than its group, in standard deviations; all zero where they agree."""
    spread = statistics.pstdev(rewards)
    if spread < 1e-6:
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [(reward - mean) / spread for reward in rewards]


def informative(groups: Sequence[Group]) -> list[Group]:
    """Groups whose answers differ in reward; the others have no gradient and are not worth a forward pass."""
    return [group for group in groups if any(advantages([answer.reward for answer in group.answers]))]


def pack(groups: Sequence[Group]) -> Packed:
    """Lay groups out, one row each."""
    import torch

    lengths = [len(group.prompt) + sum(len(answer.token_ids) for answer in group.answers) for group in groups]
    shape = (len(groups), max(lengths))
    tokens = torch.zeros(shape, dtype=torch.long)
    positions = torch.zeros(shape, dtype=torch.long)
    # Which answer a token belongs to: 0 for the prompt, -1 for padding.
    owner = torch.full(shape, -1, dtype=torch.long)
    row: list[int] = []
    column: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    weights: list[float] = []
    for index, group in enumerate(groups):
        start = len(group.prompt)
        tokens[index, :start] = torch.tensor(group.prompt)
        positions[index, :start] = torch.arange(start)
        owner[index, :start] = 0
        scores = advantages([answer.reward for answer in group.answers])
        at = start
        for number, (answer, score) in enumerate(zip(group.answers, scores, strict=True), 1):
            count = len(answer.token_ids)
            if not count:
                continue
            tokens[index, at : at + count] = torch.tensor(answer.token_ids)
            positions[index, at : at + count] = torch.arange(start, start + count)
            owner[index, at : at + count] = number
            row += [index] * count
            column += [start - 1, *range(at, at + count - 1)]
            targets += answer.token_ids
            behaviour += answer.logprobs
            weights += [score] * count
            at += count
    return Packed(
        tokens,
        positions,
        _visible(owner),
        torch.tensor(row),
        torch.tensor(column),
        torch.tensor(targets),
        torch.tensor(behaviour),
        torch.tensor(weights),
    )


def _visible(owner: Tensor) -> Tensor:
    import torch

    query, key = owner[:, :, None], owner[:, None, :]
    causal = torch.ones(owner.shape[1], owner.shape[1], dtype=torch.bool).tril()
    # Padding sees itself (key == query), since a softmax over nothing is NaN.
    return (((key == query) | (key == 0)) & causal)[:, None]


def answer_logprobs(model: Any, packed: Packed) -> Tensor:
    """Log-probability of every answer token. The head runs only where an answer token is predicted."""
    hidden = model.model(
        input_ids=packed.tokens, attention_mask=packed.visible, position_ids=packed.positions, use_cache=False
    ).last_hidden_state
    logits = model.lm_head(hidden[packed.row, packed.column]).float()
    chosen: Tensor = logits.log_softmax(-1).gather(-1, packed.targets[:, None]).squeeze(-1)
    return chosen


def policy_loss(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, low: float, high: float) -> Loss:
    """Clipped surrogate, a mean over tokens; `behaviour` are the rollout engine's own logprobs, of its own version."""
    import torch

    log_ratio = logprobs - behaviour
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - low, 1 + high)
    gain = torch.minimum(ratio * advantages, bounded * advantages)
    clipped = (bounded * advantages < ratio * advantages).float().mean().item()
    return Loss(-gain.mean(), clipped, log_ratio.detach().abs().mean().item())
