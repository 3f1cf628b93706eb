"""Lent and borrowed memory against a CUDA runtime that is a few lines of C over malloc."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from ctypes import CDLL, c_int, c_ubyte, memmove
from pathlib import Path
from shutil import which

import pytest
import torch

from pitstop.engine.errors import LocalError, PeerLost, WorkerFailed
from pitstop.engine.worker_ports import Ticket
from pitstop.transports import cuda_memory
from pitstop.transports.cuda_memory import (
    BorrowedRing,
    LentRing,
    borrow,
    device_id,
    device_of,
    forget,
    locked,
    over,
)
from pitstop.transports.spare import Spare

GPU = torch.device("cuda", 1)
FAKE = r"""
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned char bytes[64]; } Handle;
int device = 0, fail_malloc = 0, fail_open = 0, fail_close = 0, lent = 0, open_now = 0, cleared = 0, used_on = -1;
int locked = 0;
int cudaGetLastError(void) { cleared++; return 0; }
const char *cudaGetErrorString(int code) { return code == 2 ? "out of memory" : "something else"; }
int cudaMalloc(void **at, size_t n) {
    if (fail_malloc) return fail_malloc;
    used_on = device; lent++; *at = malloc(n); return 0;
}
int cudaFree(void *at) { free(at); lent--; return 0; }
int cudaIpcGetMemHandle(Handle *to, void *at) {
    memset(to, 0, 64); memcpy(to->bytes + 7, &at, sizeof at); to->bytes[63] = 77; return 0;
}
int cudaIpcOpenMemHandle(void **at, Handle from, unsigned flags) {
    if (fail_open) return fail_open;
    if (from.bytes[63] != 77 || flags != 1) return 400;
    memcpy(at, from.bytes + 7, sizeof *at); open_now++; used_on = device; return 0;
}
int cudaIpcCloseMemHandle(void *at) { open_now--; return fail_close; }
int cudaHostAlloc(void **at, size_t n, unsigned flags) {
    if (fail_malloc) return fail_malloc;
    used_on = device; locked++; *at = malloc(n); return flags == 1 ? 0 : 1;
}
int cudaFreeHost(void *at) { free(at); locked--; return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = which("cc") or which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("cudart")
    (folder / "fake.c").write_text(FAKE)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", folder / "libcudart.so.0", folder / "fake.c"], check=True, cwd=folder
    )
    return folder / "libcudart.so.0"


@pytest.fixture
def cuda(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CDLL]:
    fake = CDLL(str(library))
    for name in ("device", "fail_malloc", "fail_open", "fail_close", "lent", "open_now", "cleared", "locked"):
        c_int.in_dll(fake, name).value = 0
    cuda_memory._runtime.cache_clear()
    monkeypatch.setattr(cuda_memory, "_found", lambda: str(library))

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        put(fake, "device", device.index)
        try:
            yield
        finally:
            put(fake, "device", 0)

    monkeypatch.setattr(torch.cuda, "device", current)
    yield fake
    forget("engine")
    gc.collect()
    assert [value(fake, name) for name in ("lent", "locked", "open_now", "device")] == [0, 0, 0, 0]
    cuda_memory._runtime.cache_clear()


def value(fake: CDLL, name: str) -> int:
    return c_int.in_dll(fake, name).value


def put(fake: CDLL, name: str, number: int) -> None:
    c_int.in_dll(fake, name).value = number


def test_what_is_lent_is_borrowed_on_its_device(cuda: CDLL) -> None:
    lent = LentRing(GPU, 4096)
    assert (value(cuda, "used_on"), len(lent.handle), lent.handle[63]) == (1, 64, 77)
    borrowed = BorrowedRing(GPU, lent.handle, 4096)
    assert borrowed.address == lent.address
    assert not borrowed.closed
    borrowed.close()
    borrowed.close()
    assert borrowed.closed
    lent.close()
    lent.close()
    assert (value(cuda, "lent"), value(cuda, "open_now")) == (0, 0)


def test_a_ring_that_nothing_refers_to_is_let_go(cuda: CDLL) -> None:
    lent = LentRing(GPU, 4096)
    borrowed = BorrowedRing(GPU, lent.handle, 4096)
    assert (value(cuda, "lent"), value(cuda, "open_now")) == (1, 1)
    del lent, borrowed
    gc.collect()
    assert (value(cuda, "lent"), value(cuda, "open_now")) == (0, 0)


def test_a_ring_is_borrowed_once_and_kept_until_another_one_comes(cuda: CDLL) -> None:
    first, second = LentRing(GPU, 4096), LentRing(GPU, 4096)
    ring = borrow("engine", GPU, first.handle, 4096)
    assert borrow("engine", GPU, first.handle, 4096) is ring
    assert value(cuda, "open_now") == 1
    other = borrow("engine", GPU, second.handle, 4096)
    # Somebody may still be reading from the old one.
    assert (ring.closed, value(cuda, "open_now")) == (False, 2)
    del ring
    assert value(cuda, "open_now") == 1
    anew = borrow("engine", GPU, second.handle, 4096, fresh=True)
    assert anew is not other
    anew.close()
    assert borrow("engine", GPU, second.handle, 4096) is not anew
    del other, anew
    forget("engine")
    assert value(cuda, "open_now") == 0


def test_errors_say_what_happened_and_leave_nothing_for_torch_to_find(cuda: CDLL) -> None:
    lent = LentRing(GPU, 4096)
    put(cuda, "fail_malloc", 2)
    with pytest.raises(WorkerFailed, match=r"out of memory, 2\): 3 MiB .* fewer or smaller slots") as caught:
        LentRing(GPU, 3 << 20)
    assert caught.value.fields["operation"] == "cudaMalloc"
    with pytest.raises(PeerLost, match="died or let go"):
        BorrowedRing(GPU, bytes(64), 4096)
    put(cuda, "fail_open", 999)
    with pytest.raises(WorkerFailed, match="namespaces"):
        BorrowedRing(GPU, lent.handle, 4096)
    assert value(cuda, "cleared") == 3
    with pytest.raises(LocalError, match="64 bytes, not 3"):
        BorrowedRing(GPU, b"abc", 4096)


def test_locked_memory_lives_as_long_as_any_view_of_it(cuda: CDLL) -> None:
    memory = locked(GPU, 4096)
    assert (value(cuda, "locked"), value(cuda, "used_on"), memory.nbytes, memory.device.type) == (1, 1, 4096, "cpu")
    view = memory[512:1024].view(torch.bfloat16)
    del memory
    gc.collect()
    assert value(cuda, "locked") == 1
    view.fill_(1.0)
    del view
    gc.collect()
    assert value(cuda, "locked") == 0


def test_where_no_memory_can_be_locked_versions_wait_in_ordinary_memory_and_the_log_says_so(
    cuda: CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    put(cuda, "fail_malloc", 2)
    with pytest.raises(WorkerFailed, match="no 3 MiB of page-locked memory"):
        locked(GPU, 3 << 20)
    with caplog.at_level(logging.WARNING):
        memory = Spare().take(3 << 20, GPU)
    assert (memory.nbytes, memory.device.type) == (3 << 20, "cpu")
    assert "copies take longer" in caplog.text


def test_locked_memory_is_kept_for_the_next_version_and_ordinary_memory_is_not_taken_for_it(cuda: CDLL) -> None:
    spare, ticket = Spare(), Ticket("r", "r0", 1, 0, "", "", 0, (), "", "", 1.0, 1.0)
    spare.free(ticket, spare.take(4096), None)
    memory = spare.take(4096, GPU)
    assert value(cuda, "locked") == 1
    address = memory.data_ptr()
    spare.free(ticket, memory, GPU)
    assert spare.take(2048, GPU).data_ptr() == address
    spare.free(ticket, memory, GPU)
    del memory
    larger = spare.take(8192, GPU)  # the old one is let go of before there is another
    gc.collect()
    assert (value(cuda, "locked"), larger.nbytes) == (1, 8192)
    spare.free(ticket, larger, GPU)
    del larger
    spare.drop()
    gc.collect()
    assert value(cuda, "locked") == 0


def test_a_close_that_fails_is_said_and_not_raised(cuda: CDLL, caplog: pytest.LogCaptureFixture) -> None:
    lent = LentRing(GPU, 4096)
    borrowed = BorrowedRing(GPU, lent.handle, 4096)
    put(cuda, "fail_close", 4)
    with caplog.at_level(logging.WARNING):
        borrowed.close()
    assert "cudaIpcCloseMemHandle failed" in caplog.text


def test_a_forked_child_calls_nothing(cuda: CDLL) -> None:
    lent = LentRing(GPU, 4096)
    kept = borrow("engine", GPU, lent.handle, 4096)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            lent.close()
            kept.close()
            forget("engine")
            code = (value(cuda, "lent"), value(cuda, "open_now")) != (1, 1)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_without_a_runtime_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_memory._runtime.cache_clear()
    monkeypatch.setattr(cuda_memory, "_found", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    with pytest.raises(WorkerFailed, match="built for CUDA"):
        LentRing(GPU, 4096)


def test_a_gpu_goes_by_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        def __init__(self, device: torch.device) -> None:
            self.uuid = f"0000-{device.index}"

    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of(device_id(GPU)) == GPU
    with pytest.raises(LocalError, match=r"cuda:0000-7 is not among .* cuda:0000-0, cuda:0000-1"):
        device_of("cuda:0000-7")


def test_a_view_of_an_address_keeps_its_owner() -> None:
    class Owner:
        def __init__(self) -> None:
            self.block = (c_ubyte * 64)()

        def __del__(self) -> None:
            gone.append(self)

    gone: list[object] = []
    owner = Owner()
    address = torch.frombuffer(owner.block, dtype=torch.uint8).data_ptr()
    tensor = over(address, 64, torch.device("cpu"), owner)
    memmove(address, b"abc", 3)
    assert bytes(tensor[:3].tolist()) == b"abc"
    del owner
    gc.collect()
    assert gone == []
    del tensor
    gc.collect()
    assert len(gone) == 1
    assert over(0, 0, torch.device("cpu"), None).numel() == 0
