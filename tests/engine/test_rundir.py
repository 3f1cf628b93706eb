"""Run folders: private, locked while anything of the run lives, cleared when nothing does."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from socket import AF_UNIX, socket

import pytest

from pitstop.engine.errors import LocalError
from pitstop.engine.rundir import RunDir, base, clear_dead, note_file

CHILD = """
import os, sys, time
from pathlib import Path
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pitstop.engine.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
segment = SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
run.note_shared_memory([os.getpid()])
if sys.argv[2] == "fork" and os.fork():
    os._exit(0)
print(run.path, segment.name, os.getpid(), flush=True)
time.sleep(60)
"""


def start(root: Path, how: str = "plain") -> tuple[subprocess.Popen[str], Path, str, int]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(root), how], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    path, segment, pid = child.stdout.readline().split()
    return child, Path(path), segment, int(pid)


def kill(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([pidfd], [], [], 10)
    os.close(pidfd)


def test_a_folder_is_private_and_goes_with_its_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs")
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert clear_dead(tmp_path / "runs") == []
    run.close()
    run.close()
    assert not run.path.exists()


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_run_is_not_where_a_sockets_path_would_be_too_long(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + letter * 20)
    assert base() == Path("/" + letter * 20, f"pitstop-{os.getuid()}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + letter * 50 if letter == "é" else "/" + letter * 70)
    assert base() == Path("/tmp", f"pitstop-{os.getuid()}")


def test_what_a_killed_run_left_is_cleared_by_the_next_start_and_living_runs_are_not_touched(tmp_path: Path) -> None:
    child, path, segment, pid = start(tmp_path)
    living = RunDir(tmp_path)
    assert path.exists()
    assert Path("/dev/shm", segment).exists()
    kill(pid)
    child.wait()
    assert path.exists()
    after = RunDir(tmp_path)
    assert not path.exists()
    assert not Path("/dev/shm", segment).exists()
    assert living.path.exists()
    for run in (living, after):
        run.close()
    assert child.stdout is not None
    child.stdout.close()


def test_a_run_whose_parent_is_dead_but_whose_child_lives_is_alive(tmp_path: Path) -> None:
    parent, path, segment, pid = start(tmp_path, "fork")
    parent.wait()
    assert clear_dead(tmp_path) == []
    kill(pid)
    assert clear_dead(tmp_path) == [path.name]
    assert not Path("/dev/shm", segment).exists()
    assert parent.stdout is not None
    parent.stdout.close()


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(LocalError, match="not a private folder"):
        RunDir(tmp_path / "open")


def test_a_note_cannot_name_anything_outside_shared_memory(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("x")
    keep = SharedMemory(create=True, size=16)
    run = RunDir(tmp_path / "runs")
    dead = tmp_path / "runs" / "dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "shm").write_text(f"../../{victim}\n/etc/hostname\n")
    assert clear_dead(tmp_path / "runs") == ["dead"]
    assert victim.exists()
    run.close()
    keep.close()
    keep.unlink()


def vllm_file(folder: Path, n: int) -> Path:
    made = folder / f"vllm_dist_{n:032x}"
    made.write_text("x")
    return made


def test_a_sweep_removes_sockets_that_nobody_has_any_more_and_no_other(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs")
    with socket(AF_UNIX) as gone, socket(AF_UNIX) as there:
        gone.bind(str(run.path / "gone"))
        there.bind(str(run.path / "there"))
        gone.close()
        (run.path / "keys").write_text("not a socket")
        run.sweep()
        assert {path.name for path in run.path.iterdir()} == {"lock", "there", "keys"}
    run.close()


def test_a_sweep_bears_what_others_have_bound_and_a_folder_that_is_gone(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "my runs")
    with socket(AF_UNIX) as odd, socket(AF_UNIX) as broken, socket(AF_UNIX) as there, socket(AF_UNIX) as gone:
        odd.bind(b"\0\xff\xfe" + os.urandom(8))
        broken.bind(b"\0a\n\nb" + os.urandom(8))
        there.bind(str(run.path / "there"))
        gone.bind(str(run.path / "gone"))
        gone.close()
        run.sweep()
        assert {path.name for path in run.path.iterdir()} == {"lock", "there"}
    shutil.rmtree(run.path)
    run.sweep()
    run.close()


def test_a_process_that_was_forked_does_not_take_the_folder_with_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom pitstop.engine.rundir import RunDir\n"
        "run = RunDir(Path(sys.argv[1]))\npid = os.fork()\n"
        "if pid == 0: sys.exit()\nos.waitpid(pid, 0)\nprint(run.path.is_dir())"
    )
    told = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True"]
    assert [path.name for path in tmp_path.iterdir()] == [run.path.name]
    run.close()


def test_files_that_a_process_has_left_outside_go_when_it_is_gone(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs")
    (tmp_path / "my files").mkdir()
    mine, its = vllm_file(tmp_path, 1), vllm_file(tmp_path / "my files", 2)
    note_file(run.path, str(mine))
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        (run.path / f"left-{child.pid}").write_text(str(its))
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        # It has ended, and nobody has reaped it.
        run.sweep()
        assert not its.exists()
    run.sweep()
    assert mine.exists()
    run.close()
    assert not mine.exists()


def test_what_a_killed_run_noted_outside_its_folder_goes_with_it_if_vllm_makes_such_files(tmp_path: Path) -> None:
    dead = tmp_path / "runs" / "dead"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    victim, linked, its = tmp_path / "victim", tmp_path / f"vllm_dist_{3:032x}", vllm_file(tmp_path, 4)
    victim.write_text("x")
    linked.symlink_to(victim)
    (dead / "left-1").write_text(f"{victim}\n{linked}\n{its}\n{tmp_path / 'nothing'}\n")
    assert clear_dead(tmp_path / "runs") == ["dead"]
    assert not its.exists()
    assert victim.exists()
    assert linked.exists()
