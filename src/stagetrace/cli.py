"""The command line. Bad input is one line on stderr and exit code 2; ``run`` ends with its command's code."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from . import commands
from .faults import Fault
from .terminal import plain, spare

DEFAULT_STORE = Path("stagetrace.db")

app = typer.Typer(
    name="stagetrace",
    help="A stopwatch on each of the twelve stages of a real LLM request.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

StoreArgument = Annotated[Path, typer.Argument(metavar="[FILE]", help="A store; stagetrace.db if not given.")]


def _version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"stagetrace {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    """A stopwatch on each of the twelve stages of a real LLM request."""


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="The server's command line.")],
    store: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to keep what is recorded.", show_default=str(DEFAULT_STORE)),
    ] = None,
    no_store: Annotated[bool, typer.Option("--no-store", help="Keep nothing on disk.")] = False,
    store_max: Annotated[str, typer.Option(metavar="SIZE", help="Remove the oldest requests beyond this.")] = "1GiB",
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Export traces and metrics there (OTLP; port 4317: gRPC).")
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Show metrics to Prometheus there.")
    ] = None,
    sample: Annotated[
        float | None, typer.Option(metavar="RATIO", help="Export this share of traces; store and metrics see all.")
    ] = None,
) -> None:
    """Run a server with every stage of its requests recorded; the exit code is the server's."""
    from .exporting import Options
    from .store import parse_size
    from .supervise import run as supervise

    try:
        limit = parse_size(store_max)
    except ValueError as error:
        raise Fault(f"--store-max: {error}") from None
    if sample is not None and not 0 <= sample <= 1:
        raise Fault(f"--sample {sample}: give a number from 0 to 1")
    if no_store and store is not None:
        raise Fault(f"--store {store} and --no-store: give one of the two")
    options = Options(otlp, prometheus, sample)
    raise typer.Exit(supervise(command, None if no_store else store or DEFAULT_STORE, limit, options))


@app.command()
def stages(
    file: StoreArgument = DEFAULT_STORE,
    request: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Response id, x-request-id, internal id or trace id."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All requests as one JSON document.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the stage table itself.")] = False,
    last: Annotated[
        int, typer.Option(metavar="N", min=1, max=1_000_000, help="How many of the newest requests to print.")
    ] = 3,
) -> None:
    """The stopwatch: what each of the twelve stages of a request took."""
    if markdown:
        if as_json or request is not None:
            raise Fault(f"--markdown and {'--json' if as_json else '--request'}: give one of the two")
        from .stages import markdown as table

        typer.echo(table())
        return
    from .report.requests import print_json, print_stopwatches
    from .store import find, load

    trace = load(file, limit=last if request is None and not as_json else None)
    records = trace.requests if request is None else find(trace, request)
    if request is not None and not records:
        raise Fault(f"{file} has no request {request}; {_where_else(request, file)}")
    for line in trace.notices:
        typer.echo(f"stagetrace: {line}", err=True)
    if as_json:
        print_json(records)
    else:
        print_stopwatches(records, file, trace.runs)


def _where_else(request: str, file: Path) -> str:
    """How to find a request that is not known by this id."""
    from .parents import kept

    if request and not kept("x-request-id", request):
        return (
            "an x-request-id, and the response's id made of it, is kept up to 128 printable ASCII characters: look for "
            "the trace id"
        )
    return f"`stagetrace stages {file} --json` lists the ids it has"


@app.command()
def export(
    file: StoreArgument = DEFAULT_STORE,
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="Such as otlp-json.")] = "otlp-json",
    out: Annotated[
        Path | None,
        typer.Option("-o", "--output", "--out", metavar="OUT", help="The file to write (required); - is stdout."),
    ] = None,
) -> None:
    """Write the requests of a store in a format that other tools read."""
    from .export import export as write

    if out is None:
        raise Fault("export: name the file to write: -o OUT")
    count = write(file, form, out, lambda line: typer.echo(f"stagetrace: {line}", err=True))
    typer.echo(f"{count} requests in {out}", err=True)


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A model directory; a tiny one is made if not given.")
    ] = None,
    store: Annotated[Path, typer.Option(metavar="FILE", help="Where to keep what is recorded.")] = DEFAULT_STORE,
) -> None:
    """Serve a tiny model with the real engine, send it requests, and print their stopwatches."""
    from .demo import run_demo

    raise typer.Exit(run_demo(model, store))


app.command()(commands.numbers)
app.command()(commands.load)
app.command()(commands.doctor)
app.command()(commands.floor)
app.command()(commands.baseline)
app.command(cls=commands.GateCommand)(commands.gate)


@app.command()
def pause(
    session: Annotated[str | None, typer.Argument(help="A session's name; the only live one if not given.")] = None,
) -> None:
    """Stop recording in a running server; its hooks pass straight through."""
    _set_paused(session, True)


@app.command()
def resume(
    session: Annotated[str | None, typer.Argument(help="A session's name; the only live one if not given.")] = None,
) -> None:
    """Go on recording in a server that was paused."""
    _set_paused(session, False)


def _set_paused(name: str | None, paused: bool) -> None:
    from . import session
    from .live import whose
    from .rings import set_paused

    live = session.live()
    chosen = [s for s in live if name in (None, s.name, str(s))]
    if len(chosen) != 1:
        names = ", ".join(f"{s.name} ({whose(s)})" for s in live)
        asked = f"no session {name}" if name else "which session?"
        cure = f"name one of {names} (`stagetrace run` says its own when it starts)" if live else (
            "none is running here; start one with `stagetrace run -- CMD`"
        )  # fmt: skip
        raise Fault(f"{asked}: {cure}")
    flag = chosen[0] / session.PAUSED
    try:
        # The flag is for rings that are yet to come, the byte in each ring for those that are there.
        flag.touch(mode=0o600) if paused else flag.unlink(missing_ok=True)
        rings = set_paused(chosen[0], paused)
    except OSError as error:
        raise Fault(f"session {chosen[0]}: {error.strerror}") from None
    typer.echo(f"{'paused' if paused else 'resumed'} {chosen[0].name} ({rings} recording threads; {whose(chosen[0])})")


def main() -> None:
    """Entry point of ``stagetrace``."""
    from .collect.sinks import ExportError
    from .session import SessionError
    from .store import StoreError

    spare()
    try:
        code = app(prog_name="stagetrace", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except (Fault, StoreError, SessionError, ExportError) as error:
        _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except OSError as error:
        # Python would fail once more when it closes what cannot be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # whoever read our output has enough; as typer and rich end then
            sys.exit(1)
        full = error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        _fail(f"stdout: {error.strerror}; write it elsewhere" if full else str(error))
    except Exception as error:
        _refuse(error)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(error: Exception) -> NoReturn:
    """End with what is wrong with the command line, or raise what is our own fault.

    Typer carries its own click: a usage error is told by what it can do, not by its class.
    """
    context = getattr(error, "ctx", None)
    if not hasattr(error, "format_message"):
        raise error
    if len(sys.argv) == 1 and context is not None:  # asked nothing: the help is the answer
        typer.echo(context.get_help(), err=True)
        sys.exit(2)
    _fail(f"{error.format_message()} (see `{getattr(context, 'command_path', None) or _asked()} --help`)")


def _asked() -> str:
    """The command that was asked for, where a usage error does not say of which it is."""
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    return " ".join(["stagetrace", *(word for word in sys.argv[1:2] if word in known)])


def _fail(line: str) -> NoReturn:
    print(f"stagetrace: {plain(line)}", file=sys.stderr)
    sys.exit(2)
