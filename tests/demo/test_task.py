from __future__ import annotations

from pathlib import Path

import pytest

from pitstop.engine.demo.task import Addition, Letters, Problem, Task, prompt_ids


@pytest.mark.parametrize("task", [Addition(), Letters()])
def test_problems_depend_on_seed_and_number_alone(task: Task) -> None:
    first = [task.problem(3, number) for number in range(50)]
    assert first == [task.problem(3, number) for number in range(50)]
    assert first != [task.problem(4, number) for number in range(50)]
    assert len(set(first)) > 20


@pytest.mark.parametrize(
    ("text", "finished", "score"),
    [
        (" 7", True, 1.0),
        ("7", True, 1.0),
        (" 7", False, 0.0),
        (" 7.", True, 0.0),
        (" 17", True, 0.0),
        (" 7 and so on", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_only_the_right_number_alone_earns_the_reward(text: str, finished: bool, score: float) -> None:
    task = Addition()
    assert task.score(task.sum(3, 4), text, finished=finished) == score


def test_the_examination_asks_every_sum_once() -> None:
    problems = Addition().examination()
    assert len({problem.question for problem in problems}) == len(problems) == 81
    assert {problem.answer for problem in problems} == {str(n) for n in range(2, 19)}


def test_letters_are_judged_character_by_character() -> None:
    task = Letters()
    problem = task.problem(0, 0)
    assert task.score(problem, "ab1 ", finished=False) == 0.5
    assert task.score(problem, "", finished=True) == 0.0
    assert task.score(problem, "äB", finished=True) == 0.0


@pytest.mark.filterwarnings("default")
def test_a_prompt_ends_with_the_words_that_the_answer_begins_with(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    problem = Problem("You add.", "What is 1 + 2?", "1 + 2 =", "3")
    asked = (
        "<|im_start|>system\nYou add.<|im_end|>\n<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n1 + 2 ="
    )
    assert tokenizer.decode(prompt_ids(tokenizer, problem)) == asked
    tokenizer.chat_template = None
    assert tokenizer.decode(prompt_ids(tokenizer, problem)) == "You add.\nWhat is 1 + 2?\n1 + 2 ="
