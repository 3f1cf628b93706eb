"""A stream that is open while a refit happens: what its reader sees of it.

The rollouts of so small a task are often all done before their trainer is, and would not be there to be held.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

from pitstop.engine import Chunk, RolloutEngine, SamplingParams
from pitstop.engine.demo.task import Problem, prompt_ids

STORY: Final = Problem("You tell stories.", "Tell me a story about a racing team.", "Once upon a time", "")
TOKENS: Final = 40


@dataclass(slots=True)
class Witness:
    """What one stream was: its pieces of text by weight version, its tokens, its longest pause in seconds."""

    pieces: list[tuple[int, str]] = field(default_factory=list)
    tokens: int = 0
    pause: float = 0.0

    @property
    def crossed(self) -> bool:
        """Whether weights changed under it."""
        return len(self.pieces) > 1


async def follow(chunks: AsyncIterator[Chunk]) -> Witness:
    """Read a stream to its end."""
    witness = Witness()
    last: float | None = None
    async for chunk in chunks:
        now = time.monotonic()
        if last is not None:
            witness.pause = max(witness.pause, now - last)
        last = now
        witness.tokens += len(chunk.token_ids)
        if witness.pieces and witness.pieces[-1][0] == chunk.weight_version:
            witness.pieces[-1] = (chunk.weight_version, witness.pieces[-1][1] + chunk.text)
        elif chunk.token_ids:
            witness.pieces.append((chunk.weight_version, chunk.text))
    return witness


async def witness(engine: RolloutEngine, tokenizer: Any) -> Witness:
    """Open a stream and read it to its end.

    Raises:
        PitstopError: the replica that it ran on is gone.
    """
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, logprobs=False)
    async with contextlib.aclosing(engine.stream(prompt_ids(tokenizer, STORY), params)) as stream:
        return await follow(stream)
