"""What one process of an engine holds: its recorder, its hooks, and how they come to life."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import marks, session
from .recorder import Recorder

if TYPE_CHECKING:
    from .collect.thread import CollectorThread
    from .hooks import HookGroup, Installer

log = logging.getLogger("stagetrace")
recorder = Recorder(None)
#: Where records go when an engine is recorded because of ``STAGETRACE=1`` alone.
DEFAULT_STORE = "stagetrace.db"


@dataclass(frozen=True)
class Integration:
    """What an engine's plug-in declares; registered in the entry-point group ``stagetrace.integrations``."""

    name: str
    package: str
    distributions: tuple[str, ...]
    tested: tuple[str, str]
    hooks: tuple[HookGroup, ...]
    #: Returns the demo server (see :class:`stagetrace.demo.DemoEngine`); imported only when asked for.
    demo: Callable[[], Any]
    #: Called by ``uninstall``: whatever the plug-in attached outside the hook rows.
    release: Callable[[], None] = field(default=lambda: None)
    #: How to install the engine, for whoever has none.
    install: str = ""
    #: For ``doctor``: what keeps a server started from here from being recorded at all, a line with its cure each.
    checks: Callable[[], list[str]] = field(default=list)


@dataclass
class _State:
    installers: dict[str, Installer] = field(default_factory=dict)
    integrations: dict[str, Integration] = field(default_factory=dict)
    #: The last word on each hook, for the collector.
    fates: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] | None = None
    #: What of them cannot be carried out, a line each.
    faults: list[str] = field(default_factory=list)
    collector: Any = None
    #: The collector, where it is a thread of this process.
    thread: CollectorThread | None = None
    warned: bool = False


_state = _State()


def wanted() -> bool:
    """Whether this process was asked to record: by a session, or by ``STAGETRACE=1``."""
    return bool(os.environ.get(session.ENV)) or os.environ.get("STAGETRACE") == "1" or _state.options is not None


def activate(integration: Integration) -> None:
    """Install an integration's hooks here, if recording is wanted. Idempotent; never raises; starts nothing."""
    try:
        if not wanted() or os.environ.get("STAGETRACE") == "0":
            return
        if integration.name in _state.installers:
            # What was half imported the last time may be whole by now.
            _state.installers[integration.name].install()
            return
        # Some hosts set the root logger to ERROR, and nobody would hear what we say once.
        if log.level == logging.NOTSET:
            log.setLevel(logging.WARNING)
        directory = session.current()
        if recorder.directory != directory:
            recorder.attach(directory)
        recorder.on_first_ring = _greet
        from .hooks import Installer

        installer = Installer(integration.hooks, recorder.paused, report)
        _state.installers[integration.name] = installer
        _state.integrations[integration.name] = integration
        installer.install()
    except session.SessionError as error:
        _warn(str(error))
    except Exception as error:
        _warn(f"not installed ({type(error).__name__})")


def deactivate() -> None:
    """Take every hook of this process out again."""
    for name, installer in _state.installers.items():
        installer.uninstall()
        _state.integrations[name].release()
    _state.installers.clear()
    _state.integrations.clear()
    _state.options = None
    _state.faults = []
    if _state.thread is not None:
        thread, _state.thread = _state.thread, None
        recorder.attach(None)
        os.environ.pop(session.ENV, None)
        thread.stop()


def engine_starts() -> None:
    """Called by the hook that sees an engine being built: make the session and its collector if there is none."""
    asked = _state.options or {"store": DEFAULT_STORE}
    if recorder.directory is not None:
        if asked.get("tracer_provider") is not None and _state.thread is None:
            asked["tracer_provider"] = None
            log.warning("stagetrace: tracer_provider is not used: another process collects this session")
        return
    try:
        directory = session.create()
    except session.SessionError as error:
        _warn(str(error))
        return
    try:
        _collect(directory, asked)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        _warn(f"the collector cannot be started: {error.strerror}")
        return
    # Children find it here; only now, or they would record what nobody reads.
    os.environ[session.ENV] = str(directory)
    recorder.attach(directory)


def _collect(directory: Path, asked: dict[str, Any]) -> None:
    """Start the collector: a process beside this one, or a thread where it is to use a provider of ours."""
    if asked.get("tracer_provider") is not None:
        from .collect.thread import CollectorThread

        try:
            session.remove_stale()  # a thread leaves its session behind when its process is killed
            thread = CollectorThread(directory, asked, report)
            thread.start()
            _state.thread = thread
            return
        except Exception as error:  # whatever a provider of the host's own making does
            log.warning("stagetrace: %s; recording goes on without it", error)
    from .collect.spawn import spawn

    _state.collector = spawn(directory, asked)


def collector() -> str | None:
    """Where this session's collector is: in a ``thread`` of this process, or another ``process``."""
    directory = recorder.directory
    if directory is None or not session.owner(directory):
        return None
    return "thread" if _state.thread is not None and session.owner(directory) == os.getpid() else "process"


def exported_share() -> float | None:
    """Of the traces that have no caller, the share that this session's collector is certain to export.

    None where it exports no traces at all.
    """
    if recorder.directory is None:
        return None
    try:
        return float((recorder.directory / session.TRACES).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def options(values: dict[str, Any]) -> list[str]:
    """Remember what ``instrument`` was asked for until an engine is built; return what of it cannot be, once."""
    if _state.options is not None:
        return []
    # In a session somebody else collects, and was asked.
    if not os.environ.get(session.ENV) and os.environ.get("STAGETRACE") != "0":
        from .asked import checked

        values, _state.faults = checked(values)
    _state.options = values
    return _state.faults


def faults() -> list[str]:
    """What of the options cannot be carried out."""
    return list(_state.faults)


def states() -> dict[str, dict[str, str]]:
    """Hook states of this process by integration and target."""
    return {name: dict(installer.states) for name, installer in _state.installers.items()}


def report(target: str, state: str) -> None:
    """Tell the collector of a hook's fate, once this process has something to record at all."""
    _state.fates[target] = state
    if recorder.recording:
        recorder.text(marks.HOOK, 0, f"{target} {state}")


def troubled(target: str) -> bool:
    """Whether a hook has failed in this process."""
    return _state.fates.get(target, "").startswith(("failing", "removed"))


def _greet() -> None:
    """Tell it all there is to tell so far; a forked child does that again for itself."""
    for target, state in list(_state.fates.items()):
        recorder.text(marks.HOOK, 0, f"{target} {state}")


def _warn(why: str) -> None:
    """Say once why this process does not record: engines load their plug-ins several times."""
    if not _state.warned:
        _state.warned = True
        log.warning("stagetrace: no recording in pid %d: %s; serving goes on", os.getpid(), why)


def directory() -> Path | None:
    """The session this process records into."""
    return recorder.directory
