"""A whole engine of two replicas, whose trainers and receivers are processes, and one cell of the matrix of faults."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from pitstop.engine import Outcome, Phase, RolloutEngine, SamplingParams
from pitstop.engine.errors import PitstopError
from pitstop.engine.handle import RefitHandle
from pitstop.engine.ports import Transition
from pitstop.engine.refit import RefitReport
from pitstop.engine.simulated import TORN
from pitstop.engine.worker_ports import Trailer
from pitstop.transports import Buffers
from tests.engine.sim import Log, expected
from tests.transports.struck import How, Peer, RankBackend, peer, train
from tests.transports.test_publisher import shas
from tests.transports.weights import weights

LIMITS: Final = {
    "suspend": 3.0, "receive": 4.0, "receive_per_gib": 1.0, "finalize": 1.5, "control": 2.5, "silence": 2.0,
}  # fmt: skip
"""Of every refit of the matrix, in seconds. A `control` above `OVER` shows an error that waits for two."""

OVER: Final = 2.0
"""Seconds that an error may come after its deadline."""

PATHS: Final[dict[str, dict[str, Any]]] = {
    "segment": {},
    "ring": {"buffers": Buffers(most_nbytes=0, slots=2, slot_nbytes=8192)},
}
"""How bytes travel: by name, what the engine is made with."""

Where = Literal["offer", "first", "middle", "last", "sent", "apply", "finalize"]
PIECES: Final[dict[Where, int]] = {"first": 0, "middle": 4, "last": 7}
WHERE: Final[tuple[Where, ...]] = ("offer", "first", "middle", "last", "sent", "apply", "finalize")
_LONG: Final = SamplingParams(max_tokens=4000)


@dataclass(frozen=True, slots=True)
class Row:
    """Who is struck, how, at which step, while bytes travel which way."""

    who: Literal["trainer", "receiver"]
    how: How
    where: Where
    path: str = "segment"

    def __str__(self) -> str:
        return f"{self.who}-{self.how}-{self.where}-{self.path}"


@dataclass(frozen=True, slots=True)
class End:
    """How a row must end: for the refit, for the replica that was struck, and after how long at most."""

    outcomes: frozenset[Outcome]
    slugs: frozenset[str]
    phase: Phase
    seconds: float


def end_of(row: Row) -> End:
    """What DESIGN's guarantees make of a row."""
    committed, partial = frozenset({Outcome.COMMITTED}), frozenset({Outcome.PARTIAL})
    silence, receive = frozenset({"peer_lost"}), frozenset({"deadline_exceeded"})
    staging = row.where in ("offer", *PIECES, "sent")
    if row.who == "trainer":
        if row.where in ("sent", "apply", "finalize"):
            return End(committed, frozenset(), Phase.SERVING, 0.0)  # the engine has all it needs
        slugs, seconds = {
            "kill": (silence, 0.0), "stop": (silence, LIMITS["silence"]), "silent": (silence, LIMITS["silence"]),
            "mute": (receive, LIMITS["receive"]), "raise": (frozenset({"worker_failed"}), 0.0),
        }[row.how]  # fmt: skip
        return End(frozenset({Outcome.FAILED}), slugs, Phase.SERVING, seconds)
    if row.how == "kill":
        # Dead before the refit has chosen its replicas, it is not a part of it.
        outcomes = partial | committed if row.where == "offer" else partial
        return End(outcomes, frozenset({"replica_died", "peer_lost"}), Phase.DEAD, 0.0)
    if row.how == "raise":
        phase = Phase.QUARANTINED if row.where == "finalize" else Phase.SERVING
        return End(partial, frozenset({"worker_failed"}), phase, 0.0)
    if row.where == "offer":
        return End(partial, receive, Phase.SERVING, LIMITS["control"])
    if not staging:
        return End(partial, receive, Phase.QUARANTINED, LIMITS["receive" if row.where == "apply" else "finalize"])
    if row.how == "mute":
        return End(partial, receive, Phase.SERVING, LIMITS["receive"])
    # Who says nothing does nothing for its buckets either: whichever limit comes first.
    slugs = silence | receive if row.path == "ring" else silence
    return End(partial, slugs, Phase.SERVING, LIMITS["silence"])


class Pits(RolloutEngine):
    """Two replicas. `at` is called with each step of a refit's way into the first, as it begins."""

    def __init__(self, path: str = "segment") -> None:
        self.versions: dict[str, int] = {}
        self.sims = [RankBackend(self.versions) for _ in range(2)]
        self.log = _Steps(self)
        self.at: Callable[[str], None] = lambda _: None
        self.handles: dict[int, RefitHandle] = {}
        super().__init__(self.sims, observer=self.log, **PATHS[path])
        transport: Any = self._coordinator._transport
        seal = transport.seal

        async def sealed(trailer: Trailer) -> None:
            self.at("sent")
            await seal(trailer)

        transport.seal = sealed

    def _offered(self, sending: Any) -> None:
        self.at("offer")
        super()._offered(sending)

    def offer(self, make: Any, options: Any, handle: RefitHandle, **more: Any) -> RefitHandle:
        self.versions[handle.refit_id] = handle.weight_version
        self.handles[handle.weight_version] = handle
        return super().offer(make, options, handle, **more)

    async def over(self, version: int) -> tuple[RefitReport, float]:
        """Wait for the end of a refit; return its report, and when it came."""
        async with asyncio.timeout(20):
            while version not in self.handles:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.005)
            with contextlib.suppress(PitstopError):
                await self.handles[version]
        report = self.handles[version].report
        assert report is not None
        return report, time.monotonic()


class _Steps(Log):
    def __init__(self, engine: Pits) -> None:
        super().__init__()
        self._engine = engine

    def transition(self, change: Transition) -> None:
        super().transition(change)
        step = {Phase.RECEIVING: "apply", Phase.FINALIZING: "finalize"}.get(change.after)
        if change.replica == "replica-0" and step is not None:
            self._engine.at(step)


class Viewer:
    """Reads one stream as it comes, and checks it."""

    def __init__(self, engine: Pits, prompt: int) -> None:
        self.tokens: list[int] = []
        self.error: PitstopError | None = None
        self._prompt = [prompt]
        self._spans: list[tuple[int, int, int]] = []
        self._stream = engine.stream(self._prompt, _LONG)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for chunk in self._stream:
                self._spans.append((chunk.weight_version, chunk.start, chunk.start + len(chunk.token_ids)))
                self.tokens += chunk.token_ids
        except PitstopError as error:
            self.error = error

    def on(self, engine: Pits) -> int:
        return next(n for n, r in enumerate(engine.replicas) if self._stream.request_id in r.flights)

    async def leave(self) -> None:
        await self._stream.aclose()
        async with asyncio.timeout(5):
            await self.task
        assert TORN not in self.tokens
        assert self.tokens == expected(self._prompt, self._spans)


async def suffer(row: Row) -> float:
    """Run one row of the matrix; return how many seconds after the blow the refit had ended."""
    end = end_of(row)
    struck_at = 0.0
    async with Pits(row.path) as engine:
        folder = engine._run_dir.path
        async with peer(train, engine.address, LIMITS) as trainer:
            assert await trainer.told() == "connected"
            viewers = [Viewer(engine, n) for n in range(2)]
            async with asyncio.timeout(10):
                while not all(viewer.tokens for viewer in viewers):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            at = {viewer.on(engine): viewer for viewer in viewers}
            first = engine.sims[0]
            struck: Peer = trainer if row.who == "trainer" else first.peer  # type: ignore[assignment]

            def strike() -> None:
                nonlocal struck_at
                if not struck_at:
                    struck_at = time.monotonic()
                    if row.how != "raise":
                        struck.strike(row.how)

            engine.at = lambda step: strike() if step == row.where else None
            fails = row.how == "raise"
            if fails and row.who == "receiver":
                await first.ask("fail", "landed" if row.where == "sent" else row.where)
            trainer.pipe.send((1, PIECES.get(row.where, -1), fails and row.who == "trainer", None))
            if row.where in PIECES:
                assert await trainer.told() == "held"
                strike()
                if struck is not trainer or fails:
                    trainer.pipe.send("go")
            seen = len(at[1].tokens)
            report, ended = await engine.over(1)
            took = ended - struck_at
            _judge(row, end, engine, report)
            assert took < end.seconds + OVER, f"{took:.2f} s"
            if row.who == "receiver" or fails:
                said, _, errors = await trainer.told(OVER)
                assert time.monotonic() - struck_at < end.seconds + OVER + 1.0
                assert said == (report.outcome.value if report.error is None or errors else report.error.slug)
                assert errors == {n: p.error.slug for n, p in report.replicas.items() if p.error is not None} or (
                    report.outcome is Outcome.FAILED
                )
            # What happens to one is no matter of the other.
            assert len(at[1].tokens) > seen
            assert at[1].error is None
            await _after(row, end, engine, struck, at[0])
            if struck is trainer and row.how in ("stop", "silent", "mute"):
                await trainer.told()  # awake, it learns what became of its offer
            for viewer in viewers:
                await viewer.leave()
    assert not folder.exists()
    return took


def _judge(row: Row, end: End, engine: Pits, report: RefitReport) -> None:
    assert report.outcome in end.outcomes
    ends = [error for key, error, _ in engine.log.ends if key == f"refit:{report.refit_id}"]
    assert len(ends) == 1
    for name, part in report.replicas.items():
        assert part.committed is (part.error is None)
        if part.error is None:
            continue
        assert row.who == "trainer" or name == "replica-0"
        assert part.error.slug in end.slugs
        assert set(part.error.fields) & {"replica", "peer", "operation"}, part.error.fields
        if part.error.slug == "deadline_exceeded":
            assert {"replica", "phase", "peer", "seconds"} <= set(part.error.fields)
        if row.how == "raise":
            assert "this shard" in part.error.message or "cannot be" in part.error.message
    assert engine.replicas[1].phase is Phase.SERVING
    version = 0 if row.who == "trainer" and end.slugs else 1
    assert engine.replicas[1].weight_version == version
    if end.phase is not Phase.DEAD:
        assert engine.replicas[0].phase is end.phase
    if end.phase is Phase.SERVING and end.slugs:
        assert engine.replicas[0].weight_version == 0


async def _after(row: Row, end: End, engine: Pits, struck: Peer, viewer: Viewer) -> None:
    """Whoever was struck is woken or replaced, and a new trainer's version reaches everybody."""
    if end.phase is Phase.DEAD:
        async with asyncio.timeout(5):
            await engine.replicas[0].reached(frozenset({Phase.DEAD}))
    if end.phase in (Phase.DEAD, Phase.QUARANTINED):
        async with asyncio.timeout(2):
            await viewer.task
        assert viewer.error is not None
        assert engine.replicas[0].weight_version is None
    if row.how == "kill":
        await engine.restart()
    elif row.how != "raise":
        struck.wake()
    elif row.who == "receiver":
        await engine.sims[0].ask("fail", "")
    async with peer(train, engine.address, LIMITS) as another:
        assert await another.told() == "connected"
        another.pipe.send((2, -1, False, None))
        assert await another.told() == ("committed", "", {})
    report, _ = await engine.over(2)
    assert {n for n, part in report.replicas.items() if part.committed} == {"replica-0", "replica-1"}
    expected_content = shas(weights(2))
    assert [sim.content for sim in engine.sims] == [expected_content] * 2
    assert [replica.phase for replica in engine.replicas] == [Phase.SERVING] * 2
    done = await asyncio.gather(*(engine.generate([n], SamplingParams(max_tokens=3)) for n in range(4)))
    assert {completion.spans for completion in done} == {((2, 0, 3),)}
    assert {completion.replica for completion in done} == {"replica-0", "replica-1"}


@contextlib.contextmanager
def ticking() -> Iterator[Callable[[], float]]:
    """Measure by how many seconds the loop is late at worst, beyond what any thread of a busy machine is."""
    worst = {"loop": 0.0, "thread": 0.0}
    over = threading.Event()

    def late(who: str, due: float) -> None:
        worst[who] = max(worst[who], time.monotonic() - due)

    async def tick() -> None:
        while True:
            due = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            late("loop", due)

    def beat() -> None:
        while not over.is_set():
            due = time.monotonic() + 0.01
            time.sleep(0.01)
            late("thread", due)

    task, thread = asyncio.create_task(tick()), threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield lambda: worst["loop"] - 2 * worst["thread"]
    finally:
        task.cancel()
        over.set()
        thread.join()
