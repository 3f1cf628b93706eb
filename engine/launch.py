"""The composition root: what an engine is made of. The only place that names adapters, transports and telemetry."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import logging
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pitstop.engine.coordinator import Again, Delivery
from pitstop.engine.errors import DeadlineExceeded, LocalError, PitstopError, UnsupportedPolicy, hint, names, near
from pitstop.engine.fleet import Fleet
from pitstop.engine.handle import RefitHandle
from pitstop.engine.ports import Backend, Observer, Renderer, Scalar, Sending, default_observer
from pitstop.engine.recovery import Origin, Recovery
from pitstop.engine.refit import Deadlines, Policy, RefitOptions
from pitstop.engine.rundir import RunDir
from pitstop.engine.worker_ports import Mode

if TYPE_CHECKING:
    from torch import Tensor

    from pitstop.transports.remote import RemoteSending
    from pitstop.transports.room import Buffers
    from pitstop.transports.sources import Publishable

log = logging.getLogger("pitstop.engine")

BACKENDS = ("vllm",)
_OPTIONS: Final = ("start_method", "stat_loggers")
"""What a launch hands on to the constructor of its backend."""


class RolloutEngine(Fleet):
    """Generation replicas of one model, with streams, refits and a control link for trainers.

    async with RolloutEngine.launch("path/or/hub-id", replicas=2) as engine:
        async for index, completion in engine.generate_async(prompts, SamplingParams(max_tokens=64)):
            ...
        report = await engine.refit(model.named_parameters(), weight_version=1, cast="inventory")
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        *,
        renderer: Renderer | None = None,
        observer: Observer | None = None,
        policy: Policy = "recompute",
        mode: Mode = "auto",
        labels: Mapping[str, Scalar] | None = None,
        listen: str | None = None,
        keys: str | os.PathLike[str] | None = None,
        recovery: Recovery | None = None,
        checkpoint: tuple[Path, int] | None = None,
        buffers: Buffers | None = None,
        boot_seconds: float | None = None,
    ) -> None:
        """`checkpoint`: the folder that the backends boot from, and the version it holds."""
        from pitstop.telemetry.context import capture
        from pitstop.transports.control import ControlLink
        from pitstop.transports.shared_memory import SharedMemoryTransport

        self._run_dir = RunDir()
        self._noted: set[tuple[str, int | None]] = set()
        self._defaults = RefitOptions(policy=policy, mode=mode)
        link = ControlLink(
            f"ipc://{self._run_dir.path}/control.sock",
            run_id=uuid.uuid4().hex,
            on_offer=self._offered,
            weight_version=lambda: self.weight_version,
            tensors=self._inventory_size,
            listen=listen,
            keys=None if keys is None else Path(keys),
        )
        self._link = link
        super().__init__(
            backends,
            SharedMemoryTransport(link, buffers),
            observer or default_observer(),
            renderer=renderer,
            services=[link.run],
            context=capture,
            labels=labels,
            recovery=recovery,
            boot_seconds=boot_seconds,
        )
        self._adapters.discard = lambda adapter: shutil.rmtree(adapter.path, ignore_errors=True)
        self._booted_from = checkpoint
        self._booted_files: tuple[object, ...] | None = None

    @classmethod
    def launch(
        cls,
        model: str | os.PathLike[str],
        *,
        backend: Literal["vllm"] = "vllm",
        replicas: int = 1,
        weight_version: int = 0,
        engine_args: Mapping[str, Any] | None = None,
        policy: Policy = "recompute",
        mode: Mode = "auto",
        on_replica_loss: Literal["error"] = "error",
        recovery: Literal["manual", "automatic"] | Recovery = "manual",
        buffers: Buffers | None = None,
        observer: Observer | None = None,
        listen: str | None = None,
        keys: str | os.PathLike[str] | None = None,
        devices: Sequence[Sequence[int | str]] | None = None,
        drafter: Literal["trained", "frozen"] | None = None,
        boot_seconds: float = 600.0,
        **backend_options: Any,
    ) -> RolloutEngine:
        """Describe an engine; `async with` boots it.

        Args:
            model: folder of a Hugging Face checkpoint, or a hub id.
            backend: "vllm", the only one yet.
            replicas: engines, each with processes of its own.
            weight_version: the version that the checkpoint holds.
            engine_args: the backend's own arguments (vLLM's engine arguments), for every replica.
            policy: what a refit does to requests in flight unless it says otherwise (`RefitOptions`).
            mode: where a refit is received unless it says otherwise: "staged" in spare memory, "in_place" in the
                live parameters of suspended replicas, "auto" as memory allows.
            on_replica_loss: requests on a replica that is lost end with its error, keeping their tokens.
            recovery: replicas that are lost come back when `recover()` is called ("manual"), or by themselves
                ("automatic", or a `Recovery` that says how often and how fast); requests that no replica can take
                wait meanwhile.
            buffers: memory that refits may use on their way (`pitstop.transports.Buffers`); by default what there is.
            observer: is told what happens; by default what `pitstop.telemetry.configure` installed.
            listen: `tcp://<host>:<port>` lets trainers connect there too (`tcp_address`); port 0 is any, no host the
                loopback. Everything on it is encrypted, and only who can read the run's `client.key` gets in.
            keys: folder where the keys of `listen` lie or are made, so that they outlive this engine; by default its
                own private folder, and they end with it.
            devices: GPUs of each replica, as in `CUDA_VISIBLE_DEVICES`, one a rank; several replicas may share one. By
                default each has its own of those that are visible.
            drafter: with vLLM's `speculative_config`, where the drafter's weights come from: "trained", from every
                refit; "frozen", from its checkpoint. By default a drafter that is a part of the model's checkpoint
                (MTP) is trained, and one with its own (Eagle3, a small model) is not.
            boot_seconds: limit for each start of a replica, restarts and recoveries included: longer for a model that
                takes longer to load or to compile (vLLM's own limit is `VLLM_ENGINE_READY_TIMEOUT_S`).
            backend_options: `start_method` and `stat_loggers` of the backend, for tests and measurements.

        Raises:
            UnsupportedPolicy: there is no such option, or it has no such value.
        """
        if backend not in BACKENDS:
            raise UnsupportedPolicy(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
        if on_replica_loss != "error":
            raise UnsupportedPolicy(f"on_replica_loss {on_replica_loss!r} is not 'error'")
        if recovery not in ("manual", "automatic") and not isinstance(recovery, Recovery):
            raise UnsupportedPolicy(f"recovery {recovery!r} is neither 'manual', 'automatic' nor a Recovery")
        if drafter not in (None, "trained", "frozen"):
            raise UnsupportedPolicy(f"drafter {drafter!r} is not one of trained, frozen")
        if type(replicas) is not int or replicas < 1:
            raise UnsupportedPolicy(f"replicas is {replicas!r}, not a number from 1 on")
        _known(backend_options, list(inspect.signature(cls.launch).parameters))
        _seated(devices, replicas)
        from pitstop.engine.vllm_backend import Seat, TokenizerRenderer, VllmBackend
        from pitstop.transports.shared_memory import RECEIVERS

        args = dict(engine_args or {})
        seats = [Seat(n, replicas, tuple(map(str, devices[n])) if devices else None) for n in range(replicas)]
        given = {"receivers": RECEIVERS, "drafter": drafter, **backend_options}
        made = [
            VllmBackend(str(model), engine_args=args, weight_version=weight_version, seat=seat, **given)
            for seat in seats
        ]
        renderer = None
        if not args.get("skip_tokenizer_init"):
            renderer = TokenizerRenderer(
                str(args.get("tokenizer") or model),
                revision=args.get("tokenizer_revision"),
                trust_remote_code=bool(args.get("trust_remote_code")),
            )
        labels = {"model": Path(model).name, "provider": backend}
        return cls(
            made, renderer=renderer, observer=observer, policy=policy, mode=mode, labels=labels,
            listen=listen, keys=keys, buffers=buffers, boot_seconds=boot_seconds,
            recovery=recovery if isinstance(recovery, Recovery) else Recovery() if recovery == "automatic" else None,
            checkpoint=(Path(model), weight_version),
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        self._keeper.origin = await self._origin()
        return await super().__aenter__()

    @property
    def address(self) -> str:
        """Where publishers connect."""
        return self._link.address

    @property
    def tcp_address(self) -> str | None:
        """Where publishers connect by TCP, and which key they need; None before the engine is entered, or not asked."""
        return self._link.tcp_address

    def refit(
        self,
        source: Publishable,
        *,
        weight_version: int,
        cast: Literal["inventory"] | None = None,
        vocabulary: Literal["trim"] | None = None,
        policy: Policy | None = None,
        mode: Mode | None = None,
        deadlines: Mapping[str, float] | Deadlines | None = None,
        headers: Mapping[str, str] | None = None,
        rebase: bool = False,
    ) -> RefitHandle:
        """Bring new weights to every replica; return at once.

        Args:
            source: `model.named_parameters()`, a mapping of names to tensors, a module, or the folder of a
                checkpoint. It must stay unchanged until `handle.sent`.
            weight_version: must be above every version committed before, unless it is a rebase.
            cast: "inventory" casts floating-point tensors to the dtypes of the model's checkpoint.
            vocabulary: "trim" leaves rows of embeddings and heads that the model's checkpoint does not have where they
                are: they are padding. Never done unasked: they might be tokens that the engine does not know.
            policy: fate of requests in flight (`RefitOptions`); the engine's by default.
            mode: where it is received (`RefitOptions`); the engine's by default.
            deadlines: limits in seconds that differ from `Deadlines`' defaults.
            headers: W3C trace context to work under; by default the caller's current span.
            rebase: the trainer has begun its count of versions anew, with this one; later ones are counted from it.

        Returns:
            A handle; awaiting it gives the report, or raises what kept every replica from the version
            (`OfferRejected` and its kinds before anything was suspended, `DigestMismatch`, `PeerLost`, ...).
        """
        from pitstop.transports.memory_link import checkpoint_sending, memory_sending
        from pitstop.transports.reports import WISHES, judge

        self._must_be_open()
        given = deadlines if isinstance(deadlines, Mapping) else {}
        if isinstance(deadlines, Deadlines):
            given = {name: getattr(deadlines, name) for name in WISHES}
        judge(weight_version, cast, policy, given, vocabulary=vocabulary)
        options = self._options(policy, mode, deadlines, rebase=rebase)
        said = dict(headers) if headers is not None else dict(self._context())
        refit_id = uuid.uuid4().hex
        handle = RefitHandle(refit_id, weight_version)
        again: Again | None = None
        if isinstance(source, str | os.PathLike):
            path = Path(source)
            again = functools.partial(self._checkpoint, path, weight_version, cast, RefitOptions(), vocabulary)

            async def make() -> Sending:
                # In a thread that is left behind with its deadline: a file system that hangs must not hold the engine.
                return await checkpoint_sending(
                    path,
                    seconds=options.deadlines.receive,
                    weight_version=weight_version,
                    cast=cast,
                    vocabulary=vocabulary,
                    headers=said,
                    refit_id=refit_id,
                )
        else:
            # Now, not later: a generator belongs to the caller, and errors in it are the caller's.
            sending = memory_sending(
                source, weight_version=weight_version, cast=cast, vocabulary=vocabulary, headers=said, refit_id=refit_id
            )

            async def make() -> Sending:
                await sending.readable()
                return sending

        return self.offer(make, options, handle, again=again)

    async def refit_adapter(
        self,
        name: str,
        source: Mapping[str, Tensor] | str | os.PathLike[str],
        config: Mapping[str, Any] | None = None,
        *,
        weight_version: int,
        seconds: float = 60.0,
    ) -> None:
        """Bring a version of a LoRA adapter to every replica, beside the weights; nothing is suspended.

        Requests that name it (`generate_async(..., adapter=name)`) run on this version from then on; those that are
        under way end on the one that they began with. No cache entry of one version is used for another.

        Args:
            name: what requests call it.
            source: its tensors, named as PEFT does, or the folder that PEFT saved it in. Unchanged until this returns.
            config: with tensors: what PEFT's `adapter_config.json` holds (`transports.merged_tensors`).
            weight_version: above that of the version which is there.
            seconds: limit for reading the source, and for each replica to load it.

        Raises:
            AdapterRejected, CheckpointUnreadable: it is not an adapter of this model; names the tensor.
            StaleVersion: the version is not above the one that is there.
            UnsupportedPolicy: the engines were launched without `engine_args={"enable_lora": True}`.
            DeadlineExceeded, RemoteError: a replica could not load it. The version before serves on, everywhere.
        """
        from pitstop.transports.adapter_folder import write_adapter
        from pitstop.transports.aside import aside

        self._must_be_open()
        model = self._booted().inventory.tensors

        async def write(folder: str) -> str:
            path = self._run_dir.path / folder
            try:
                async with asyncio.timeout(seconds):
                    await asyncio.wrap_future(aside(lambda: write_adapter(path, source, config, model)))
            except TimeoutError:
                late = f"adapter {name} could not be read within {seconds:g} s"
                raise DeadlineExceeded(late, phase="adapter", seconds=seconds) from None
            except OSError as error:
                raise LocalError(f"adapter {name} could not be written: {error}") from None
            return str(path)

        await self._adapters.bring(name, weight_version, write, seconds)

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter: requests can no longer name it. Those that run on it go on.

        Raises:
            InvalidRequest: there is none of that name.
        """
        self._must_be_open()
        await self._adapters.drop(name)

    def _checkpoint(
        self,
        source: str | os.PathLike[str],
        version: int,
        cast: Literal["inventory"] | None,
        options: RefitOptions,
        vocabulary: Literal["trim"] | None = None,
    ) -> Delivery:
        from pitstop.transports.memory_link import checkpoint_sending
        from pitstop.transports.reports import judge

        judge(version, cast, options.policy, {}, vocabulary=vocabulary)
        files = None
        if self._booted_from is not None and self._booted_files is not None:
            path, first = self._booted_from
            # By name alone: what lies there is compared where it is opened.
            if version == first and os.path.abspath(path) == os.path.abspath(source):
                files = self._booted_files
        refit_id = uuid.uuid4().hex
        make = functools.partial(
            checkpoint_sending, Path(source), seconds=options.deadlines.receive, weight_version=version, cast=cast,
            vocabulary=vocabulary, headers=dict(self._context()), refit_id=refit_id, files=files,
        )  # fmt: skip
        return Delivery(refit_id, version, make, options.rebase, files is not None)

    async def _origin(self) -> Origin | None:
        """Note which files the replicas are about to boot from."""
        from pitstop.transports.memory_link import checkpoint_sending

        if self._booted_from is None:
            return None
        path, version = self._booted_from
        try:
            sending = await checkpoint_sending(path, seconds=Deadlines().control, weight_version=version)
        except PitstopError:
            return None  # a hub id, or something that vLLM alone can read
        self._booted_files = sending.files
        sending.dropped()
        return Origin(version, lambda: self._checkpoint(path, version, None, RefitOptions()))

    async def aclose(self) -> None:
        """End every request with an error, every replica and every process. Idempotent, bounded."""
        try:
            await super().aclose()
        finally:
            self._run_dir.close()

    def _options(
        self,
        policy: str | None,
        mode: str | None,
        deadlines: Mapping[str, float] | Deadlines | None,
        *,
        rebase: bool,
    ) -> RefitOptions:
        limits = deadlines if isinstance(deadlines, Deadlines) else Deadlines()
        if isinstance(deadlines, Mapping):
            if unknown := set(deadlines) - set(Deadlines.__dataclass_fields__):
                raise UnsupportedPolicy(f"no deadlines are named {names(list(unknown))}")
            limits = replace(limits, **deadlines)
        policy, mode = policy or self._defaults.policy, mode or self._defaults.mode
        return RefitOptions(policy=policy, mode=mode, deadlines=limits, rebase=rebase)  # type: ignore[arg-type]

    def _offered(self, sending: RemoteSending) -> None:
        self._must_be_open()
        options = self._options(sending.policy, sending.mode, sending.deadlines, rebase=sending.rebase)

        async def make() -> Sending:
            return sending

        offer = sending.offer
        self.offer(make, options, RefitHandle(offer.refit_id, offer.weight_version))

    async def _ready(self) -> None:
        from pitstop.transports.digest import prepare

        await super()._ready()
        # What booting has made stays. A collector that looked through all of it, while a refit makes tens of thousands
        # of records, would stop the loop for a tenth of a second each time.
        gc.collect()
        gc.freeze()
        # Compiled once a machine and cached on disk: then the first refit waits for it neither here nor in a worker.
        prepare()

    def _changed(self) -> None:
        super()._changed()
        for replica in self.replicas:
            life = (replica.name, replica.booted.pid if replica.booted else None)
            if replica.booted is not None and replica.booted.pid is not None and life not in self._noted:
                self._noted.add(life)
                note = functools.partial(self._run_dir.note_shared_memory, [replica.booted.pid])
                asyncio.get_running_loop().run_in_executor(None, note)

    def _inventory_size(self) -> int:
        return next((len(r.booted.inventory.tensors) for r in self.replicas if r.booted), 0)


def _known(options: Mapping[str, Any], ours: Sequence[str]) -> None:
    """Refuse options of a launch that nobody knows; most are meant for vLLM, or misspelt."""
    if unknown := {name: value for name, value in options.items() if name not in _OPTIONS}:
        close = hint({name: near(name, ours) for name in unknown})
        raise UnsupportedPolicy(
            f"a launch has no options named {names(list(unknown))}; vLLM's own arguments go into "
            f"engine_args={unknown!r}.{close}"
        )


def _seated(devices: Sequence[Sequence[int | str]] | None, replicas: int) -> None:
    """Refuse devices that are not a sequence for each replica."""
    for n, seat in enumerate(devices or ()):
        # Letter by letter, "10" would be two GPUs, neither of them the one that was meant.
        if isinstance(seat, str) or not isinstance(seat, Sequence):
            example = [["0"], ["1"]]
            raise UnsupportedPolicy(f"devices[{n}] is {seat!r}, not a sequence of GPUs: devices={example} is one each")
    if devices is not None and len(devices) != replicas:
        raise UnsupportedPolicy(f"devices are given for {len(devices)} replicas, there are {replicas}")
