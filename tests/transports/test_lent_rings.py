"""Whose ring a trainer in the engines' own process lends: each engine has its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pitstop.engine.worker_ports import Ticket
from pitstop.transports import cuda_memory, memory_link


class Ring:
    def __init__(self, device: str, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes


def test_two_engines_of_a_process_never_share_a_ring_and_one_that_closed_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lend(known: Any, device: str, nbytes: int) -> Any:
        return known if known is not None and (known.device, known.nbytes) == (device, nbytes) else Ring(device, nbytes)

    def ring(name: str) -> Any:
        address = f"ipc://{tmp_path}/{name}"
        return memory_link._lent(Ticket("r", "r0", 1, 0, "", "", 512, (), address, "", 1.0, 1.0, device="cuda:x"))

    monkeypatch.setattr(cuda_memory, "lend", lend)
    for name in ("one", "other"):
        (tmp_path / name).touch()
    one, other = ring("one"), ring("other")
    assert one is not other
    assert ring("one") is one
    assert ring("other") is other
    (tmp_path / "one").unlink()
    ring("other")
    assert list(memory_link._rings) == [f"ipc://{tmp_path}/other"]
    memory_link._rings.clear()
