"""What docs/ offers to Grafana, by what Grafana publishes: its TraceQL grammar, and its types of a dashboard."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.debian import program
from tests.viewers.viewers import CACHE

DOCS = Path(__file__).resolve().parents[2] / "docs"
PACKAGES = {
    "@grafana/lezer-traceql": "1.0.0", "@lezer/common": "1.5.5", "@lezer/lr": "1.4.12",
    "@grafana/schema": "13.2.3", "typescript": "7.0.2",
}  # fmt: skip
PARSE = """
import { parser } from "@grafana/lezer-traceql";
const faults = query => {
  const found = [];
  parser.parse(query).iterate({ enter(node) { if (node.type.isError) found.push(node.from); } });
  return found;
};
console.log(JSON.stringify(JSON.parse(process.argv[2]).map(faults)));
"""


@pytest.fixture(scope="module")
def node() -> Path:
    """A folder with those packages, made once."""
    npm, folder = program("npm", "nodejs", "npm"), CACHE / "viewer-npm"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = json.dumps({"private": True, "type": "module", "dependencies": PACKAGES})
    package = folder / "package.json"
    if not (folder / "node_modules").exists() or package.read_text() != wanted:
        package.write_text(wanted)
        subprocess.run([npm, "install", "--silent", "--no-audit", "--no-fund"], cwd=folder, check=True)
    (folder / "parse.mjs").write_text(PARSE)
    return folder


def faults(node: Path, queries: list[str]) -> list[list[int]]:
    """For each query, where the grammar does not follow."""
    command = [program("node", "nodejs"), "parse.mjs", json.dumps(queries)]
    found: list[list[int]] = json.loads(subprocess.check_output(command, cwd=node, text=True))
    return found


def test_the_grammar_finds_faults(node: Path) -> None:
    assert all(faults(node, ["{ name = }", "{ nme = 1 }", '{ name = "a" } | select(']))


def test_every_query_of_the_documents_is_traceql(node: Path) -> None:
    queries = re.findall(r"```traceql\n(.*?)\n```", (DOCS / "traces.md").read_text(), re.DOTALL)
    assert len(queries) == 8
    found = faults(node, queries)
    assert not any(found), [pair for pair in zip(queries, found, strict=True) if pair[1]]


@pytest.mark.parametrize(
    ("change", "right"), [(("", ""), True), (('"schemaVersion": 39', '"schemaVersion": "39"'), False)]
)
def test_the_dashboard_has_grafana_s_types(node: Path, change: tuple[str, str], right: bool) -> None:
    board = (DOCS / "grafana" / "stagetrace.json").read_text().replace(*change)
    source = node / "dashboard.ts"
    # As a literal: imported JSON has strings where the types name the values there are.
    source.write_text(
        f'import type {{ Dashboard }} from "@grafana/schema";\nexport const board: Partial<Dashboard> = {board};\n'
    )
    options = [
        "--strict",
        "--skipLibCheck",
        "--module",
        "esnext",
        "--moduleResolution",
        "bundler",
        "--target",
        "es2022",
    ]
    command = [str(node / "node_modules" / ".bin" / "tsc"), "--noEmit", *options, source.name]
    done = subprocess.run(command, cwd=node, capture_output=True, text=True)
    assert (done.returncode == 0) == right, done.stdout
