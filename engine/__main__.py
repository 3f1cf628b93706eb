"""The command line: `pitstop demo`, `pitstop --version`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    parser = argparse.ArgumentParser(prog="pitstop", description="Async rollout engine for RL post-training")
    parser.add_argument("--version", action="version", version=f"pitstop {version('pitstop')}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", add_help=False, help="train a small model with GRPO while real vLLM replicas stream rollouts"
    )
    demo.add_argument("options", nargs=argparse.REMAINDER)
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["demo"]:
        from pitstop.engine.demo import run

        return run(given[1:])
    parser.parse_args(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
