from __future__ import annotations

from pathlib import Path

import pytest

from pitstop.engine.demo.grpo import Answer, Group, answer_logprobs, pack
from pitstop.engine.demo.learner import Hyper, Learner

pytestmark = pytest.mark.filterwarnings("default")


def group(learner: Learner, *rewards: float) -> Group:
    """Different answers to one prompt, with the learner's own log-probabilities."""
    import torch

    plain = Group([5, 6, 7], [Answer([40 + n, 50 + n], [0.0, 0.0], reward) for n, reward in enumerate(rewards)])
    with torch.no_grad():
        logprobs = answer_logprobs(learner._model, pack([plain])).tolist()
    answers = [
        Answer(answer.token_ids, logprobs[2 * n : 2 * n + 2], answer.reward) for n, answer in enumerate(plain.answers)
    ]
    return Group(plain.prompt, answers)


def test_rewarded_answers_become_likelier_and_the_others_less(tiny: Path) -> None:
    learner = Learner(tiny, Hyper(learning_rate=1e-3), threads=1)
    before = group(learner, 1.0, 0.0, 0.0)
    learned = learner.step([before])
    after = group(learner, 1.0, 0.0, 0.0)
    change = [sum(new.logprobs) - sum(old.logprobs) for new, old in zip(after.answers, before.answers, strict=True)]
    assert change[0] > 0
    assert max(change[1:]) < change[0]
    assert (learned.groups, learned.tokens) == (1, 9)
    # bf16 arithmetic now against fp32 above.
    assert learned.drift < 0.1
    assert learned.norm > 0


@pytest.mark.parametrize("rewards", [(1.0, 0.0), (1.0, 1.0)])
def test_weights_change_only_after_they_are_said_to_be_free(rewards: tuple[float, float], tiny: Path) -> None:
    import torch

    learner = Learner(tiny, Hyper(), threads=1)
    before = {name: tensor.detach().clone() for name, tensor in learner.named_parameters()}

    def equal() -> bool:
        return all(torch.equal(tensor, before[name]) for name, tensor in learner.named_parameters())

    asked: list[bool] = []
    learner.step([group(learner, *rewards)], free=lambda: asked.append(equal()))
    assert asked == [True]
    assert equal() is (rewards == (1.0, 1.0))


def test_a_refit_is_offered_the_fp32_weights(tiny: Path) -> None:
    learner = Learner(tiny, Hyper(), threads=1)
    named = dict(learner.named_parameters())
    assert {str(tensor.dtype) for tensor in named.values()} == {"torch.float32"}
    assert "lm_head.weight" not in named
    assert learner.parameters == sum(tensor.numel() for tensor in named.values())
