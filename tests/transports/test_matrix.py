"""Whoever is killed, frozen or mute, at whatever step: one typed error in time, the others go on, the next refit works.

The rows of one test run side by side, since most of their time is waiting. A new way for bytes to travel is a name in
`pits.PATHS`, and its rows are `Row(..., path=name)`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from pitstop.transports.digest import prepare
from tests.transports.children import descriptors
from tests.transports.pits import PATHS, PIECES, WHERE, Row, Where, suffer, ticking
from tests.transports.struck import How, Peer, rank
from tests.transports.weights import weights

LAG = 0.5
"""Seconds that the loop may be held up while seven engines share it."""


def rows(path: str) -> list[Row]:
    # What comes after the trailer knows nothing of the way that the bytes took.
    where: tuple[Where, ...] = WHERE if path == "segment" else (*PIECES, "sent")
    offer: tuple[Where, ...] = ("offer",) if path == "segment" else ()
    return [
        *(Row("trainer", how, at, path) for how in ("kill", "stop", "silent") for at in where),
        # Mute after it has sent everything, a trainer is as it always is.
        *(Row("trainer", "mute", at, path) for at in (*offer, *PIECES)),
        *(Row("trainer", "raise", at, path) for at in PIECES),
        *(Row("receiver", how, at, path) for how in ("kill", "stop", "mute") for at in where),
        # An order that is not answered is not answered: whether it beats is no difference from `apply` on.
        *(Row("receiver", "silent", at, path) for at in (*offer, *PIECES, "sent")),
        *(Row("receiver", "raise", at, path) for at in ("sent", "apply", "finalize") if at in where),
    ]


ROWS = [row for path in PATHS for row in rows(path)]


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """What is imported and compiled once, and the server that processes come from, is no lateness of the loop."""
    prepare()
    weights(0)
    Peer(rank).end()


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("who", "how"),
    [(who, how) for who in ("trainer", "receiver") for how in ("kill", "stop", "mute", "silent", "raise")],
)
async def test_a_blow_at_any_step_is_one_typed_error_in_time(who: str, how: How, path: str) -> None:
    struck = [row for row in ROWS if (row.who, row.how, row.path) == (who, how, path)]
    assert struck
    files, shared, tasks = descriptors(), set(os.listdir("/dev/shm")), asyncio.all_tasks()
    began = time.monotonic()
    with ticking() as stall:
        results = await asyncio.gather(*map(suffer, struck), return_exceptions=True)
    failures = []
    for row, result in zip(struck, results, strict=True):
        if isinstance(result, BaseException):
            result.add_note(f"in row {row}")
            failures.append(result)
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} of {len(struck)} rows", failures)
    took = {row.where: round(seconds, 2) for row, seconds in zip(struck, results, strict=True)}  # type: ignore[arg-type]
    said = f"{who} {how} {path}: {took}, in all {time.monotonic() - began:.1f} s, loop held up {stall() * 1e3:.0f} ms"
    sys.stdout.write(f"{said}\n")
    assert stall() < LAG
    await asyncio.sleep(0.2)  # segments are let go of in a thread
    assert descriptors() == files
    assert {name for name in os.listdir("/dev/shm") if "pitstop" in name} <= shared
    assert asyncio.all_tasks() <= tasks
