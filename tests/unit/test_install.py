"""Groups of hooks: installed together or not at all, whatever is imported first, and removed without a trace."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from stagetrace import runtime
from stagetrace.hooks import HookGroup, HookSpec, Installer
from stagetrace.hooks import install as install_module
from stagetrace.runtime import Integration
from tests.unit.helpers import DEADLINE_S, Engine, python

CORE = """
    class Scheduler:
        def schedule(self, batch):
            return batch

        def free(self, request):
            return request
"""
WORKER = """
    from PACKAGE import core

    class Worker:
        def execute(self, batch):
            return core.Scheduler().schedule(batch)
"""
API = """
    from PACKAGE import core, worker

    class Server:
        def answer(self, request):
            return worker.Worker().execute(request)
"""
Engines = Callable[..., Engine]


class Told:
    """Installs groups of hooks that count their calls, and notes what is said of them."""

    def __init__(self, engine: Engine, *groups: tuple[str, ...], takes: dict[str, tuple[str, ...]] | None = None):
        self.engine = engine
        self.calls: list[str] = []
        self.states: dict[str, str] = {}
        rows = [
            HookGroup(str(number), (), tuple(self.row(path, (takes or {}).get(path, ())) for path in paths))
            for number, paths in enumerate(groups)
        ]
        self.installer = Installer(rows, lambda: False, self.states.__setitem__)

    def row(self, path: str, takes: tuple[str, ...] = ()) -> HookSpec:
        first, *others = path.split("|")
        return HookSpec(
            self.engine.target(first),
            enter=lambda _, *values: self.calls.append(path),
            otherwise=tuple(map(self.engine.target, others)),
            takes=takes,
        )

    def state(self, path: str) -> str:
        return self.installer.states[self.engine.target(path.split("|")[0])]


SCHEDULE, FREE, EXECUTE = "core:Scheduler.schedule", "core:Scheduler.free", "worker:Worker.execute"
ANSWER = "api:Server.answer"


@pytest.mark.parametrize("order", [*itertools.permutations(["core", "worker", "api", "install"])])
def test_any_order_of_imports_gives_the_same_hooks(engine: Engines, order: tuple[str, ...]) -> None:
    made = engine(core=CORE, worker=WORKER, api=API)
    told = Told(made, (SCHEDULE, EXECUTE), (ANSWER,), (FREE,))
    for step in order:
        told.installer.install() if step == "install" else made.load(step)
    assert {told.state(path) for path in (SCHEDULE, FREE, EXECUTE, ANSWER)} == {"installed"}
    assert made.load("api").Server().answer("r") == "r"
    assert told.calls == [ANSWER, EXECUTE, SCHEDULE]
    assert told.states == told.installer.states, "each is told of, in its last state"
    told.installer.uninstall()
    assert made.load("api").Server().answer("r") == "r"
    assert len(told.calls) == 3
    for module, owner in (("core", "Scheduler"), ("worker", "Worker"), ("api", "Server")):
        kinds = {type(value).__name__ for value in vars(getattr(made.load(module), owner)).values()}
        assert "FunctionWrapper" not in kinds


def test_nothing_is_imported_for_our_sake(engine: Engines) -> None:
    made = engine(core=CORE, worker=WORKER, api=API)
    told = Told(made, (SCHEDULE, EXECUTE), (ANSWER,))
    told.installer.install()
    made.load("core")
    assert [name for name in sys.modules if name.startswith(made.name)] == [made.name, f"{made.name}.core"]
    assert (told.state(SCHEDULE), told.state(EXECUTE)) == ("installed", "waiting")


# ---------------------------------------------------------------- all or nothing


@pytest.mark.parametrize("first", ["core", "worker"])
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("class Worker: pass", "worker:Worker has no execute"),
        ("class Other: pass", "worker has no Worker"),
        ("class Worker:\n        execute = 5", "Worker"),
        ("class Worker:\n        @staticmethod\n        def execute(batch): pass", "is not a plain method"),
        ("class Worker:\n        def execute(self, other): pass", "has no argument batch"),
    ],
)
def test_a_group_with_one_missing_hook_is_refused(engine: Engines, first: str, broken: str, reason: str) -> None:
    made = engine(core=CORE, worker=broken)
    told = Told(made, (SCHEDULE, EXECUTE), (FREE,), takes={EXECUTE: ("batch",)})
    told.installer.install()
    made.load(first)
    assert reason in told.state(SCHEDULE)
    assert reason in told.state(EXECUTE)
    assert made.load("core").Scheduler().schedule(1) == 1
    assert made.load("core").Scheduler().free(1) == 1
    assert told.calls == [FREE], "another group is not concerned"


def test_a_module_that_is_not_there(engine: Engines) -> None:
    made = engine(core=CORE)
    told = Told(made, (SCHEDULE, EXECUTE))
    told.installer.install()
    made.load("core")
    assert told.state(SCHEDULE) == told.state(EXECUTE) == f"refused: there is no module {made.name}.worker"


@pytest.mark.parametrize("source", ["def broken(:", "\0", "class Worker:\n        def execute(self): 'ä'"])
def test_source_that_cannot_be_read(engine: Engines, source: str) -> None:
    made = engine(core=CORE, worker="")
    (made.directory / made.name / "worker.py").write_bytes(source.encode("latin-1"))
    told = Told(made, (SCHEDULE, EXECUTE))
    told.installer.install()
    assert made.load("core").Scheduler().schedule(1) == 1
    assert "cannot be examined" in told.state(SCHEDULE)


LATER = """
    class Worker:
        def execute(self, batch):
            return batch

    Worker.execute = property(lambda self: 5)
"""


def test_what_only_turns_out_when_it_is_imported_takes_the_group_back(engine: Engines) -> None:
    """Its source looked right, so that half the group was installed by then."""
    made = engine(core=CORE, worker=LATER)
    told = Told(made, (SCHEDULE, EXECUTE), (FREE,))
    told.installer.install()
    core = made.load("core")
    before = core.Scheduler
    assert told.state(SCHEDULE) == "installed"
    assert made.load("worker").Worker().execute == 5
    assert "is not a plain method" in told.state(SCHEDULE)
    assert "is not a plain method" in told.state(EXECUTE)
    assert type(before.__dict__["schedule"]).__name__ == "function"
    assert core.Scheduler().free(core.Scheduler().schedule(1)) == 1
    assert told.calls == [FREE]
    told.installer.uninstall()


SEALED = """
    class Meta(type):
        def __setattr__(cls, name, value):
            raise AttributeError("sealed")

    class Worker(metaclass=Meta):
        def execute(self, batch):
            return batch
"""


def test_a_class_that_cannot_be_changed(engine: Engines) -> None:
    made = engine(core=CORE, worker=SEALED)
    told = Told(made, (SCHEDULE, EXECUTE))
    told.installer.install()
    assert made.load("core").Scheduler().schedule(1) == 1
    assert made.load("worker").Worker().execute(1) == 1
    assert told.state(SCHEDULE) == told.state(EXECUTE) == "refused: AttributeError"
    assert made.load("core").Scheduler().schedule(1) == 1
    assert told.calls == [SCHEDULE], "until then"


def test_a_reporter_that_fails_does_not_fail_the_import(engine: Engines) -> None:
    made = engine(core=CORE, worker="class Other: pass")

    def report(target: str, state: str) -> None:
        raise ValueError

    rows = [HookSpec(made.target(path)) for path in (FREE, EXECUTE)]
    groups = [HookGroup("good", (), (rows[0],)), HookGroup("bad", (), (rows[1],))]
    installer = Installer(groups, lambda: False, report)
    installer.install()
    made.load("core")
    made.load("worker")
    assert list(installer.states.values()) == ["installed", f"refused: {made.name}.worker has no Worker"]


# ---------------------------------------------------------------- where versions differ


@pytest.mark.parametrize("module", ["old", "new"])
@pytest.mark.parametrize("first", ["install", "import"])
def test_an_older_place_serves_where_the_newer_is_not(engine: Engines, module: str, first: str) -> None:
    source = "class Thing:\n        def run(self): return 1"
    made = engine(**{module: source})
    told = Told(made, ("new:Thing.run|old:Thing.run",))
    if first == "install":
        told.installer.install()
    assert made.load(module).Thing().run() == 1
    told.installer.install()
    assert made.load(module).Thing().run() == 1
    assert told.state("new:Thing.run") == "installed"
    assert len(told.calls) == (2 if first == "install" else 1)


@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")])
def test_the_newer_place_goes_first_where_both_are(engine: Engines, order: tuple[str, ...]) -> None:
    source = "class Thing:\n        def run(self): return 1"
    made = engine(old=source, new=source)
    told = Told(made, ("new:Thing.run|old:Thing.run",))
    told.installer.install()
    for module in order:
        made.load(module)
    assert made.load("old").Thing().run() == 1
    assert told.calls == []
    assert made.load("new").Thing().run() == 1
    assert len(told.calls) == 1


def test_a_method_that_a_class_gets_from_elsewhere(engine: Engines) -> None:
    """Found in the source of what is not imported yet just as in what is."""
    made = engine(
        core=CORE,
        base="class Base:\n        def execute(self, batch): return batch",
        mixed="from PACKAGE.base import Base as Parent\nclass Mixin: pass\nclass Mixed(Mixin, Parent): pass",
        worker="from .mixed import Mixed as Worker",
    )
    told = Told(made, (SCHEDULE, EXECUTE), takes={EXECUTE: ("batch",)})
    told.installer.install()
    made.load("core")
    assert told.state(SCHEDULE) == "installed"
    worker = made.load("worker")
    assert worker.Worker().execute(5) == 5
    assert told.calls == [EXECUTE]
    told.installer.uninstall()
    assert "execute" not in worker.Worker.__dict__


# ---------------------------------------------------------------- modules that are half there

HALF = """
    import sys
    sys.modules["PACKAGE"].reached()

    class Scheduler:
        def schedule(self, batch):
            return batch
"""


def test_a_module_that_is_just_being_imported(engine: Engines) -> None:
    """``instrument`` is called, or a plug-in loaded, by code that the module's own import runs."""
    made = engine(core=HALF, other="")
    told = Told(made, (SCHEDULE,))
    package: Any = __import__(made.name)
    package.reached = told.installer.install
    core = made.load("core")
    assert told.state(SCHEDULE) == "waiting"
    assert core.Scheduler().schedule(1) == 1
    told.installer.install()
    assert told.state(SCHEDULE) == "installed"
    assert core.Scheduler().schedule(1) == 1
    assert told.calls == [SCHEDULE]


def test_a_half_imported_module_is_looked_at_again_with_the_next(engine: Engines) -> None:
    made = engine(core=HALF, worker="class Worker:\n        def execute(self, batch): return batch")
    told = Told(made, (SCHEDULE,), (EXECUTE,))
    package: Any = __import__(made.name)
    package.reached = told.installer.install
    made.load("core")
    made.load("worker")
    assert (told.state(SCHEDULE), told.state(EXECUTE)) == ("installed", "installed")


def test_modules_that_import_each_other(engine: Engines) -> None:
    made = engine(
        core="from PACKAGE import worker\nclass Scheduler:\n    def schedule(self, batch): return batch",
        worker="from PACKAGE import core\nclass Worker:\n    def execute(self, batch): return batch",
    )
    told = Told(made, (SCHEDULE, EXECUTE))
    told.installer.install()
    core, worker = made.load("core"), made.load("worker")
    assert core.Scheduler().schedule(worker.Worker().execute(1)) == 1
    assert told.calls == [EXECUTE, SCHEDULE]


def test_another_thread_imports_while_we_install(engine: Engines) -> None:
    made = engine(core=HALF)
    told = Told(made, (SCHEDULE,))
    package: Any = __import__(made.name)
    inside, go_on = threading.Event(), threading.Event()

    def reached() -> None:
        inside.set()
        go_on.wait(DEADLINE_S)

    package.reached = reached
    thread = threading.Thread(target=made.load, args=("core",))
    thread.start()
    assert inside.wait(DEADLINE_S)
    told.installer.install()
    assert told.state(SCHEDULE) == "waiting"
    go_on.set()
    thread.join()
    told.installer.install()
    assert told.state(SCHEDULE) == "installed"


def test_modules_without_a_spec_and_modules_that_are_none(engine: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(core=CORE)
    made.load("core")
    stub = ModuleType("stub")
    del stub.__spec__
    stub.Thing = type("Thing", (), {"run": lambda self: 1})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stub_of_a_test", stub)
    monkeypatch.setitem(sys.modules, "none_of_a_test", None)
    rows = [HookSpec("stub_of_a_test:Thing.run"), HookSpec("none_of_a_test:Thing.run"), HookSpec(made.target(FREE))]
    installer = Installer([HookGroup(row.target, (), (row,)) for row in rows], lambda: False, lambda *_: None)
    installer.install()
    assert list(installer.states.values()) == ["installed", "waiting", "installed"]
    installer.uninstall()


# ---------------------------------------------------------------- in and out again


def test_installing_twice_wraps_once(engine: Engines) -> None:
    made = engine(core=CORE)
    told = Told(made, (SCHEDULE,))
    for _ in range(3):
        told.installer.install()
    core = made.load("core")
    told.installer.install()
    assert core.Scheduler().schedule(1) == 1
    assert told.calls == [SCHEDULE]


def test_out_and_in_again(engine: Engines) -> None:
    made = engine(core=CORE, worker=WORKER)
    told = Told(made, (SCHEDULE, EXECUTE))
    told.installer.install()
    core = made.load("core")
    original = core.Scheduler.__dict__["schedule"].__wrapped__
    for _ in range(3):
        told.installer.uninstall()
        assert core.Scheduler.__dict__["schedule"] is original
        assert told.installer.states == {}
        told.installer.install()
        core.Scheduler().schedule(1)
    assert told.calls == [SCHEDULE] * 3
    told.installer.uninstall()
    made.load("worker").Worker().execute(1)
    assert told.calls == [SCHEDULE] * 3, "an import after the end hooks nothing"


def test_two_hooks_on_one_method_come_off_whole(engine: Engines) -> None:
    made = engine(core=CORE)
    told, other = Told(made, (SCHEDULE,)), Told(made, (SCHEDULE,))
    core = made.load("core")
    before = core.Scheduler.__dict__["schedule"]
    told.installer.install()
    other.installer.install()
    core.Scheduler().schedule(1)
    told.installer.uninstall()
    assert core.Scheduler().schedule(1) == 1
    assert (len(told.calls), len(other.calls)) == (1, 2), "the inner one is still there, and silent"
    other.installer.uninstall()
    core.Scheduler().schedule(1)
    assert (len(told.calls), len(other.calls)) == (1, 2)
    assert core.Scheduler.__dict__["schedule"].__wrapped__ is before


def test_two_names_of_one_method_come_off_in_turn(engine: Engines) -> None:
    """Newest first, or the older wrapper would be put back in the end."""
    made = engine(core=CORE, api="from PACKAGE.core import Scheduler")
    told = Told(made, (SCHEDULE,), ("api:Scheduler.schedule",))
    core = made.load("core")
    made.load("api")
    before = core.Scheduler.__dict__["schedule"]
    told.installer.install()
    core.Scheduler().schedule(1)
    assert len(told.calls) == 2
    told.installer.uninstall()
    assert core.Scheduler.__dict__["schedule"] is before


def test_somebody_else_s_patch_on_top_stays(engine: Engines) -> None:
    made = engine(core=CORE)
    told = Told(made, (SCHEDULE,))
    told.installer.install()
    core = made.load("core")
    ours = core.Scheduler.schedule
    core.Scheduler.schedule = lambda self, batch: ["theirs", ours(self, batch)]
    theirs = core.Scheduler.__dict__["schedule"]
    told.installer.uninstall()
    assert core.Scheduler.__dict__["schedule"] is theirs
    assert core.Scheduler().schedule(1) == ["theirs", 1]
    assert told.calls == []


def test_a_method_that_is_gone_by_then(engine: Engines) -> None:
    made = engine(core=CORE)
    told = Told(made, (SCHEDULE,), (FREE,))
    told.installer.install()
    core = made.load("core")
    del core.Scheduler.schedule
    told.installer.uninstall()
    assert "schedule" not in core.Scheduler.__dict__
    assert type(core.Scheduler.__dict__["free"]).__name__ == "function"


def test_syntax_trees_are_not_kept(engine: Engines) -> None:
    """An engine's larger modules take tens of megabytes as trees."""
    made = engine(core=CORE, worker=WORKER)
    told = Told(made, (SCHEDULE, EXECUTE))
    told.installer.install()
    made.load("core")
    assert install_module.parsed.cache_info().currsize == 0


@pytest.mark.parametrize("own", [logging.NOTSET, logging.CRITICAL])
def test_what_is_said_once_is_heard_where_the_host_shows_errors_only(own: int) -> None:
    code = f"""
        import logging
        from stagetrace.guard import Guard
        from stagetrace.runtime import Integration, activate
        logging.getLogger("stagetrace").setLevel({own})
        logging.getLogger().setLevel(logging.ERROR)
        activate(Integration("test", "json", (), ("0", "1"), (), demo=lambda: None))
        Guard("hook").failed(ValueError())
    """
    said = python(code, STAGETRACE="1").stderr
    assert ("hook hook failed (ValueError)" in said) == (own == logging.NOTSET)


def test_an_integration_is_put_in_and_taken_out_once(
    engine: Engines, directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(core=CORE)
    core = made.load("core")
    before = core.Scheduler.__dict__["schedule"]
    monkeypatch.setenv("STAGETRACE_SESSION", str(directory))
    released: list[int] = []
    groups = (HookGroup("g", (), (HookSpec(made.target(SCHEDULE)),)),)
    integration = Integration(
        made.name, made.name, (), ("0", "1"), groups, demo=lambda: None, release=lambda: released.append(1)
    )
    runtime.activate(integration)
    runtime.activate(integration)
    assert runtime.states() == {made.name: {made.target(SCHEDULE): "installed"}}
    assert core.Scheduler.__dict__["schedule"].__wrapped__ is before
    runtime.deactivate()
    runtime.deactivate()
    assert core.Scheduler.__dict__["schedule"] is before
    assert released == [1]
    assert runtime.states() == {}
    runtime.recorder.attach(None)
