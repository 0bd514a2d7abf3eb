"""``stagetrace load``: reproducible load on an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..loadgen import Settings
    from ..loadgen.run import Outcome

Url = Annotated[str, typer.Option(metavar="URL", help="The server, as http://HOST:PORT.")]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="The first of /v1/models if not given.")]
Rate = Annotated[float | None, typer.Option(metavar="R", help="Open loop: Poisson arrivals, R a second.")]
Concurrency = Annotated[int | None, typer.Option(metavar="N", min=1, help="Closed loop: N at a time; 1 by default.")]
Requests = Annotated[int | None, typer.Option(metavar="N", min=1, help="How many requests; 50 by default.")]
Duration = Annotated[float | None, typer.Option(metavar="S", help="Send for so many seconds instead.")]
Prompt = Annotated[
    str, typer.Option(metavar="MIX", help="Prompt lengths, about: 400, 100-500, or weighted: 200:0.7,2000:0.3.")
]
Output = Annotated[str, typer.Option(metavar="MIX", help="Lengths of the answers.")]
Shared = Annotated[int, typer.Option(metavar="TOKENS", min=0, help="So many tokens all prompts begin with.")]
Seed = Annotated[int, typer.Option(metavar="S", help="Lengths, arrivals and prompts follow from it.")]
Warmup = Annotated[int, typer.Option(metavar="N", min=0, help="Requests sent before, and not counted.")]
Stream = Annotated[bool, typer.Option("--stream/--no-stream", help="Ask for the answer in pieces, or in one.")]
Completions = Annotated[bool, typer.Option("--completions", help="/v1/completions instead of chat.")]
Sampled = Annotated[bool, typer.Option("--sampled/--unsampled", help="The flag in each request's traceparent.")]
Timeout = Annotated[float, typer.Option(metavar="S", min=0.001, help="Give a request up after this long.")]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--output", "--out", metavar="FILE", help="The client's own clock, as JSON; - is stdout."),
]


def load(
    url: Url,
    model: Model = None,
    rate: Rate = None,
    concurrency: Concurrency = None,
    requests: Requests = None,
    duration: Duration = None,
    prompt_tokens: Prompt = "400",
    output_tokens: Output = "100",
    shared_prefix: Shared = 0,
    seed: Seed = 0,
    warmup: Warmup = 0,
    stream: Stream = True,
    completions: Completions = False,
    sampled: Sampled = True,
    timeout: Timeout = 600.0,
    output: Out = None,
) -> None:
    """Send reproducible load and report the client's side of it.

    Exit code: 0 when every request was answered, 1 when one was not, 2 for unusable input, 130 after Ctrl-C. Two
    requests go ahead to learn how long a token is here; prompts are cut by that, and come out some tokens longer or
    shorter than asked (200 as 194 to 240, say): what each really had is in the report and in FILE. chunk_gap_ms is the
    time between two pieces of an answer, late_ms how much later than due a request was sent (with --rate): this
    client's own delay. STAGETRACE_API_KEY is sent as a bearer token.
    """
    from ..loadgen import Settings

    settings = Settings(
        url, model, rate, concurrency, requests, duration, prompt_tokens, output_tokens, shared_prefix, seed, warmup,
        stream, completions, sampled, timeout, output,
    )  # fmt: skip
    raise typer.Exit(_report(settings, _sent(settings)))


def _sent(settings: Settings) -> Outcome:
    """Send it all, with a progress bar where somebody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..loadgen import run_load
    from ..loadgen.summary import check_output

    if settings.output is not None:
        check_output(settings.output)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Seldom, and not at all where nobody looks: drawing takes time from the clock beside it.
    with Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal) as progress:
        bar = progress.add_task("load", total=settings.count or settings.duration_s)

        def tick(done: int, failed: int, seconds: float) -> None:
            words = f"{done - failed} answered" + (f", {failed} failed" if failed else "")
            progress.update(bar, completed=done if settings.count else seconds, description=words)

        return run_load(settings, tick)


def _report(settings: Settings, outcome: Outcome) -> int:
    from rich.console import Console

    from ..loadgen.summary import document, write
    from ..outfile import to_stdout
    from ..report.load import load_view

    failed = [exchange for exchange in outcome.exchanges if not exchange.ok]
    aside = settings.output is not None and to_stdout(settings.output)
    Console(stderr=aside).print(load_view(document(settings, outcome), next((e.said for e in failed if e.said), "")))
    if settings.output is not None:
        write(settings.output, settings, outcome)
        typer.echo(f"{len(outcome.exchanges)} requests in {settings.output}", err=aside)
    return 130 if outcome.interrupted else 1 if failed else 0
