"""Who may import what, what may be called what, and how long a file may be: the rules of DESIGN.md, section 6."""

import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("engine", "transports", "telemetry")
PACKAGES = tuple(f"pitstop.{folder}" for folder in FOLDERS)

RECORDS = (
    "errors", "counters", "lifecycle", "staging", "ledger", "request", "worker_ports", "naming", "refit", "staleness",
    "drift",
)  # fmt: skip
PURE = (*RECORDS, "ports")
DRIVERS = (
    "fleet",
    "adapters",
    "recovery",
    "owned",
    "upkeep",
    "prints",
    "coordinator",
    "run",
    "part",
    "router",
    "replica",
    "actions",
    "job",
    "stream",
    "flight",
    "gate",
    "drafting",
    "handle",
    "prompts",
    "rundir",
    "intake",
)
SIMULATION = ("simulated", "simulated_transport")
ADAPTERS = ("simulated", "vllm_backend", "faultkit", "contract")
COMPOSERS = ("launch", "__main__", "demo")
HEAVY = ("torch", "vllm", "ray", "transformers", "opentelemetry.sdk")
LONGEST = 450


def engine(*names: str) -> tuple[str, ...]:
    return tuple(f"pitstop.engine.{name}" for name in names)


def under(module: str, packages: Collection[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        *PACKAGES, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )


def imports(graph: grimp.ImportGraph, importers: Collection[str]) -> Iterator[tuple[str, str]]:
    for module in sorted(graph.modules):
        if under(module, importers):
            yield from ((module, imported) for imported in sorted(graph.find_modules_directly_imported_by(module)))


def python_files() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("importers", "ours", "theirs"),
    [
        pytest.param(engine(*RECORDS), engine(*RECORDS), (), id="pure modules import the standard library"),
        pytest.param(engine("ports"), engine(*PURE), (), id="ports import pure modules"),
        pytest.param(engine(*DRIVERS), engine(*PURE, *DRIVERS), ("anyio",), id="drivers add anyio"),
        pytest.param(engine(*SIMULATION), engine(*PURE, *SIMULATION), ("anyio",), id="the simulation knows ports"),
        pytest.param(engine("faultkit"), engine(*PURE, "faultkit"), (), id="the fault kit knows ports"),
        pytest.param(engine("contract"), engine(*PURE, "contract"), ("torch",), id="the contract knows ports"),
        pytest.param(
            engine("vllm_backend"),
            engine(*PURE, "rundir", "vllm_backend"),
            None,
            id="the vLLM adapter knows ports and run folders",
        ),
        pytest.param(
            ("pitstop.transports",),
            ("pitstop.transports", *engine("errors", "ports", "worker_ports", "refit", "naming")),
            None,
            id="transports know errors and ports",
        ),
        pytest.param(
            ("pitstop.telemetry",),
            ("pitstop.telemetry", *engine("errors", "ports", "lifecycle")),
            None,
            id="telemetry knows errors, ports and lifecycle",
        ),
    ],
)
def test_a_layer_imports_only_what_it_may(
    graph: grimp.ImportGraph, importers: Collection[str], ours: Collection[str], theirs: Collection[str] | None
) -> None:
    """`theirs` names the third-party packages that the layer may use; None leaves them open."""

    def allowed(module: str) -> bool:
        if under(module, ("pitstop",)):
            return under(module, ours)
        return theirs is None or module in theirs or module in sys.stdlib_module_names

    assert [pair for pair in imports(graph, importers) if not allowed(pair[1])] == []


def test_pure_modules_and_ports_do_not_know_asyncio(graph: grimp.ImportGraph) -> None:
    assert [pair for pair in imports(graph, engine(*PURE)) if pair[1] == "asyncio"] == []


def test_only_the_composition_root_imports_telemetry_and_adapters(graph: grimp.ImportGraph) -> None:
    hidden = ("pitstop.telemetry", *engine(*ADAPTERS))
    breaches = [
        (importer, imported)
        for importer, imported in imports(graph, PACKAGES)
        if not under(importer, engine(*COMPOSERS))
        for home in hidden
        if under(imported, (home,)) and not under(importer, (home,))
    ]
    assert breaches == []


def test_every_file_belongs_to_a_package_that_the_rules_see(graph: grimp.ImportGraph) -> None:
    """A folder without `__init__.py` imports well, and is in neither the graph nor the wheel."""
    files = (path.relative_to(ROOT).with_suffix("") for path in python_files())
    modules = {".".join(("pitstop", *path.parts)).removesuffix(".__init__") for path in files}
    assert {module for module in graph.modules if under(module, PACKAGES)} == modules


def test_no_module_imports_a_folder_by_its_bare_name(graph: grimp.ImportGraph) -> None:
    assert [pair for pair in imports(graph, PACKAGES) if pair[1] in FOLDERS] == []


def test_importing_the_engine_loads_nothing_heavy(tmp_path: Path) -> None:
    child = run(f"import sys, pitstop.engine; print(*(name for name in {HEAVY} if name in sys.modules))", tmp_path)
    assert (child.returncode, child.stdout.strip(), child.stderr) == (0, "", "")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_bare_import_from_the_repository_root_says_what_to_import(folder: str) -> None:
    child = run(f"import {folder}", ROOT)
    assert child.returncode != 0
    assert f"ImportError: import pitstop.{folder}, not {folder}" in child.stderr


def test_no_file_is_named_like_a_library() -> None:
    """A script that runs beside such a file would import it in the library's place, and so would its children."""
    taken = (sys.stdlib_module_names | packages_distributions().keys()) - {"__init__", "__main__"}
    names = {path: path.parent.name if path.name == "__init__.py" else path.stem for path in python_files()}
    assert [str(path.relative_to(ROOT)) for path, name in names.items() if name in taken] == []


def test_no_file_holds_two_ideas() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in python_files()}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}
