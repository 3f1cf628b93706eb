"""The main job in miniature: an asynchronous GRPO loop on a real small model, with real vLLM replicas."""

from __future__ import annotations

from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Run `pitstop demo` with these arguments; return the exit status."""
    from pitstop.engine.demo.command import main

    return main(argv)
