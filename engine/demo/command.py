"""`pitstop demo`: what is needed, the run, and a tidy end however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from pitstop.engine.demo.models import SMOLLM2, prepare_model
from pitstop.engine.demo.options import Options, parse
from pitstop.engine.errors import PitstopError
from pitstop.engine.rundir import RunDir

if TYPE_CHECKING:
    from pitstop.engine.demo.progress import Progress
    from pitstop.engine.demo.view import View

NEEDED: Final = ("rich", "torch", "transformers", "safetensors", "vllm")
LOG: Final = "engine.log"
INTERRUPTED: Final = 130
TICK_SECONDS: Final = 0.25
LONGEST_FOLDER: Final = 60
"""A socket's path has 107 characters at most, and vLLM's are named by 36 of them."""


def main(argv: Sequence[str]) -> int:
    """Run the demo; return the exit status."""
    options = parse(argv)
    needed = (*NEEDED, "gguf") if options.model == SMOLLM2 else NEEDED
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        print(f"pitstop demo needs {', '.join(missing)}. `make demo` in the repository installs all it needs.",
              file=sys.stderr)  # fmt: skip
        return 1
    from pitstop.engine.demo.loop import prepare_environment

    prepare_environment()
    try:
        options.run_dir.mkdir(parents=True, exist_ok=True)
        with _scratch(), _quiet(options.run_dir / LOG) as (out, err):
            return _shown(options, out, err)
    except OSError as error:
        print(f"pitstop demo: {error}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _scratch() -> Iterator[None]:
    """Have this run's temporary files, and its children's, in one folder that goes when the run does.

    vLLM's engines are ended by SIGKILL, which leaves their sockets. What a SIGKILL of ourselves leaves is cleared by
    the next start.
    """
    folder = RunDir()
    before = os.environ.get("TMPDIR")
    try:
        if len(str(folder.path)) <= LONGEST_FOLDER:
            os.environ["TMPDIR"] = str(folder.path)
            # It remembers.
            tempfile.tempdir = None
        yield
    finally:
        os.environ.pop("TMPDIR", None)
        if before is not None:
            os.environ["TMPDIR"] = before
        tempfile.tempdir = None
        folder.close()


@contextlib.contextmanager
def _quiet(log: Path) -> Iterator[tuple[IO[str], IO[str]]]:
    """Send what this process and its children print into a file; yield the real stdout and stderr.

    By descriptor: engine processes write to what they inherit, across the picture.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with open(kept[0], "w", closefd=False) as out, open(kept[1], "w", closefd=False) as err:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.close(file)
        try:
            yield out, err
        finally:
            out.flush()
            err.flush()
            for descriptor, real in zip((1, 2), kept, strict=True):
                os.dup2(real, descriptor)
                os.close(real)


def _shown(options: Options, out: IO[str], err: IO[str]) -> int:
    from rich.console import Console

    from pitstop.engine.demo.progress import Progress
    from pitstop.engine.demo.view import View
    from pitstop.telemetry import configure
    from pitstop.telemetry.live import Live as Replicas

    console, errors = Console(file=out), Console(file=err)
    progress, replicas = Progress(options.steps), Replicas()
    view = View(console, options, progress, replicas)
    log = options.run_dir / LOG
    try:
        with configure(options.run_dir, role="fleet") as telemetry:
            telemetry.add(replicas)
            with view.live():
                asyncio.run(_run(options, progress, view))
    except KeyboardInterrupt:
        view.closing()
        errors.print("Interrupted; every process was ended.")
        return INTERRUPTED
    except PitstopError as error:
        view.closing()
        errors.print(f"pitstop demo failed: {error}", markup=False, soft_wrap=True)
        errors.print(f"Details are in {log}", highlight=False, soft_wrap=True)
        print(getattr(error, "remote_traceback", ""), file=sys.stderr)
        return 1
    view.tick()
    view.closing()
    return 0


async def _run(options: Options, progress: Progress, view: View) -> None:
    from pitstop.engine.demo.loop import train

    async def ticking() -> None:
        while True:
            view.tick()
            await asyncio.sleep(TICK_SECONDS)

    ticks = asyncio.create_task(ticking())
    try:
        progress.stage = f"preparing {options.model}"
        view.tick()
        checkpoint = await asyncio.to_thread(prepare_model, options.model)
        await train(options, checkpoint, progress)
    finally:
        ticks.cancel()
        progress.ended = time.monotonic()
        progress.write(options.run_dir)
