"""What a replica's engine is started with, as tables."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from pitstop.engine.vllm_backend.arguments import EngineArgumentRejected
from pitstop.engine.vllm_backend.config import (
    Host,
    Seat,
    bands,
    bound,
    cache_root,
    context_cap,
    cpu_list,
    defaults,
    environment,
    executor,
    placed,
    request_tokens,
    spec_clamp,
)
from pitstop.engine.vllm_backend.host import Band, changed, numa_cpus

EIGHT = Host(devices=tuple("01234567"))


@pytest.mark.parametrize(
    ("asked", "most"),
    [((256, 100, 1024, 5), 256), ((256, 900, 1024, 5), 118), ((256, 1018, 1024, 5), 1), ((256, 1050, 1024, 5), 1),
     ((8, 100, 1024, 5), 8)],
)  # fmt: skip
def test_a_request_leaves_room_for_what_a_drafter_may_draft(asked: tuple[int, int, int, int], most: int) -> None:
    assert spec_clamp(*asked) == most


@pytest.mark.parametrize(
    ("cap", "lookahead", "most"), [(False, 0, 400), (True, 0, 300), (False, 5, 294), (True, 5, 294)]
)
def test_the_context_caps_first_and_a_drafter_clamps_then(cap: bool, lookahead: int, most: int) -> None:
    assert request_tokens(400, 700, 1000, lookahead, cap=cap) == most


def test_a_full_context_leaves_one_token() -> None:
    assert [context_cap(9, n, 10) for n in (0, 1, 5, 9, 10, 11)] == [9, 9, 5, 1, 1, 1]


@pytest.mark.parametrize(
    ("seat", "arguments", "host", "devices"),
    [
        (Seat(0, 1), {}, EIGHT, None),
        (Seat(0, 1), {"tensor_parallel_size": 8}, EIGHT, None),
        (Seat(0, 2), {}, EIGHT, ("0",)),
        (Seat(3, 4), {"tensor_parallel_size": 2}, EIGHT, ("6", "7")),
        (Seat(1, 2), {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, EIGHT, ("4", "5", "6", "7")),
        (Seat(1, 2), {}, Host(devices=("GPU-a", "GPU-b", "GPU-c")), ("GPU-b",)),
        (Seat(1, 2), {}, Host(), None),
        (Seat(1, 2), {"distributed_executor_backend": "ray"}, Host(devices=("0",)), None),
        (Seat(1, 2, ("0",)), {}, Host(devices=("0",)), ("0",)),
        (Seat(0, 1, ("5",)), {}, EIGHT, ("5",)),
    ],
)
def test_each_replica_has_gpus_of_its_own_unless_its_owner_says_otherwise(
    seat: Seat, arguments: dict[str, Any], host: Host, devices: tuple[str, ...] | None
) -> None:
    assert placed(seat, arguments, host) == devices


@pytest.mark.parametrize(
    ("seat", "arguments", "host", "says"),
    [
        (Seat(0, 3), {}, Host(devices=("0", "1")), r"3 replicas of 1 ranks need 3 GPUs, 2 are visible.*devices="),
        (Seat(0, 5), {"tensor_parallel_size": 2}, EIGHT, "5 replicas of 2 ranks need 10 GPUs, 8 are visible"),
        (Seat(0, 1), {"tensor_parallel_size": 2}, Host(devices=("0",)), "1 replicas of 2 ranks need 2 GPUs, 1 are"),
        (Seat(2, 3, ("0", "1")), {}, EIGHT, "replica 2 has 1 ranks, and was given the GPUs 0, 1"),
    ],
)
def test_replicas_that_do_not_fit_are_refused_with_the_numbers(
    seat: Seat, arguments: dict[str, Any], host: Host, says: str
) -> None:
    with pytest.raises(EngineArgumentRejected, match=says):
        placed(seat, arguments, host)


def test_bands_of_ports_lie_below_what_the_kernel_gives_away_and_a_callers_first_port_wins() -> None:
    assert list(bands(Host()))[:2] == [7000, 7100]
    assert max(bands(Host(ephemeral=9000))) == 8900
    assert list(bands(Host(ephemeral=6000)))[:: len(bands(Host(ephemeral=6000))) - 1] == [5000, 5900]
    assert bands(Host(environment={"VLLM_PORT": "12345"}))[0] == 12345
    assert bands(Host(environment={"VLLM_PORT": "45000"}))[0] == 45000


def test_only_replicas_that_compile_beside_others_have_caches_of_their_own() -> None:
    host = Host(home="/home/a")
    assert cache_root(Seat(0, 2), {}, host) is None
    assert cache_root(Seat(1, 2), {"enforce_eager": True}, host) is None
    assert cache_root(Seat(1, 2), {}, host) == "/home/a/.cache/vllm-replica-1"
    assert cache_root(Seat(1, 2), {}, Host(environment={"VLLM_CACHE_ROOT": "/c"})) == "/c-replica-1"


def test_the_environment_of_a_replica_holds_what_differs_and_nothing_else() -> None:
    assert environment(Seat(), {"enforce_eager": True}, Host(), None) == {}
    assert environment(Seat(1, 2), {}, Host(devices=("3", "4"), home="/h"), 7200) == {
        "CUDA_VISIBLE_DEVICES": "4", "VLLM_PORT": "7201", "VLLM_CACHE_ROOT": "/h/.cache/vllm-replica-1",
    }  # fmt: skip


def test_prefix_caching_is_on_a_drafter_of_no_tokens_is_none_and_ranks_are_processes_of_this_host() -> None:
    assert defaults({}) == {"enable_prefix_caching": True}
    assert defaults({"enable_prefix_caching": False}) == {"enable_prefix_caching": False}
    speculative = {"method": "ngram", "num_speculative_tokens": 0}
    assert "speculative_config" not in defaults({"speculative_config": speculative})
    assert defaults({"speculative_config": {**speculative, "num_speculative_tokens": 1}})["speculative_config"]
    assert [executor({"tensor_parallel_size": n}) for n in (1, 2)] == [None, "mp"]
    assert executor({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}) is None
    assert defaults({"pipeline_parallel_size": 2})["distributed_executor_backend"] == "mp"


NODES = {0: frozenset({0, 1}), 1: frozenset({2, 3})}
ALL = frozenset(range(4))


def test_processes_run_near_their_gpu_and_the_core_too_where_its_gpus_are_in_one_place() -> None:
    one = bound({10: 1, 11: 1}, [9, 10, 11], NODES, ALL, {})
    assert one.cpus == {9: NODES[1], 10: NODES[1], 11: NODES[1]}
    assert bound({10: 0, 11: 1}, [9, 10, 11], NODES, ALL, {}).cpus == {10: NODES[0], 11: NODES[1]}
    assert bound({10: 1}, [10], NODES, frozenset({0, 3}), {}).cpus == {10: frozenset({3})}


@pytest.mark.parametrize(
    ("nodes", "cpus", "allowed", "arguments", "says"),
    [
        ({10: 1}, {0: ALL}, ALL, {}, "one NUMA node"),
        ({10: None}, NODES, ALL, {}, "no GPU of it"),
        ({10: 1}, NODES, frozenset({0}), {}, "CPUs that we may use"),
        ({10: 1}, NODES, ALL, {"numa_bind": True}, "vLLM binds them itself"),
    ],
)
def test_processes_that_are_bound_nowhere_have_a_reason(
    nodes: dict[int, int | None], cpus: Any, allowed: frozenset[int], arguments: dict[str, Any], says: str
) -> None:
    binding = bound(nodes, [], cpus, allowed, arguments)
    assert (dict(binding.cpus), says in binding.why_not) == ({}, True)


def test_the_kernels_lists_of_cpus_are_read(tmp_path: Path) -> None:
    assert cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert cpu_list("\n") == frozenset()
    for node, cpus in (("node0", "0-1"), ("node1", "2-3")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus)
    (tmp_path / "online").write_text("0-1")
    assert numa_cpus(tmp_path) == NODES


def test_b03_engines_that_start_together_never_share_a_band_of_ports() -> None:
    """Twenty rounds of four, with somebody else's process on the first port of the first band."""
    with socket.socket() as foreign:
        foreign.bind(("", 0))
        port = foreign.getsockname()[1]
        host = Host(environment={"VLLM_PORT": str(port)}, ephemeral=port + 2000)
        for _ in range(20):
            taken: list[Band] = []
            threads = [threading.Thread(target=lambda made=taken: made.append(Band(host))) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            firsts = [band.first for band in taken]
            assert None not in firsts
            assert len(set(firsts)) == 4
            assert port not in firsts
            for band in taken:
                band.close()


def test_who_finds_every_band_taken_leaves_ports_to_the_kernel() -> None:
    with socket.socket() as foreign:
        foreign.bind(("", 0))
        port = foreign.getsockname()[1]
        assert Band(Host(environment={"VLLM_PORT": str(port)}, ephemeral=port + 150)).first is None


def test_an_environment_is_put_back_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        with changed({"PITSTOP_TEST_KEPT": "a", "PITSTOP_TEST_NEW": "b"}):
            assert (os.environ["PITSTOP_TEST_KEPT"], os.environ["PITSTOP_TEST_NEW"]) == ("a", "b")
            raise RuntimeError

    monkeypatch.setenv("PITSTOP_TEST_KEPT", "before")
    monkeypatch.delenv("PITSTOP_TEST_NEW", raising=False)
    with pytest.raises(RuntimeError):
        fails()
    assert os.environ["PITSTOP_TEST_KEPT"] == "before"
    assert "PITSTOP_TEST_NEW" not in os.environ
