"""``stagetrace gate``: is this server slower than that one, and in which stage?"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ..faults import Fault

if TYPE_CHECKING:
    from ..gate.ab import Tick
    from ..gate.compare import Report
    from ..gate.match import Sides
    from ..gate.settings import Wishes

INTERNAL = 70
CODES = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
POLICIES = {"": 3, "pass": 0, "fail": 1}
#: Columns that hold any table.
WIDTH = 120
#: Of --ab alone.
AB_ONLY = ("runs", "requests", "concurrency", "prompt_tokens", "output_tokens", "seed", "stores")
#: Options that take all the words up to the next option.
SEVERAL = ("--baseline", "--current")


def _fields(incomplete: str) -> list[str]:
    from ..gate.match import FIELDS

    return [name for name in FIELDS if name.startswith(incomplete)]


Files = list[Path]
Words = list[str]
Baseline = Annotated[
    Files | None, typer.Option(metavar="FILE...", help="BASE.json, or stores of the runs to compare with.")
]
Current = Annotated[Files | None, typer.Option(metavar="FILE...", help="Stores of the runs to judge.")]
Ab = Annotated[
    tuple[str, str] | None,
    typer.Option(metavar="CMD_A CMD_B", help="Start these two servers in turn, and compare them."),
]
Runs = Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="With --ab: runs a side.")]
Requests = Annotated[int, typer.Option(metavar="N", min=2, help="With --ab: requests in each run.")]
Concurrency = Annotated[int, typer.Option(metavar="N", min=1, help="With --ab: so many requests at a time.")]
Prompt = Annotated[str, typer.Option(metavar="MIX", help="With --ab: prompt lengths, as for `stagetrace load`.")]
Output = Annotated[str, typer.Option(metavar="MIX", help="With --ab: lengths of the answers.")]
Seed = Annotated[int, typer.Option(metavar="S", help="With --ab: the prompts follow from it.")]
Stores = Annotated[Path | None, typer.Option(metavar="DIR", help="With --ab: where stores and logs are kept.")]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Budgets and effects; .stagetrace.toml if there is one.")
]
Budgets = Annotated[Words | None, typer.Option("--budget", metavar="'ttft_p95 <= 200ms'", help="One more budget.")]
Allow = Annotated[
    Words | None,
    typer.Option(metavar="FIELD", help="Compare although this differs, such as max_num_seqs.", autocompletion=_fields),
]
Policy = Annotated[
    str,
    typer.Option(
        "--inconclusive", metavar="pass|fail", help="Exit 0 or 1 instead of 3.", autocompletion=lambda: ["pass", "fail"]
    ),
]
Explain = Annotated[bool, typer.Option("--explain", help="Which stage carried the change, and which requests show it.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document.")]
Junit = Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML there, too; - is stdout.")]
Markdown = Annotated[Path | None, typer.Option(metavar="FILE", help="Append a summary in Markdown there; - is stdout.")]


class GateCommand(TyperCommand):
    """Lets an option be followed by several files, as a shell's pattern gives them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each of its words."""
        return super().parse_args(ctx, spread(args))


def spread(arguments: list[str]) -> list[str]:
    """``--current a b`` → ``--current a --current b``."""
    out: list[str] = []
    several = ""
    for word in arguments:
        if word.startswith("-"):
            several = word if word in SEVERAL else ""
            out += [] if several else [word]
        else:
            out += [several, word] if several else [word]
    # An option without a word is for the parser to refuse.
    return out + ([several] if several and arguments[-1] == several else [])


def gate(
    context: typer.Context,
    baseline: Baseline = None,
    current: Current = None,
    ab: Ab = None,
    runs: Runs = 5,
    requests: Requests = 50,
    concurrency: Concurrency = 1,
    prompt_tokens: Prompt = "400",
    output_tokens: Output = "60",
    seed: Seed = 0,
    stores: Stores = None,
    config: Config = None,
    budget: Budgets = None,
    allow: Allow = None,
    inconclusive: Policy = "",
    explain: Explain = False,
    as_json: AsJson = False,
    junit: Junit = None,
    markdown: Markdown = None,
) -> None:
    """Compare two sides, stage by stage, and say PASS, FAIL or INCONCLUSIVE.

    Either runs that were recorded (--baseline, --current), or two servers that are started in turn (--ab: a command
    says where it listens with --port {port}; NAME=VALUE before it is its environment).

    Exit code: 0 nothing is slower · 1 a stage is surely slower, or a budget broken · 2 unusable input · 3 inconclusive,
    which says how many runs would decide · 70 an internal error. Faster never fails.
    """
    if inconclusive not in POLICIES:
        raise Fault(f"--inconclusive {inconclusive}: pass or fail")
    if (ab is None) == (not baseline and not current) or (ab is None and not (baseline and current)):
        raise Fault("gate: name either --baseline FILE... and --current FILE..., or --ab CMD_A CMD_B")
    _nothing_in_vain(context, ab)
    _unharmed(junit, markdown, [*(baseline or []), *(current or []), *([config] if config else [])])
    aside = _on_stdout(junit, markdown, as_json)

    def told() -> int:
        wishes = _wishes(config, budget or [], allow or [], [path for path in (junit, markdown) if path])
        sides = (
            _recorded(baseline or [], current or [], wishes.allow)
            if ab is None
            else _served(ab, (runs, requests, concurrency, prompt_tokens, output_tokens, seed), stores, wishes.allow)
        )
        return _judged(sides, wishes, POLICIES[inconclusive], explain, as_json, junit, markdown, aside)

    raise typer.Exit(guarded(told))


def _nothing_in_vain(context: typer.Context, ab: tuple[str, str] | None) -> None:
    for name in AB_ONLY:
        source = context.get_parameter_source(name)
        if ab is None and source and source.name == "COMMANDLINE":
            raise Fault(f"--{name.replace('_', '-')} is of --ab only: these runs are recorded already")


def _unharmed(junit: Path | None, markdown: Path | None, inputs: Files) -> None:
    """Fault where what is written would spoil an input, or a file of another kind."""
    from ..outfile import replaced, spare

    for name, path, fits in (("--junit", junit, _is_xml), ("--markdown", markdown, _is_markdown)):
        if path is None:
            continue
        with suppress(OSError):  # what cannot be written is told when it is
            there = replaced(path)
            if there and any(file.exists() and file.samefile(there) for file in inputs):
                raise Fault(f"{name} {path}: that is an input of this comparison; name another file")
            spare(name, path, fits)


def _is_xml(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(64).lstrip()[:1] in (b"", b"<")


def _is_markdown(path: Path) -> bool:
    """Text that is neither JSON nor XML, which would be neither any more."""
    with open(path, "rb") as file:
        start = file.read(4096)
    return b"\0" not in start and not start.lstrip().startswith((b"{", b"<?xml"))


def guarded(work: Callable[[], int]) -> int:
    """What ``work`` returns; 70 where it fails by a fault of ours, for 1 means that somebody's server is slower."""
    from ..store import StoreError

    try:
        return work()
    except (Fault, StoreError):
        raise
    except Exception:
        traceback.print_exc()
        print("stagetrace: gate: an internal error, no verdict", file=sys.stderr)
        return INTERNAL


def _wishes(config: Path | None, budgets: list[str], allow: list[str], files: Files) -> Wishes:
    """Looked at before anything is started: what is wrong with them should not take an hour to be said."""
    try:
        import_module("stagetrace.gate.compare")
    except ImportError as error:
        raise Fault(f"gate: {error}; install what it needs: pip install 'stagetrace[gate]'") from None
    from ..gate.match import allowed
    from ..gate.settings import parse_budget, read_wishes
    from ..outfile import folder

    for file in files:
        try:
            where = folder(file)
        except OSError as error:
            raise Fault(f"{file}: {error.strerror}") from None
        if where is not None and not where.is_dir():
            raise Fault(f"{file}: there is no directory {where}")
    wishes = read_wishes(config)
    fields = (*wishes.allow, *allowed(allow))
    wanted = dict.fromkeys([*wishes.budgets, *map(parse_budget, budgets)])
    return replace(wishes, budgets=tuple(wanted), allow=fields)


def _recorded(baseline: Files, current: Files, allow: tuple[str, ...]) -> Sides:
    from ..gate.baseline import read_runs
    from ..gate.match import match

    before, after = ([run for file in files for run in read_runs(file)] for files in (baseline, current))
    return match(before, after, allow)


def _served(commands: tuple[str, str], plan: tuple[Any, ...], stores: Path | None, allow: tuple[str, ...]) -> Sides:
    from ..gate.ab import Plan, measure, parse_command
    from ..gate.match import match

    parsed = parse_command(commands[0]), parse_command(commands[1])
    folder = stores or _new_folder()
    made = not folder.exists()
    there: list[Sides] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended
    try:
        with _progress() as tick:
            measure(
                parsed, Plan(*plan), folder, tick,
                lambda sides: there.append(match(sides[0], sides[1], allow, settings=False)),
            )  # fmt: skip
    except (KeyboardInterrupt, SystemExit):
        if there:
            typer.echo(f"stagetrace: what is whole can be judged: {_again(folder, there[-1])}", err=True)
        raise
    finally:
        if made and folder.is_dir():
            typer.echo(f"stagetrace: the runs are in {folder}", err=True)
    return there[-1]


def _new_folder() -> Path:
    """Named by the time; another gate may have begun in the same second."""
    name = f"stagetrace-gate-{datetime.now():%Y%m%d-%H%M%S}"
    return next(path for n in count(1) if not (path := Path(name if n == 1 else f"{name}-{n}")).exists())


@contextmanager
def _progress() -> Iterator[Tick]:
    """A bar on a terminal, and elsewhere a line for each run."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal) as progress:
        bar = progress.add_task("gate")
        told: set[str] = set()

        def tick(said: str, done: int, steps: int) -> None:
            progress.update(bar, description=said, completed=done, total=steps)
            run = said.partition(":")[0]
            if not console.is_terminal and run not in told:
                told.add(run)
                typer.echo(f"stagetrace: {run}", err=True)

        yield tick


def _again(folder: Path, sides: Sides) -> str:
    """The command that judges the runs in it: settings that differ on purpose have to be allowed there."""
    files = [shlex.quote(f"{folder}/") + f"*-{side}.db" for side in "ab"]
    allowing = [f"--allow {line.partition(' ')[0]}" for line in sides.differ]
    return " ".join(["stagetrace gate --baseline", files[0], "--current", files[1], *allowing])


def _judged(
    sides: Sides,
    wishes: Wishes,
    undecided: int,
    explain: bool,
    as_json: bool,
    junit: Path | None,
    markdown: Path | None,
    aside: bool,
) -> int:
    from ..gate.compare import compare

    report = compare(sides, wishes)
    code = undecided if report.verdict == "INCONCLUSIVE" else CODES[report.verdict]
    _written(report, code, junit, markdown)
    _shown(report, code, explain, as_json, aside)
    return code


def _written(report: Report, code: int, junit: Path | None, markdown: Path | None) -> None:
    from ..gate import output
    from ..outfile import writing

    for path, append, text in (
        (junit, False, output.junit(report, fatal=code != 0)), (markdown, True, output.markdown(report))
    ):  # fmt: skip
        if path is not None:
            try:
                with writing(path, 0o644, append=append) as file:
                    file.write(text)
            except BrokenPipeError:
                continue  # a reader who has seen enough does not change the verdict
            except OSError as error:
                raise Fault(f"{path}: {error.strerror}; name another file") from None


def _on_stdout(junit: Path | None, markdown: Path | None, as_json: bool) -> bool:
    """Whether a file is to be on stdout, where then nothing else belongs. Fault where two things are."""
    from ..outfile import to_stdout

    try:
        there = [name for name, path in (("--junit", junit), ("--markdown", markdown)) if path and to_stdout(path)]
    except OSError as error:
        raise Fault(f"{junit or markdown}: {error.strerror}") from None
    if len(there) + as_json > 1:
        raise Fault(f"{' and '.join([*there, *['--json'] * as_json])}: only one of them can be on stdout")
    return bool(there)


def _shown(report: Report, code: int, explain: bool, as_json: bool, aside: bool) -> None:
    """Print; a reader who has seen enough does not change the verdict."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:  # rich would end with 1, which is a verdict here
            raise BrokenPipeError

    from ..gate.output import document
    from ..report.gate import gate_view

    try:
        if as_json:
            typer.echo(json.dumps(document(report, code), allow_nan=False))
        else:
            # A narrow terminal breaks lines; a figure that lost its end would be another figure.
            console = _Console(stderr=aside, width=max(Console(stderr=aside).width, WIDTH))
            console.print(gate_view(report, explain), highlight=False, soft_wrap=True)
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise Fault(f"stdout: {error.strerror}; write it elsewhere") from None
