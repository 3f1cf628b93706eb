"""What the tests run as a trainer: a process of its own that publishes checkpoints it is told to publish."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio.to_thread

from pitstop.engine.errors import PitstopError


def change(tensors: dict[str, Any], how: str) -> dict[str, Any]:
    """Spoil or disguise a checkpoint's tensors."""
    import torch

    items = list(tensors.items())
    name, tensor = items[len(items) // 2]
    if how == "fp32":
        return {k: v.float() for k, v in items}
    if how == "wrapped":
        disguises = ["_fsdp_wrapped_module.{}", "module.{}", "_orig_mod.{}"]
        return {disguises[n % 3].format(k) if n % 3 else k: v for n, (k, v) in enumerate(items)}
    if how == "missing":
        return {k: v for k, v in items if k != name}
    if how == "renamed":
        return {(f"{k}x" if k == name else k): v for k, v in items}
    if how == "repeated":
        return dict(items) | {f"module.{name}": tensor}
    if how == "shape":
        return dict(items) | {name: torch.zeros(*tensor.shape, 2)}
    if how == "dtype":
        return dict(items) | {name: tensor.to(torch.float64)}
    if how == "shuffled":
        return dict(sorted(items, key=lambda item: hash(item[0])))
    if how == "padded":
        return {
            k: torch.cat([v, v[:64]]) if k.endswith(("embed_tokens.weight", "lm_head.weight")) else v for k, v in items
        }
    if how == "fused":
        return _fused(tensors)
    return tensors


def _fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """Put experts together as transformers does."""
    import torch

    found, experts = {}, dict[str, dict[str, list[Any]]]()
    for name, tensor in tensors.items():
        layer, single, part = name.partition(".experts.")
        if single:
            experts.setdefault(layer, {}).setdefault(part.split(".")[1], []).append(tensor)
        else:
            found[name] = tensor
    for layer, by_role in experts.items():
        gate, up, down = (torch.stack(by_role[f"{role}_proj"]) for role in ("gate", "up", "down"))
        found[f"{layer}.experts.gate_up_proj"], found[f"{layer}.experts.down_proj"] = torch.cat([gate, up], 1), down
    return found


def _serve(link: Connection, address: str, run_dir: str | None) -> None:
    from safetensors.torch import load_file

    from pitstop import telemetry
    from pitstop.transports import Publisher

    with contextlib.ExitStack() as stack:
        if run_dir is not None:
            stack.enter_context(telemetry.configure(run_dir, role="trainer"))
        publisher = stack.enter_context(Publisher.connect(address))
        link.send("connected")
        while (order := link.recv()) is not None:
            path, version, how, options = order
            tensors = change(load_file(f"{path}/model.safetensors"), how)
            what = _stuck(tensors, link) if how == "stuck" else tensors
            try:
                handle = publisher.publish(what, weight_version=version, **options)
                if options.get("policy") != "wait":
                    handle.sent.wait(30)
                report = handle.result(timeout=60)
                link.send((report.outcome.value, report.nbytes, report.transport))
            except PitstopError as error:
                link.send((error.slug, str(error), error.fields))


def _stuck(tensors: dict[str, Any], link: Connection) -> Any:
    """A source that stops for ever at the thirtieth bucket, beating."""
    from pitstop.transports.sources import TensorSource

    class Stuck(TensorSource):
        calls = 0

        def pack(self, slots: Any, into: Any, digests: Any) -> Iterator[int]:
            self.calls += 1
            if self.calls == 30:
                link.send("stuck")
            while self.calls >= 30:
                time.sleep(0.01)
                yield 0
            yield from super().pack(slots, into, digests)

    return Stuck(tensors.items())


class Trainer:
    """A trainer process as the test sees it."""

    def __init__(self, link: Connection, process: multiprocessing.process.BaseProcess) -> None:
        self._link, self.process = link, process

    async def publish(self, path: Path, version: int, how: str = "", **options: Any) -> tuple[Any, ...]:
        self._link.send((str(path), version, how, options))
        return await anyio.to_thread.run_sync(self._link.recv)

    def start(self, path: Path, version: int, how: str = "", **options: Any) -> None:
        self._link.send((str(path), version, how, options))

    async def said(self, seconds: float) -> Any:
        """What it says of itself, within so long."""
        return await anyio.to_thread.run_sync(lambda: self._link.recv() if self._link.poll(seconds) else None)

    async def connected(self) -> None:
        await anyio.to_thread.run_sync(self._link.recv)


@contextlib.contextmanager
def trainer(address: str, run_dir: Path | None = None) -> Iterator[Trainer]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, address, str(run_dir) if run_dir else None), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Trainer(ours, process)
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        process.join(10)
        process.kill()
        process.join()
        process.close()
        ours.close()


Launch = Callable[..., Any]
