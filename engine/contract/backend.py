"""What a backend keeps to: requests, suspends, swaps of weights, its end and its next life."""

from __future__ import annotations

import asyncio
import itertools
import unittest
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from pitstop.engine.contract.checks import Contract, Ends, holds, raised, soon
from pitstop.engine.errors import ReplicaDied
from pitstop.engine.ports import Backend, Booted, Leg, Sending, Transport
from pitstop.engine.refit import Policy, route
from pitstop.engine.request import Piece, Request, SamplingParams
from pitstop.engine.worker_ports import WorkerOp, WorkerReply, WorkerVerb

_NAME = "contract"
_FEW, _MANY = 12, 200
_QUIET = 0.3
"""Seconds in which a suspended engine is watched for a token."""


@dataclass(kw_only=True)
class BackendBench:
    """A backend that was not started, and what its checks need.

    Attributes:
        transport: brings versions to its workers.
        sending: makes the far end of an offer of a version; each call a new one, with a refit id of its own. The
            greedy tokens after `prompt` differ between versions 1 and 2.
        kill: ends the engine as a SIGKILL does.
        tear: makes the next `apply` fail when it has begun to change the model.
        limits: `receive` and `silence`, in seconds.
    """

    backend: Backend
    transport: Transport
    sending: Callable[[int], Sending]
    prompt: tuple[int, ...] = (1, 2, 3)
    kill: Callable[[], Awaitable[None]] | None = None
    tear: Callable[[], Awaitable[None]] | None = None
    limits: tuple[float, float] = (20.0, 5.0)
    numbers: itertools.count[int] = field(default_factory=itertools.count, repr=False)


class BackendContract(Contract[BackendBench]):
    """See `pitstop.engine.contract`."""

    async def a_start_says_what_there_is(self) -> None:
        """Inventory, bounds, and one layout a rank, of this replica and incarnation."""
        async with self.make() as bench:
            booted = await _started(bench)
            ranks = [place.rank for place in booted.layout]
            holds(ranks and ranks == list(range(booted.layout[0].world_size)), f"the ranks are {ranks}")
            holds({(place.replica, place.incarnation) for place in booted.layout} == {(_NAME, 1)}, "another's layout")
            holds(booted.inventory.tensors, "the inventory is empty")
            holds(booted.max_model_len > 0 < booted.vocab_size, "a request could not be bounded")
            await _closed(bench)

    async def a_request_ends_once_with_what_it_was_asked_for(self) -> None:
        """As many tokens as asked for, in pieces, the last of which says why it ended."""
        async with self.make() as bench:
            await _started(bench)
            leg = await _submit(bench, _FEW)
            pieces = await _drained(leg)
            holds(_count(pieces) == _FEW, f"{_count(pieces)} tokens, not {_FEW}")
            holds([p.finish_reason for p in pieces if p.finish_reason] == ["length"], "it did not end once")
            holds(bench.backend.output_at() > 0, "output_at does not know of it")
            await soon(bench.backend.drained(), "an engine without requests is not drained")
            await _closed(bench)

    async def a_suspend_counts_exactly_and_no_token_comes_after_it(self) -> None:
        """The count of every live request is the number of tokens that can be read of it, and stays so."""
        async with self.make() as bench:
            await _started(bench)
            legs = {f"count-{n}": await _submit(bench, _MANY, f"count-{n}") for n in range(3)}
            read = {name: await _some(leg, 2) for name, leg in legs.items()}
            counts = await soon(bench.backend.suspend("keep"), "a suspend did not return", 30)
            holds(set(counts) == set(legs), f"counted {sorted(counts)}, not {sorted(legs)}")
            quiet = bench.backend.output_at()
            for name, leg in legs.items():
                while _count(read[name]) < counts[name]:
                    read[name].append(await soon(leg.next(), f"{name} lacks tokens that were counted"))
                holds(
                    _count(read[name]) == counts[name], f"{_count(read[name])} tokens where {counts[name]} were counted"
                )
            waiting = [asyncio.ensure_future(leg.next()) for leg in legs.values()]
            done, _ = await asyncio.wait(waiting, timeout=_QUIET)
            holds(not done, "a token came from a suspended engine")
            holds(bench.backend.output_at() <= quiet, "output_at grew while the engine was suspended")
            await bench.backend.resume()
            for task in waiting:
                await soon(task, "a request did not go on after the resume")
            for leg in legs.values():
                leg.abort()
            await _closed(bench)

    async def a_resume_lets_the_same_requests_go_on(self) -> None:
        """Under `keep` and `recompute`: to their whole length, with the tokens of an undisturbed run."""
        async with self.make() as bench:
            await _started(bench)
            wanted = _tokens(await _drained(await _submit(bench, _MANY)))
            policies: tuple[Policy, ...] = ("keep", "recompute")
            for policy in policies:
                leg = await _submit(bench, _MANY)
                pieces = await _some(leg, 3)
                await soon(bench.backend.suspend(policy), "a suspend did not return", 30)
                await soon(bench.backend.resume(), "a resume did not return")
                pieces += await _drained(leg)
                holds(_tokens(pieces) == wanted, f"{policy}: not the tokens of an undisturbed run")
            await _closed(bench)

    async def an_abort_ends_a_request_once_and_may_come_twice(self) -> None:
        """Also after the end, when it changes nothing."""
        async with self.make() as bench:
            await _started(bench)
            leg = await _submit(bench, _MANY)
            await _some(leg, 2)
            leg.abort()
            leg.abort()
            pieces = await _drained(leg)
            holds([p.finish_reason for p in pieces if p.finish_reason] == ["abort"], "it did not end once, as aborted")
            await soon(bench.backend.drained(), "an aborted request stays in the engine")
            done = await _submit(bench, _FEW)
            await _drained(done)
            done.abort()
            await _drained(await _submit(bench, _FEW))
            await _closed(bench)

    async def a_submit_that_is_cancelled_leaves_nothing(self) -> None:
        """Whenever that is."""
        async with self.make() as bench:
            await _started(bench)
            for yields in (0, 1, 2, 4):
                task = asyncio.ensure_future(_submit(bench, _MANY))
                for _ in range(yields):
                    await asyncio.sleep(0)
                task.cancel()
                (result,) = await asyncio.gather(task, return_exceptions=True)
                if not isinstance(result, BaseException):
                    result.abort()
            left = await soon(bench.backend.suspend("keep"), "a suspend did not return", 30)
            holds(not left, f"requests whose submit was cancelled stay in the engine: {sorted(left)}")
            await _closed(bench)

    async def drained_waits_for_the_last_request(self) -> None:
        """And not longer."""
        async with self.make() as bench:
            await _started(bench)
            legs = [await _submit(bench, _MANY) for _ in range(2)]
            waiting = asyncio.ensure_future(bench.backend.drained())
            legs[0].abort()
            await asyncio.sleep(0)
            holds(not waiting.done(), "drained, with a request in the engine")
            await _drained(legs[1])
            await soon(waiting, "not drained after the last request")
            await _closed(bench)

    async def a_cache_reset_without_requests_is_done_and_says_so(self) -> None:
        """With requests the answer may be no; what is answered is a bool."""
        async with self.make() as bench:
            await _started(bench)
            await _drained(await _submit(bench, _FEW))
            holds(
                await soon(bench.backend.reset_cache(), "no answer") is True, "an idle engine refused to drop its cache"
            )
            leg = await _submit(bench, _MANY)
            await _some(leg, 1)
            await bench.backend.suspend("keep")
            holds(isinstance(await soon(bench.backend.reset_cache(), "no answer"), bool), "an answer that is no bool")
            await bench.backend.resume()
            leg.abort()
            await _closed(bench)

    async def a_version_goes_in_and_another_and_the_first_again(self) -> None:
        """Every rank answers; the tokens are each version's own."""
        async with self.make() as bench:
            booted = await _started(bench)
            made = []
            for version in (1, 2, 1):
                await _swapped(bench, booted, version)
                made.append(_tokens(await _drained(await _submit(bench, _FEW))))
            holds(made[0] == made[2], "the same weights make other tokens the second time")
            holds(made[0] != made[1], "other weights make the same tokens: was the version applied?")
            await _closed(bench)

    async def requests_in_flight_take_the_new_version(self) -> None:
        """A request goes on from its own tokens, and its tokens before the swap are what they were."""
        async with self.make() as bench:
            booted = await _started(bench)
            await _swapped(bench, booted, 1)
            whole = _tokens(await _drained(await _submit(bench, _MANY)))
            leg = await _submit(bench, _MANY, "flying")
            pieces = await _some(leg, 3)
            made = (await _swapped(bench, booted, 2))["flying"]
            pieces += await _drained(leg)
            tokens = _tokens(pieces)
            holds(tokens[:made] == whole[:made], "tokens before the swap are not the old version's")
            holds(len(tokens) == _MANY, f"{len(tokens)} tokens, not {_MANY}")
            holds(tokens != whole, "tokens after the swap are the old version's")
            await _closed(bench)

    async def receiving_changes_nothing_that_serves(self) -> None:
        """Until `apply`, no reply says `touched`, and the tokens are the old version's; `release` drops what landed."""
        async with self.make() as bench:
            booted = await _started(bench)
            before = _tokens(await _drained(await _submit(bench, _FEW)))
            refit_id, ends = await _landed(bench, booted, 2)
            holds(_tokens(await _drained(await _submit(bench, _FEW))) == before, "what has only landed makes tokens")
            for _ in range(2):
                replies = await _ask(bench, booted, "release", refit_id)
                holds(not any(reply.touched or reply.error for reply in replies), f"a release answered {replies}")
            await bench.transport.release(refit_id)
            await ends.ended()
            replies = await _ask(bench, booted, "apply", refit_id)
            holds(
                all(reply.error and not reply.touched for reply in replies), f"what was released is applied: {replies}"
            )
            holds(_tokens(await _drained(await _submit(bench, _FEW))) == before, "a refused apply changed something")
            await _closed(bench)

    async def an_order_about_nothing_is_an_error_in_the_reply(self) -> None:
        """Not an exception, and not touched; `release` of nothing is none."""
        async with self.make() as bench:
            booted = await _started(bench)
            replies = await _ask(bench, booted, "apply", "never-was")
            holds(all(reply.error and not reply.touched for reply in replies), f"apply answered {replies}")
            replies = await _ask(bench, booted, "release", "never-was")
            holds(not any(reply.error for reply in replies), f"release answered {replies}")
            await _closed(bench)

    async def an_apply_that_fails_half_way_says_touched_and_a_full_refit_repairs_it(self) -> None:
        """`undo` in between makes the model runnable."""
        async with self.make() as bench:
            if bench.tear is None:
                raise unittest.SkipTest("this bench cannot tear an apply")
            booted = await _started(bench)
            await _swapped(bench, booted, 1)
            wanted = _tokens(await _drained(await _submit(bench, _FEW)))
            refit_id, ends = await _landed(bench, booted, 2)
            await bench.backend.suspend("recompute")
            await bench.tear()
            replies = await _ask(bench, booted, "apply", refit_id)
            holds(any(reply.error for reply in replies), "a torn apply has no error")
            holds(any(reply.touched for reply in replies), "a torn apply does not say touched")
            await _ask(bench, booted, "undo", refit_id)
            await _ask(bench, booted, "release", refit_id)
            await bench.transport.release(refit_id)
            await ends.ended()
            await bench.backend.resume()
            await _drained(await _submit(bench, _FEW))
            await _swapped(bench, booted, 1)
            holds(_tokens(await _drained(await _submit(bench, _FEW))) == wanted, "a full refit did not repair it")
            await _closed(bench)

    async def a_death_is_told_and_every_request_keeps_what_it_had(self) -> None:
        """`died` returns; `next` raises `ReplicaDied`; `partial` has the rest; later calls raise too."""
        async with self.make() as bench:
            if bench.kill is None:
                raise unittest.SkipTest("this bench cannot kill the engine")
            await _started(bench)
            whole = _tokens(await _drained(await _submit(bench, _MANY)))
            leg = await _submit(bench, _MANY)
            pieces = await _some(leg, 3)
            dying = asyncio.ensure_future(bench.backend.died())
            await asyncio.sleep(0)
            holds(not dying.done(), "dead, and alive")
            await bench.kill()
            holds(isinstance(await soon(dying, "died did not return"), ReplicaDied), "died of something else")

            async def rest() -> None:
                while True:
                    pieces.append(await leg.next())

            await raised(rest(), ReplicaDied, "a request of a dead engine does not raise ReplicaDied")
            pieces.append(leg.partial())
            tokens = _tokens(pieces)
            holds(3 <= len(tokens) < _MANY and tokens == whole[: len(tokens)], "not the tokens that were made")
            holds(not leg.partial().token_ids, "partial returns tokens twice")
            leg.abort()
            await raised(bench.backend.suspend("keep"), ReplicaDied, "a dead engine suspends")
            await raised(_submit(bench, _FEW), ReplicaDied, "a dead engine takes requests")
            await _closed(bench)

    async def a_closed_engine_can_be_closed_again_and_started_anew(self) -> None:
        """The second life proves no version, whatever it loaded, and takes one."""
        async with self.make() as bench:
            booted = await _started(bench)
            await _swapped(bench, booted, 1)
            wanted = _tokens(await _drained(await _submit(bench, _FEW)))
            await _closed(bench)
            await _closed(bench)
            booted = await _started(bench, 2)
            holds(booted.weight_version is None, "a restart proves no version")
            holds({place.incarnation for place in booted.layout} == {2}, "a layout of the life before")
            await _swapped(bench, booted, 1)
            holds(_tokens(await _drained(await _submit(bench, _FEW))) == wanted, "another model than in its first life")
            await _closed(bench)


async def _started(bench: BackendBench, incarnation: int = 1) -> Booted:
    return await soon(bench.backend.start(_NAME, incarnation), "the engine did not start", 60)


async def _closed(bench: BackendBench) -> None:
    await soon(bench.backend.close(), "the engine did not close", 30)


async def _submit(bench: BackendBench, tokens: int, request_id: str | None = None) -> Leg:
    number = next(bench.numbers)
    request = Request(
        request_id=request_id or f"request-{number}", prompt_token_ids=bench.prompt, max_tokens=tokens,
        params=SamplingParams(temperature=0.0, ignore_eos=True), cache_salt=f"salt-{number}", deltas=True, text=False,
    )  # fmt: skip
    return await bench.backend.submit(request)


async def _some(leg: Leg, count: int) -> list[Piece]:
    pieces: list[Piece] = []
    while _count(pieces) < count:
        pieces.append(await soon(leg.next(), "no token came"))
    return pieces


async def _drained(leg: Leg) -> list[Piece]:
    pieces = [await soon(leg.next(), "no token came")]
    while pieces[-1].finish_reason is None:
        pieces.append(await soon(leg.next(), "no token came"))
    return pieces


def _tokens(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def _count(pieces: Sequence[Piece]) -> int:
    return sum(len(piece.token_ids) for piece in pieces)


async def _ask(bench: BackendBench, booted: Booted, verb: WorkerVerb, refit_id: str) -> Sequence[WorkerReply]:
    replies = await soon(bench.backend.call_workers(WorkerOp(verb, refit_id)), f"no answer to {verb}", 30)
    ranks = sorted(reply.rank for reply in replies)
    holds(ranks == [place.rank for place in booted.layout], f"{verb} was answered by the ranks {ranks}")
    return replies


async def _landed(bench: BackendBench, booted: Booted, version: int) -> tuple[str, Ends]:
    sending = bench.sending(version)
    refit_id, manifest = sending.offer.refit_id, route(sending.offer, booted.inventory)
    tickets = await bench.transport.plan(sending.offer, manifest, booted.layout, bench.limits)
    ends = Ends(bench.transport, refit_id)
    replies = await bench.backend.call_workers(WorkerOp("receive", refit_id, tuple(tickets)))
    holds(not any(reply.error or reply.touched for reply in replies), f"receive answered {replies}")
    ring = bench.transport.ring(refit_id)
    if ring is not None:
        await ends.attached(len(booted.layout))
    trailer = await sending.send(manifest, tickets, ring)
    await bench.transport.seal(trailer)
    for progress in await ends.reached(len(booted.layout), bench.limits[0]):
        holds(progress.kind == "landed", f"rank {progress.rank} did not land: {progress.error}")
    return refit_id, ends


async def _swapped(bench: BackendBench, booted: Booted, version: int) -> dict[str, int]:
    refit_id, ends = await _landed(bench, booted, version)
    counts = dict(await soon(bench.backend.suspend("recompute"), "a suspend did not return", 30))
    replies = await _ask(bench, booted, "apply", refit_id)
    holds(not any(reply.error for reply in replies), f"apply answered {replies}")
    holds(all(reply.touched for reply in replies), "an apply that was done does not say touched")
    replies = await _ask(bench, booted, "finalize", refit_id)
    holds(not any(reply.error for reply in replies), f"finalize answered {replies}")
    await bench.backend.reset_cache()
    await _ask(bench, booted, "release", refit_id)
    await bench.transport.release(refit_id)
    await ends.ended()
    await soon(bench.backend.resume(), "a resume did not return")
    return counts
