"""What the documents say is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from stagetrace.stages import STAGES, markdown

ROOT = Path(__file__).parents[2]


def test_the_readme_has_the_stage_table() -> None:
    readme = (ROOT / "README.md").read_text()
    assert markdown() in readme, "README.md and stages.py differ: paste the output of `stagetrace stages --markdown`"


def test_the_stage_table_is_sound() -> None:
    assert [s.number for s in STAGES] == list(range(1, 13))
    assert len({s.key for s in STAGES}) == 12


def test_links_between_documents_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    missing = [page.name for page in sorted(folder.glob("0*.md")) if f"]({page.name})" not in index]
    assert missing == []
