"""A request inside one vLLM engine: the engine's own collector, read without a task or a queue in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from pitstop.engine.request import Piece, Request
from pitstop.engine.vllm_backend.sampling import FINISH_REASONS, kept, sampled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pitstop.engine.errors import PitstopError


class Owner(Protocol):
    """What a leg needs of its engine."""

    trims_stops: bool

    def holds(self, engine_id: str) -> bool:
        """Say whether the engine may still make tokens for a request."""

    def drop(self, engine_id: str) -> None:
        """Take a request out of the engine."""

    def left(self, leg: VllmLeg) -> None:
        """A leg has its last piece."""

    def lost(self) -> PitstopError:
        """Say why the engine is gone."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids."""


class VllmLeg:
    """One accepted request.

    `state` is vLLM's record of the request. It is kept here because vLLM forgets it when the request ends, and puts
    the engine's death in the place of unread output: what was made can then be read from nowhere else.
    """

    __slots__ = ("_aborted", "_chars", "_collector", "_owner", "_state", "_taken", "request")

    def __init__(self, owner: Owner, request: Request, collector: Any, state: Any) -> None:
        self.request = request
        self._owner, self._collector, self._state = owner, collector, state
        self._taken = self._chars = 0
        self._aborted = False

    @property
    def held(self) -> bool:
        """Whether the engine may still make tokens for it."""
        return self._owner.holds(self._collector.request_id)

    @property
    def made(self) -> int:
        """How many tokens the engine has made, read or not."""
        return int(self._state.detokenizer.num_output_tokens())

    async def next(self) -> Piece:
        """Wait for the next piece; the last one has a `finish_reason`."""
        try:
            output = self._collector.get_nowait() or await self._collector.get()
        except Exception as error:
            raise self._owner.lost() from error
        return self._piece(output)

    def partial(self) -> Piece:
        """Return what was made and not yet yielded, without waiting."""
        ids = self._state.detokenizer.output_token_ids[self._taken :]
        positions = self._state.logprobs_processor.logprobs
        logprobs = sampled(ids, positions[self._taken : self._taken + len(ids)]) if positions is not None else ()
        text = self._state.detokenizer.output_text[self._chars :] if self.request.text else ""
        self._taken += len(ids)
        self._chars += len(text)
        return Piece(ids, logprobs, text)

    def abort(self) -> None:
        """Take the request out of the engine; `next` then yields an "abort" piece."""
        if not self._aborted:
            self._aborted = True
            self._owner.drop(self._collector.request_id)
            # Its last piece is there already: nobody has to read it.
            self._owner.left(self)

    def fail(self, error: Exception) -> None:
        """Wake `next` with the engine's end, unless the last output is already there."""
        unread = self._collector.output
        if not getattr(unread, "finished", False):
            self._collector.put(error)

    def _piece(self, output: Any) -> Piece:
        made = output.outputs[0]
        ids, positions = list(made.token_ids), made.logprobs
        if made.finish_reason is not None and isinstance(made.stop_reason, str) and not self._owner.trims_stops:
            every = self._state.detokenizer.output_token_ids
            keep = kept(every, len(every) - len(ids), made.stop_reason, self._owner.decode)
            del ids[keep - self._taken :]
            positions = None if positions is None else positions[: keep - self._taken]
        self._taken += len(ids)
        self._chars += len(made.text)
        if output.finished:
            self._owner.left(self)
        return Piece(
            ids,
            sampled(ids, positions) if positions is not None else (),
            made.text if self.request.text else "",
            None if made.finish_reason is None else FINISH_REASONS.get(made.finish_reason, "error"),
            made.stop_reason,
            output.num_cached_tokens,
        )
