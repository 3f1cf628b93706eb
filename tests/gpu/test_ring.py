"""A GPU's ring on a GPU: what `ring_h200` asks, small."""

from __future__ import annotations

import pytest

from tests.gpu import ring_h200

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def test_digests_are_the_definitions() -> None:
    seen = ring_h200.digests()
    assert seen["triton"]
    assert seen["damage_missed"] == 0
    for name in ("kernel", "kernel_copy", "torch", "torch_copy"):
        assert (seen[name]["wrong"], seen[name]["torn"]) == ([], [])


@pytest.mark.parametrize(("slots", "slot_mib"), [(4, 4), (8, 1)])
def test_a_version_passes_from_one_process_to_another(slots: int, slot_mib: int) -> None:
    seen = ring_h200.together(ring_h200.GIB // 8, slots, slot_mib)
    for how in ("staged", "staged again", "in place", "with naps"):
        assert (seen[how]["wrong"], seen[how]["digests_equal"]) == ([], True)
    assert seen["exit"] == 0


def test_a_receiver_outlives_its_trainer() -> None:
    seen = ring_h200.killed()
    assert seen["still_readable"]
    assert seen["next_trainer"]["staged"]["wrong"] == []
