"""What `stagetrace doctor` found, on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..doctor import Finding


def doctor_view(finding: Finding) -> RenderableType:
    """The engine, notes, stages, and the hooks that are not as they should be. Faults are said elsewhere."""
    document = finding.document
    tested = "tested" if document["tested"] else "not tested"
    engine = f"{document['engine']} {document['engine_version']} ({tested})" if document["engine"] else "no engine"
    lines = [Text(engine, style="bold"), *(Text(note) for note in finding.notes)]
    stages = _table("#", "stage", "state", "why")
    for stage in document["stages"]:
        # A fault that costs every stage is said once, after all of this.
        why = "see below" if stage["reason"] in finding.faults else stage["reason"] or ""
        stages.add_row(str(stage["number"]), stage["key"], stage["state"], why)
    in_order = [hook for hook in document["hooks"] if hook["state"] in ("resolved", "installed")]
    count = Text(f"hooks: {len(in_order)} of {len(document['hooks'])} in order")
    rest = _table("hook", "state", "why")
    for hook in document["hooks"]:
        if hook not in in_order:
            rest.add_row(hook["target"], hook["state"], hook["reason"] or "")
    hooks: list[RenderableType] = [Text(""), count, *([rest] if rest.row_count else [])] if document["hooks"] else []
    return Group(*lines, Text(""), stages, *hooks)


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if name == "#" else "left", overflow="fold")
    return table
