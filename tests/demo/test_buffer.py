from __future__ import annotations

import random

import pytest

from pitstop.engine.demo.buffer import Rollout, RolloutBuffer
from pitstop.engine.demo.grpo import Group


def rollout(version: int) -> Rollout:
    return Rollout(Group([1], []), version)


def test_at_a_version_no_more_is_started_than_the_steps_within_reach_can_use() -> None:
    buffer = RolloutBuffer(4, 1, total=100)
    assert buffer.room(0) == 8
    for _ in range(8):
        buffer.started()
    assert buffer.room(0) == 0
    assert buffer.room(1) == 4


def test_without_staleness_one_batch_is_made_at_a_time() -> None:
    buffer = RolloutBuffer(4, 0, total=100)
    assert buffer.room(0) == 4
    for _ in range(4):
        buffer.started()
        buffer.finished(rollout(0))
    assert buffer.take(0) is not None
    assert buffer.room(0) == 0
    assert buffer.room(1) == 4


def test_nothing_is_started_that_no_step_will_use() -> None:
    buffer = RolloutBuffer(4, 5, total=8)
    assert buffer.room(0) == 8


def test_a_failed_group_leaves_room_for_another() -> None:
    buffer = RolloutBuffer(1, 0, total=1)
    buffer.started()
    assert buffer.room(0) == 0
    buffer.failed()
    assert buffer.room(0) == 1


def test_what_is_too_old_is_thrown_away_and_replaced() -> None:
    buffer = RolloutBuffer(2, 1, total=100)
    for version in (0, 0, 1, 2):
        buffer.started()
        buffer.finished(rollout(version))
    assert [each.weight_version for each in buffer.take(2) or ()] == [1, 2]
    assert (buffer.stale, len(buffer)) == (2, 0)


def test_a_batch_waits_until_it_is_whole() -> None:
    buffer = RolloutBuffer(2, 1, total=100)
    buffer.started()
    buffer.finished(rollout(0))
    assert buffer.take(0) is None
    assert len(buffer) == 1


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_no_rollout_is_trained_on_beyond_its_age_and_every_step_gets_its_batch(seed: int, lag: int) -> None:
    """Groups finish in any order and refits come late: the steps must all happen, within the bound."""
    chance, steps, batch = random.Random(seed), 20, 3
    buffer = RolloutBuffer(batch, lag, total=steps * batch)
    serving = trained = 0
    flying: list[int] = []
    for _ in range(10_000):
        if trained == steps:
            break
        match chance.randrange(4):
            case 0 if buffer.room(serving):
                buffer.started()
                flying.append(serving)
            case 1 if flying:
                version = flying.pop(chance.randrange(len(flying)))
                if chance.random() < 0.1:
                    buffer.failed()
                else:
                    buffer.finished(rollout(version))
            case 2:
                taken = buffer.take(trained)
                if taken is not None:
                    assert len(taken) == batch
                    assert all(0 <= trained - each.weight_version <= lag for each in taken)
                    trained += 1
            case 3 if serving < trained:
                serving += 1
    assert trained == steps
