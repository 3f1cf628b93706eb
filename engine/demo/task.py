"""What the model is asked and how its answer is judged: pure, the same problems for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol


@dataclass(frozen=True, slots=True)
class Problem:
    """What the model is told to be, a question, the words that the answer begins with, and what must follow them."""

    role: str
    question: str
    lead: str
    answer: str


class Task(Protocol):
    """Problems without end, and a verifiable reward from 0 to 1."""

    @property
    def title(self) -> str:
        """What is asked, in a few words."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of an answer."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer."""

    def problem(self, seed: int, number: int) -> Problem:
        """Return problem `number` of the sequence that `seed` names."""

    def score(self, problem: Problem, text: str, *, finished: bool) -> float:
        """Judge the text of an answer. `finished`: the model ended it by itself."""

    def examination(self) -> Sequence[Problem]:
        """Return the problems that a whole model is judged by, before and after."""


def _random(seed: int, number: int) -> random.Random:
    # A string: seeding with a tuple is refused, and sums of seed and number would collide.
    return random.Random(f"{seed}:{number}")


class Addition:
    """Add two digits, and say the sum and nothing else. A small model often adds well and then talks on."""

    title: Final = "one-digit addition: the sum and nothing else"
    # With it SmolLM2's prompts are 33 tokens: a whole cache block of 32, which a group's answers share, and one more.
    role: Final = "You are a pocket calculator."
    max_tokens: Final = 8
    stop: Final = ("\n",)

    def problem(self, seed: int, number: int) -> Problem:
        """Return a random sum."""
        digits = _random(seed, number)
        return self.sum(digits.randint(1, 9), digits.randint(1, 9))

    def score(self, problem: Problem, text: str, *, finished: bool) -> float:
        """Give 1 for exactly the right number, otherwise 0."""
        return float(finished and text.strip() == problem.answer)

    def examination(self) -> Sequence[Problem]:
        """Return all sums of two digits."""
        return [self.sum(left, right) for left in range(1, 10) for right in range(1, 10)]

    def sum(self, left: int, right: int) -> Problem:
        """Return one sum as a problem."""
        return Problem(self.role, f"What is {left} + {right}?", f"{left} + {right} =", str(left + right))


class Letters:
    """Write small letters. A random model does so by chance at first, and can learn it in a few steps."""

    title: Final = "write small letters and nothing else"
    role: Final = "You write letters."
    max_tokens: Final = 8
    stop: Final[tuple[str, ...]] = ()

    def problem(self, seed: int, number: int) -> Problem:
        """Return a prompt that varies."""
        return Problem(self.role, f"Write letters {_random(seed, number).randint(0, 99)}.", "", "")

    def score(self, problem: Problem, text: str, *, finished: bool) -> float:
        """Give the share of characters that are small ASCII letters."""
        return sum("a" <= character <= "z" for character in text) / len(text) if text else 0.0

    def examination(self) -> Sequence[Problem]:
        """Return a few of the prompts."""
        return [Problem(self.role, f"Write letters {number}.", "", "") for number in range(16)]


def prompt_ids(tokenizer: Any, problem: Problem) -> list[int]:
    """Render a problem for a Hugging Face tokenizer: the chat template, then the lead as the answer's beginning.

    Ids, not messages, because a template closes the assistant's turn after the lead.
    """
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "system", "content": problem.role}, {"role": "user", "content": problem.question}]
        asked: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    else:
        asked = f"{problem.role}\n{problem.question}\n"
    # The template has written what the model begins with; a tokenizer would add that a second time.
    ids: list[int] = tokenizer(asked + problem.lead, add_special_tokens=False).input_ids
    return ids
