"""A process that is forked while its parent loads the kernels can use them, sooner or later. vLLM forks its cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, sys, time
import numpy as np
from pitstop.transports import digest

loading = digest.prepare()
time.sleep(float(sys.argv[1]))
assert not loading.done() or float(sys.argv[1]) > 1
child = os.fork()
source = np.arange(4096, dtype=np.uint16)
address = np.array([source.ctypes.data], np.uint64)
work = digest.Work(digest.CHECK, np.array([2]), address, address, np.array([4096]))
done = sum(work)
assert done == 8192 and int(work.digests[0]) == digest.reference(source.tobytes(), 2)
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit(0)
"""


@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_a_fork_while_kernels_are_compiled_leaves_a_child_that_can_use_them(tmp_path: Path, delay: float) -> None:
    # An empty cache makes the compilation last for seconds.
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, str(delay)], env=environment, timeout=100, check=False
    )
    assert done.returncode == 0
