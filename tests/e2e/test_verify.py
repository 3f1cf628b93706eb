"""Drift in the live weights of a real engine."""

from __future__ import annotations

from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from pitstop.engine import SamplingParams
from pitstop.engine.errors import WeightsDrifted
from pitstop.engine.fleet import Fleet
from pitstop.engine.lifecycle import Phase
from pitstop.engine.vllm_backend import VllmBackend
from tests.checkpoints import LAYERS, tensors
from tests.conftest import Checkpoint
from tests.e2e.conftest import Launch

PLAIN = "tests.vllm.plain_worker.PlainWorker"


async def drift(fleet: Fleet, name: str, replica: int = 0) -> None:
    """Flip one bit of the middle element of a live tensor."""

    def flip(worker: Any) -> int:
        import torch

        model = worker.get_model()
        tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
        flat = tensor.data.view(-1).view(torch.int32)
        flat[flat.numel() // 2] ^= 1 << 7
        return int(flat.numel())

    backend = fleet.replicas[replica].backend
    assert isinstance(backend, VllmBackend)
    assert backend._life is not None
    assert all(await backend._life.llm.collective_rpc(cloudpickle.dumps(flip)))


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("model.embed_tokens.weight", False),
        ("model.layers.1.post_attention_layernorm.weight", False),
        ("model.norm.weight", False),
        ("model.layers.0.self_attn.qkv_proj.weight", True),
        ("model.layers.1.mlp.down_proj.weight", True),
    ],
)
async def test_one_flipped_bit_of_a_live_weight_is_found_quarantined_and_healed_by_a_refit(
    launch: Launch, checkpoint: Checkpoint, name: str, plain: bool
) -> None:
    async with launch(**({"worker_cls": PLAIN} if plain else {})) as engine:
        await engine.refit(checkpoint("llama", 1), weight_version=1)
        before = (await engine.verify()).replicas["replica-0"]
        assert (before.state, before.weight_version) == ("same", 1)
        await drift(engine, name)
        with pytest.raises(WeightsDrifted) as caught:
            await engine.verify()
        assert {key: caught.value.fields[key] for key in ("rank", "tensor", "count")} == {
            "rank": 0, "tensor": name, "count": 1,
        }  # fmt: skip
        assert engine.replicas[0].phase is Phase.QUARANTINED
        await engine.recover()
        assert engine.replicas[0].weight_version == 1
        again = (await engine.verify()).replicas["replica-0"]
        assert (again.state, again.nbytes) == ("same", before.nbytes)


async def test_a_report_says_which_weights_a_cpu_engine_has_packed_away_and_a_plain_worker_hides_none(
    launch: Launch,
) -> None:
    linear = {
        f"0:model.layers.{n}.{part}.weight"
        for n in range(LAYERS)
        for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    async with launch() as engine:
        check = (await engine.verify()).replicas["replica-0"]
        assert set(check.blind) == linear | {"0:lm_head.weight"}
        assert 0 < check.nbytes < check.checkpoint_nbytes
    async with launch(worker_cls=PLAIN) as engine:
        check = (await engine.verify()).replicas["replica-0"]
        assert (check.blind, check.left_out) == ((), {})
        assert check.nbytes >= check.checkpoint_nbytes == sum(t.nbytes for t in tensors("llama", 0).values())


async def test_requests_of_a_replica_that_drifted_end_with_the_error_and_their_tokens(launch: Launch) -> None:
    async with launch(replicas=2) as engine:
        await engine.verify()
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        streams = [engine.stream([1, 2, n], params) for n in range(4)]
        started = [await anext(stream) for stream in streams]
        await drift(engine, "model.norm.weight")
        report = await engine.verify(raise_on_drift=False)
        assert [check.replica for check in report.drifted] == ["replica-0"]

        async def rest(stream: Any) -> str:
            try:
                return str([chunk.finish_reason async for chunk in stream][-1])
            except WeightsDrifted:
                return "drifted"

        ends = sorted([await rest(stream) for stream in streams])
        assert (len(started), ends) == (4, ["drifted", "drifted", "length", "length"])


async def test_every_rank_of_a_replica_is_compared(launch: Launch, checkpoint: Checkpoint) -> None:
    async with launch(tensor_parallel_size=2) as engine:
        await engine.refit(checkpoint("llama", 1), weight_version=1)
        check = (await engine.verify()).replicas["replica-0"]
        assert (check.state, check.weight_version) == ("same", 1)
        assert {name.partition(":")[0] for name in check.blind} == {"0", "1"}
        found = (await engine.fingerprints())["replica-0"]
        assert len(found) == check.tensors
        assert {name.partition(":")[0] for name in found} == {"0", "1"}
