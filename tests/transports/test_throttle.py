"""The pace at which a version goes into spare memory: its rate, what may be saved up, and that it never comes late."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pitstop.transports.throttle import PIECE_NBYTES, Throttle

PIECES = st.lists(st.integers(1, PIECE_NBYTES), min_size=1, max_size=60)
RATES = st.integers(1, 1 << 40)
FAR = 1e15


def gone(
    pieces: list[int], rate: int | None, until: float, late: list[float], work: float = 0.0, total: int | None = None
) -> list[tuple[float, int]]:
    """When each piece goes, for a thread that wakes up later than it wants to, and takes its time over a copy."""
    now, throttle, seen = 0.0, Throttle(sum(pieces) if total is None else total, rate, 0.0, until), []
    for n, nbytes in enumerate(pieces):
        while (seconds := throttle.wait(now)) > 0:
            now = max(now + seconds, throttle._due)  # as far as floats go
            now += late[n % len(late)]
        throttle.spend(nbytes, now)
        seen.append((now, nbytes))
        now += work
    return seen


@settings(deadline=None)
@given(PIECES, RATES, st.lists(st.floats(0, 0.1), min_size=1, max_size=5))
def test_over_no_stretch_of_time_does_more_go_than_the_rate_and_what_may_be_saved_up(
    pieces: list[int], rate: int, late: list[float]
) -> None:
    seen = gone(pieces, rate, FAR, late)
    for first in range(len(seen)):
        for last in range(first, len(seen)):
            seconds = seen[last][0] - seen[first][0]
            nbytes = sum(n for _, n in seen[first : last + 1])
            assert nbytes <= (rate * seconds + 3 * PIECE_NBYTES) * (1 + 1e-6) + 1


@settings(deadline=None)
@given(PIECES, RATES)
def test_who_is_never_late_has_the_rate_in_full(pieces: list[int], rate: int) -> None:
    took = gone(pieces, rate, FAR, [0.0])[-1][0]
    assert took <= sum(pieces[:-1]) / rate * (1 + 1e-6) + 1e-9


@settings(deadline=None)
@given(PIECES, RATES, st.floats(0.001, 1000.0))
def test_however_slow_the_rate_nothing_waits_past_the_time_at_which_all_should_have_gone(
    pieces: list[int], rate: int, until: float
) -> None:
    assert gone(pieces, rate, until, [0.0])[-1][0] <= until * (1 + 1e-9)


@settings(deadline=None)
@given(PIECES, st.floats(0.001, 10.0), st.floats(0.0, 1.0))
def test_time_that_others_have_taken_is_made_up_for(pieces: list[int], until: float, work: float) -> None:
    """A trainer that writes slowly takes from the time that is left: what remains goes faster, or at once."""
    for (before, _), (after, _) in pairwise(gone(pieces, 1, until, [0.0], work)):
        asked = before + work
        assert after <= until * (1 + 1e-9) if asked < until else after == asked


@settings(deadline=None)
@given(PIECES, st.integers(0, 60 * PIECE_NBYTES))
def test_who_sends_more_than_was_said_is_not_held_back_past_that_time_either(pieces: list[int], total: int) -> None:
    """What lies between tensors travels as well, and is not counted as theirs."""
    assert gone([*pieces, 0], 1, 5.0, [0.0], total=total)[-1][0] <= 5.0 * (1 + 1e-9)


@settings(deadline=None)
@given(PIECES)
def test_without_a_rate_nothing_waits(pieces: list[int]) -> None:
    assert gone(pieces, None, 0.0, [1.0])[-1][0] == 0.0


def test_pieces_are_spread_evenly_and_not_sent_in_bursts() -> None:
    seen = gone([PIECE_NBYTES] * 50, PIECE_NBYTES * 1000, FAR, [0.0])
    gaps = [after - before for (before, _), (after, _) in pairwise(seen)]
    assert max(gaps) - min(gaps) < 1e-9
    assert abs(min(gaps) - 0.001) < 1e-9


def test_where_all_has_to_go_faster_than_the_rate_it_is_spread_evenly_as_well() -> None:
    seen = gone([PIECE_NBYTES] * 50, 1, 10.0, [0.0])
    assert [round(at, 6) for at, _ in seen] == [round(n * 0.2, 6) for n in range(50)]


def test_who_wakes_up_late_makes_up_for_two_pieces_and_no_more() -> None:
    rate = PIECE_NBYTES * 1024
    a_little = gone([PIECE_NBYTES] * 50, rate, FAR, [0.0, 0.0015])
    assert abs(a_little[-1][0] - 49 / 1024) < 0.002
    long_ago = Throttle(50 * PIECE_NBYTES, rate, 0.0, FAR)
    at_once = 0
    while not long_ago.wait(5.0):
        long_ago.spend(PIECE_NBYTES, 5.0)
        at_once += 1
    assert at_once == 3
