from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pitstop.engine.demo.grpo import Answer, Group, advantages, answer_logprobs, informative, pack, policy_loss

if TYPE_CHECKING:
    from torch import Tensor


def answer(*token_ids: int, reward: float = 0.0, logprob: float = -1.0) -> Answer:
    return Answer(token_ids, [logprob] * len(token_ids), reward)


def tensor(*values: float) -> Tensor:
    import torch

    return torch.tensor(values)


def test_advantages_are_distances_from_the_mean_in_standard_deviations() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])
    assert advantages([2.0, 4.0]) == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0, 0.0], [0.3]])
def test_a_group_that_agrees_teaches_nothing(rewards: list[float]) -> None:
    assert advantages(rewards) == [0.0] * len(rewards)
    assert informative([Group([1], [answer(2, reward=reward) for reward in rewards])]) == []


def test_a_row_holds_the_prompt_once_and_says_where_each_answer_token_is_predicted() -> None:
    long = Group([7, 8, 9], [answer(1, 2, reward=1.0, logprob=-0.5), answer(3, reward=0.0, logprob=-0.25)])
    short = Group([6], [answer(4, reward=0.0), answer(5, reward=1.0)])
    packed = pack([long, short])
    assert packed.tokens.tolist() == [[7, 8, 9, 1, 2, 3], [6, 4, 5, 0, 0, 0]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 3], [0, 1, 1, 0, 0, 0]]
    assert packed.targets.tolist() == [1, 2, 3, 4, 5]
    assert packed.row.tolist() == [0, 0, 0, 1, 1]
    # The first token of every answer is predicted by the prompt's last one.
    assert packed.column.tolist() == [2, 3, 2, 0, 0]
    assert packed.behaviour.tolist() == [-0.5, -0.5, -0.25, -1.0, -1.0]
    assert packed.advantages.tolist() == [1.0, 1.0, -1.0, -1.0, 1.0]


def test_an_answer_sees_the_prompt_and_itself_only() -> None:
    packed = pack([Group([7, 8], [answer(1, 2, reward=1.0), answer(3, 4)]), Group([6], [answer(5), answer(5)])])
    assert packed.visible[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]
    # No row may be empty, or attention there is NaN and poisons every gradient.
    assert packed.visible.any(-1).all()


def test_an_answer_without_tokens_takes_no_room() -> None:
    packed = pack([Group([7], [answer(reward=1.0), answer(1)])])
    assert packed.tokens.tolist() == [[7, 1]]
    assert packed.targets.tolist() == [1]


def test_the_loss_on_policy_is_the_negative_mean_advantage() -> None:
    logprobs = tensor(-1.0, -2.0)
    loss = policy_loss(logprobs, logprobs, tensor(1.0, -3.0), low=0.2, high=0.28)
    assert loss.value.item() == pytest.approx(1.0)
    assert (loss.clipped, loss.drift) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "clipped"),
    [
        (1.1, 1.0, 1.1, 0.0),
        (2.0, 1.0, 1.28, 1.0),
        (0.5, 1.0, 0.5, 0.0),
        (0.5, -1.0, -0.8, 1.0),
        (2.0, -1.0, -2.0, 0.0),
    ],
)
def test_the_ratio_is_clipped_only_where_that_makes_the_gain_smaller(
    ratio: float, advantage: float, gain: float, clipped: float
) -> None:
    loss = policy_loss(tensor(math.log(ratio)), tensor(0.0), tensor(advantage), low=0.2, high=0.28)
    assert loss.value.item() == pytest.approx(-gain)
    assert loss.clipped == clipped
    assert loss.drift == pytest.approx(abs(math.log(ratio)))


def test_a_clipped_token_has_no_gradient() -> None:
    logprobs = tensor(math.log(2.0), math.log(1.1)).requires_grad_()
    policy_loss(logprobs, tensor(0.0, 0.0), tensor(1.0, 1.0), low=0.2, high=0.28).value.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.1 / 2])


@pytest.mark.filterwarnings("default")
def test_packed_rows_give_the_logprobs_of_separate_rows(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    groups = [
        Group([5, 6, 7, 8], [answer(10, 11, 12, reward=1.0), answer(13), answer(14, 15)]),
        Group([9, 4], [answer(20, reward=1.0), answer(21, 22)]),
    ]
    with torch.no_grad():
        packed = answer_logprobs(model, pack(groups))
        separate = []
        for group in groups:
            for each in group.answers:
                ids = torch.tensor([[*group.prompt, *each.token_ids]])
                rows = model(ids).logits[0].log_softmax(-1)
                start = len(group.prompt)
                separate += [rows[start - 1 + n, token].item() for n, token in enumerate(each.token_ids)]
    assert packed.tolist() == pytest.approx(separate, abs=1e-4)
