"""The list of field faults names tests that exist, and every test that carries a row's id."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
LIST = (TESTS / "FIELD_FAULTS.md").read_text()


def test_every_test_that_the_list_names_exists() -> None:
    file = ""
    missing = []
    for mention in re.findall(r"`((?:[\w/]+\.py)?(?:::\w+)?)`", LIST):
        path, _, name = mention.partition("::")
        file = path or file
        text = (TESTS / file).read_text()
        if name and not re.search(rf"def {name}\(", text):
            missing.append(f"{file}::{name}")
    assert missing == []


def test_every_row_is_there_once_and_every_test_with_an_id_is_in_its_row() -> None:
    rows = {line.split("|")[1].strip(): line for line in LIST.splitlines() if line.startswith("| B")}
    assert list(rows) == [f"B{n:02}" for n in range(1, 86, 2)]
    absent = []
    for path in sorted(TESTS.rglob("test_field_faults.py")):
        for name in re.findall(r"def (test_b\d\d\w+)", path.read_text()):
            ids = re.findall(r"(?<=_)b(\d\d)(?=_)", name)
            absent += [name for number in ids if name not in rows[f"B{number}"]]
    assert absent == []
