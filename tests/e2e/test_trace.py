"""One trace through the trainer's process and the fleet's, read back from the two journals."""

from __future__ import annotations

import itertools
from pathlib import Path

from pitstop import telemetry
from pitstop.engine import SamplingParams
from pitstop.telemetry import journal
from tests.conftest import Checkpoint
from tests.e2e.conftest import Launch
from tests.e2e.trainer import trainer

PHASES = ["rl.suspend", "rl.receive_weights", "rl.finalize", "rl.resume"]


async def test_one_trace_joins_the_send_the_refit_and_phases_that_tile_each_replica(
    launch: Launch, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with telemetry.configure(tmp_path, role="fleet", level=2, sample=1.0):
        async with launch(replicas=2) as engine:
            with trainer(engine.address, tmp_path) as publisher:
                await publisher.connected()
                few = SamplingParams(max_tokens=3, ignore_eos=True)
                await engine.generate([97], few)
                assert (await publisher.publish(checkpoint("llama", 1), 1))[0] == "committed"
                await engine.generate([97], few)
    read = journal.read(tmp_path)
    (send,) = read.named("rl.send_weights")
    (refit,) = read.named("rl.refit")
    assert send.resource["rl.role"] == "trainer"
    assert refit.resource["rl.role"] == "fleet"
    assert refit.parent == send.span_id
    parts = read.named("rl.refit_replica")
    stages = read.named("rl.stage")
    assert {span.attributes["rl.replica.id"] for span in parts} == {"replica-0", "replica-1"}
    assert {span.parent for span in (*parts, *stages)} == {refit.span_id}
    assert {span.trace_id for span in (send, refit, *parts, *stages)} == {send.trace_id}
    for part in parts:
        phases = sorted(read.children(part), key=lambda span: span.start)
        assert [span.name for span in phases] == PHASES
        assert (phases[0].start, phases[-1].end) == (part.start, part.end)
        assert all(a.end == b.start for a, b in itertools.pairwise(phases))
        assert part.attributes["rl.weight_version"] == 1
    made = sorted(read.named("rl.generate"), key=lambda span: span.start)
    assert [span.attributes["rl.weight_version.last"] for span in made] == [0, 1]
    assert {span.attributes["gen_ai.provider.name"] for span in made} == {"vllm"}
