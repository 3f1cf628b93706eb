"""The run: replicas answer, the trainer learns, and each waits for the other only where staleness demands it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pitstop.engine import RolloutEngine, SamplingParams
from pitstop.engine.demo import messages
from pitstop.engine.demo.buffer import Rollout, RolloutBuffer
from pitstop.engine.demo.child import Trainer
from pitstop.engine.demo.grpo import Answer, Group
from pitstop.engine.demo.options import Options
from pitstop.engine.demo.progress import Progress
from pitstop.engine.demo.task import Problem, prompt_ids
from pitstop.engine.demo.trainer import Training
from pitstop.engine.demo.witness import witness
from pitstop.engine.errors import PitstopError, WorkerFailed

ENVIRONMENT: Final = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # Every replica may use every core: which of them is idle changes from one second to the next.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The first request would compile for seconds, which so short a run does not earn back.
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    # More threads run than cores: spinning at a barrier would take the core from the one that is waited for.
    "OMP_WAIT_POLICY": "PASSIVE",
}
FAILURES: Final = 3
ENGINE_ARGS: Final[dict[str, Any]] = {
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 128,
    # The smallest that vLLM has on a CPU; a prompt shorter than a block would be computed for each of its answers.
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
    # The worker in the engine core's own process: half the memory, and seconds less to start.
    "distributed_executor_backend": "pitstop.engine.vllm_backend.executor.InCoreExecutor",
}


def prepare_environment() -> None:
    """Set what torch and vLLM read when they are first imported, here and in children, unless the user has."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


async def train(options: Options, checkpoint: Path, progress: Progress) -> None:
    """Run the demo to its end.

    Raises:
        PitstopError: an engine, the trainer, or every refit failed.
    """
    training = Training(checkpoint, options.run_dir, options.hyper, options.seed, threads=os.cpu_count() or 1)
    engine = RolloutEngine.launch(checkpoint, backend="vllm", replicas=options.replicas, engine_args=ENGINE_ARGS)
    progress.stage = f"starting {options.fleet} and the trainer"
    async with Trainer(training) as trainer, engine:
        run = Run(options, engine, trainer, progress, await asyncio.to_thread(_tokenizer, checkpoint))
        await run.whole()


def _tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


class Run:
    """One run, from the first rollout to the last refit."""

    def __init__(
        self, options: Options, engine: RolloutEngine, trainer: Trainer, progress: Progress, tokenizer: Any
    ) -> None:
        self._options, self._engine, self._trainer = options, engine, trainer
        self._progress, self._tokenizer = progress, tokenizer
        self._task = options.task
        self._buffer = RolloutBuffer(options.groups, options.max_staleness, total=options.steps * options.groups)
        self._params = SamplingParams(max_tokens=self._task.max_tokens, temperature=1.0, stop=self._task.stop)
        self._changed = asyncio.Condition()
        self._failures = 0

    async def whole(self) -> None:
        """Examine, train, examine again."""
        progress = self._progress
        progress.stage = "examining the model as it came"
        progress.before = await self._examine()
        progress.stage = "waiting for the trainer"
        await self._trainer.hear(messages.Ready)
        await self._trainer.tell(messages.Attend(self._engine.address))
        progress.stage = "training"
        try:
            async with asyncio.TaskGroup() as group:
                rolling = group.create_task(self._roll(group))
                refits = group.create_task(self._follow_refits())
                await self._learn(group)
                rolling.cancel()
                await refits
        except BaseExceptionGroup as failed:
            raise _cause(failed) from None
        progress.stage = "examining the trained model"
        progress.after = await self._examine()
        await self._trainer.tell(messages.Stop())
        progress.stage = "ending the replicas"

    async def _roll(self, group: asyncio.TaskGroup) -> None:
        """Start a group of answers whenever there is room for one."""
        number = 0
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._buffer.room(self._version))
            self._buffer.started()
            group.create_task(self._answer(self._task.problem(self._options.seed, number)))
            number += 1

    async def _answer(self, problem: Problem) -> None:
        prompts = [prompt_ids(self._tokenizer, problem)] * self._options.answers
        answers: list[Answer] = []
        texts: list[str] = []
        versions: list[int] = []
        failure: PitstopError | None = None
        crossed = 0
        async for _, completion in self._engine.generate_async(prompts, self._params):
            failure = completion.error or failure
            if completion.error is None and completion.token_ids:
                finished = completion.finish_reason == "stop"
                reward = self._task.score(problem, completion.text, finished=finished)
                answers.append(Answer(list(completion.token_ids), list(completion.logprobs), reward))
                texts.append(completion.text)
                versions += [span.weight_version for span in completion.spans]
                crossed += len(completion.spans) > 1
        async with self._changed:
            if failure is not None or not answers:
                self._failed(failure)
            else:
                self._failures = 0
                rollout = Rollout(Group(prompts[0], answers), min(versions), tuple(texts), crossed)
                self._buffer.finished(rollout)
                self._progress.generated(rollout)
                self._progress.sample = f"{problem.question}  {problem.lead}{texts[0]!r}"
            self._changed.notify_all()

    def _failed(self, failure: PitstopError | None) -> None:
        self._buffer.failed()
        self._failures += 1
        # One replica's death ends what it had in hand, and the others go on; when all fail, nothing gets better.
        if failure is not None and self._failures >= FAILURES * self._options.groups:
            raise failure

    @property
    def _version(self) -> int:
        return self._engine.weight_version or 0

    async def _learn(self, group: asyncio.TaskGroup) -> None:
        for step in range(self._options.steps):
            batch = await self._batch(step)
            await self._trainer.tell(messages.Batch(step + 1, [_record(rollout.group) for rollout in batch]))
            self._progress.learned(await self._trainer.hear(messages.Trained), batch)
            # The refit begins now.
            group.create_task(self._witness())
            self._progress.write(self._options.run_dir)

    async def _witness(self) -> None:
        try:
            self._progress.saw(await witness(self._engine, self._tokenizer))
        except PitstopError:
            # A replica that died took it along. Whether the run can go on is for the rollouts to find out.
            self._progress.broken += 1

    async def _batch(self, version: int) -> list[Rollout]:
        async with self._changed:
            while (batch := self._buffer.take(version)) is None:
                self._progress.stale = self._buffer.stale
                self._changed.notify_all()
                await self._changed.wait()
            self._changed.notify_all()
            return batch

    async def _follow_refits(self) -> None:
        """Let rollouts start under each new version; ends with the last step's refit."""
        for _ in range(self._options.steps):
            refit = await self._trainer.hear(messages.Refitted)
            self._progress.refitted(refit)
            if refit.outcome not in ("committed", "partial"):
                raise WorkerFailed(f"the refit to version {refit.weight_version} was {refit.outcome}")
            async with self._changed:
                self._changed.notify_all()

    async def _examine(self) -> float:
        """Return the mean score of greedy answers."""
        problems: Sequence[Problem] = self._task.examination()
        params = SamplingParams(max_tokens=self._task.max_tokens, temperature=0.0, stop=self._task.stop, logprobs=False)
        prompts = [prompt_ids(self._tokenizer, problem) for problem in problems]
        total = 0.0
        async with contextlib.aclosing(self._engine.generate_async(prompts, params)) as completions:
            async for index, completion in completions:
                if completion.error is not None:
                    raise completion.error
                finished = completion.finish_reason == "stop"
                total += self._task.score(problems[index], completion.text, finished=finished)
        return total / len(problems)


def _cause(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first of our own errors: what follows is what it did to the other tasks."""
    ours: BaseException | None = failed.subgroup(PitstopError)
    while isinstance(ours, BaseExceptionGroup):
        ours = ours.exceptions[0]
    return ours or failed


def _record(group: Group) -> messages.GroupRecord:
    return messages.GroupRecord(
        list(group.prompt),
        [
            messages.AnswerRecord(list(answer.token_ids), list(answer.logprobs), answer.reward)
            for answer in group.answers
        ],
    )
