"""One hook and its wrapper: whatever our code does, the host's call happens once and ends as it would without us."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from stagetrace.guard import MAX_FAILURES, Guard
from stagetrace.hooks import HookGroup, HookSpec, Installer
from stagetrace.hooks.resolve import Unresolved

MINE = __name__


class Host:
    """What is hooked. It counts its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def plain(self, request: Any, index: int = 7, *rest: Any, flag: bool = False, **more: Any) -> Any:
        self.calls.append((request, index, rest, flag, more))
        if isinstance(request, BaseException):
            raise request
        return request

    async def waits(self, request: Any, flag: bool = False) -> Any:
        self.calls.append(request)
        await asyncio.sleep(0)
        if isinstance(request, BaseException):
            raise request
        if isinstance(request, asyncio.Event):
            await request.wait()
        return request

    def generates(self, count: int) -> Iterator[int]:
        self.calls.append(count)
        yield from range(count)

    async def generates_async(self, count: int) -> Any:
        for number in range(count):
            yield number

    def by_position(self, first: int, /, second: int, *, third: int = 3) -> int:
        return first + second + third

    @staticmethod
    def static(first: int, second: int) -> int:
        return first + second

    @classmethod
    def of_class(cls, first: int) -> int:
        return first

    @property
    def value(self) -> int:
        return 1

    partly = functools.partialmethod(plain, index=1)


class Child(Host):
    """Inherits everything but one method, which calls its parent's."""

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        return super().plain(*args, **kwargs)


class Grandchild(Child):
    pass


Hook = Callable[..., Installer]


@pytest.fixture
def hook() -> Iterator[Hook]:
    """Hook methods of the classes above; all is put back afterwards."""
    installers: list[Installer] = []
    before = {each: dict(each.__dict__) for each in (Host, Child, Grandchild)}

    def install(*specs: HookSpec, paused: Callable[[], bool] = lambda: False) -> Installer:
        installers.append(Installer((HookGroup("group", (), specs),), paused, lambda target, state: None))
        installers[-1].install()
        return installers[-1]

    yield install
    for installer in reversed(installers):
        installer.uninstall()
    assert before == {each: dict(each.__dict__) for each in before}, "uninstalling leaves no trace"


def spec(path: str, **given: Any) -> HookSpec:
    return HookSpec(f"{MINE}:{path}", **given)


#: A hook with ``fail`` is wrapped in another way than one without.
WATCHED: dict[bool, dict[str, Any]] = {True: {"fail": lambda *_: None}, False: {}}


def fails(error: BaseException) -> Callable[..., Any]:
    def failing(*_: Any) -> Any:
        raise error

    return failing


# ---------------------------------------------------------------- our code around theirs


def test_enter_before_leave_after_result_untouched(hook: Hook) -> None:
    order: list[Any] = []

    def enter(host: Host, request: Any) -> str:
        order.append(("enter", request, len(host.calls)))
        return "state"

    def leave(state: Any, host: Host, result: Any) -> Any:
        order.append(("leave", state, result, len(host.calls)))
        return "ours"

    hook(spec("Host.plain", enter=enter, leave=leave, takes=("request",)))
    host, request = Host(), object()
    assert host.plain(request) is request
    assert order == [("enter", request, 0), ("leave", "state", request, 1)]


@pytest.mark.parametrize("error", [ValueError("theirs"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
@pytest.mark.parametrize("watched", [True, False])
def test_their_exceptions_pass_as_they_are(hook: Hook, error: BaseException, watched: bool) -> None:
    seen: list[Any] = []
    fail = (lambda state, host, error: seen.append((state, error))) if watched else None
    hook(spec("Host.plain", enter=lambda host: "state", leave=fails(AssertionError("left")), fail=fail))
    host = Host()
    with pytest.raises(type(error)) as caught:
        host.plain(error)
    assert caught.value is error
    assert error.__context__ is None
    assert error.__cause__ is None
    assert len(host.calls) == 1
    assert seen == ([("state", error)] if watched else [])


@pytest.mark.parametrize("part", ["enter", "leave", "fail"])
@pytest.mark.parametrize("watched", [True, False])
def test_our_exceptions_stay_ours(hook: Hook, part: str, watched: bool, caplog: pytest.LogCaptureFixture) -> None:
    hook(spec("Host.plain", **{**WATCHED[watched], part: fails(ZeroDivisionError("ours"))}))
    host, theirs = Host(), ValueError("theirs")
    for number in range(1, 10):
        assert host.plain(1) == 1
        with pytest.raises(ValueError, match="theirs") as caught:
            host.plain(theirs)
        assert caught.value is theirs
        assert theirs.__context__ is None
        assert len(host.calls) == 2 * number
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1, "said once"
    assert "Host.plain" in lines[0]
    assert "ZeroDivisionError" in lines[0]
    assert "ours" not in lines[0], "a message may hold a prompt"


@pytest.mark.parametrize("part", ["enter", "leave", "fail"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError()])
@pytest.mark.parametrize("watched", [True, False])
def test_what_ends_a_program_is_not_contained(hook: Hook, part: str, error: BaseException, watched: bool) -> None:
    """A Ctrl-C may arrive while our code runs. It is not ours to swallow."""
    hook(spec("Host.plain", **{**WATCHED[watched], part: fails(error)}))
    with pytest.raises(type(error)):
        Host().plain(ValueError() if part == "fail" else 1)


@pytest.mark.parametrize("part", ["enter", "leave", "fail"])
def test_what_cancels_a_task_is_not_contained(hook: Hook, part: str) -> None:
    hook(spec("Host.waits", awaits=True, **{part: fails(asyncio.CancelledError())}))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Host().waits(ValueError() if part == "fail" else 1))


def test_a_hook_that_keeps_failing_is_removed(hook: Hook, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def enter(host: Host) -> None:
        calls.append(1)
        raise ZeroDivisionError

    installer = hook(spec("Host.plain", enter=enter))
    host = Host()
    for _ in range(3 * MAX_FAILURES):
        assert host.plain(1) == 1
    assert len(calls) == MAX_FAILURES
    assert len(host.calls) == 3 * MAX_FAILURES
    assert installer.guards[f"{MINE}:Host.plain"].off


def test_what_is_told_of_a_failing_hook(caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[str, str]] = []
    guard = Guard("hook", lambda name, state: told.append((name, state)))
    for _ in range(MAX_FAILURES + 3):
        guard.failed(ValueError("a prompt"))
    assert told[:2] == [("hook", "failing ValueError"), ("hook", "removed ValueError")]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("given", [1, KeyError("the host's")])
@pytest.mark.parametrize("broken", ["none", "leave", "fail", "enter", "done"])
@pytest.mark.parametrize("method", ["plain", "waits"])
def test_what_enter_has_set_is_taken_back_whatever_fails(hook: Hook, method: str, broken: str, given: Any) -> None:
    holding: list[str] = []

    def act(name: str, effect: Callable[[], object]) -> Callable[..., object]:
        return fails(ValueError("ours")) if name == broken else lambda *_: effect()

    installer = hook(
        spec(
            f"Host.{method}", awaits=method == "waits",
            enter=act("enter", lambda: holding.append("held")), leave=act("leave", lambda: None),
            fail=act("fail", lambda: None), done=act("done", holding.clear),
        )
    )  # fmt: skip
    with pytest.raises(KeyError) if isinstance(given, KeyError) else nullcontext():
        result = getattr(Host(), method)(given)
        assert (asyncio.run(result) if method == "waits" else result) == 1
    assert holding == (["held"] if broken == "done" else [])
    unused = "leave" if isinstance(given, KeyError) else "fail"
    assert installer.guards[f"{MINE}:Host.{method}"].failures == (broken not in ("none", unused))


def test_what_is_called_without_a_wrapper_is_contained() -> None:
    guard = Guard("hook")
    calls: list[object] = []

    def ours(value: object) -> None:
        calls.append(value)
        raise ValueError("a prompt")

    contained = guard.contain(ours)
    for value in range(3 * MAX_FAILURES):
        assert contained(value) is None
    assert calls == list(range(MAX_FAILURES)) and guard.off
    with pytest.raises(KeyboardInterrupt):
        Guard("hook").contain(fails(KeyboardInterrupt()))()


def test_a_guard_itself_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard("hook", fails(OSError()))
    guard.failed(ValueError())
    assert guard.off
    guard = Guard("hook")
    monkeypatch.setattr(logging.getLogger("stagetrace"), "warning", fails(OSError()))
    guard.failed(ValueError())
    assert guard.off


def test_leave_may_replace_the_result(hook: Hook) -> None:
    hook(spec("Host.plain", leave=lambda state, host, result: [result], replaces=True))
    assert Host().plain(1) == [1]


def test_a_failing_replacement_is_none(hook: Hook) -> None:
    hook(spec("Host.plain", leave=fails(ValueError()), replaces=True))
    assert Host().plain(1) == 1


@pytest.mark.parametrize("watched", [True, False])
def test_a_pause_skips_all_of_a_hook_but_not_those_that_must_run(hook: Hook, watched: bool) -> None:
    seen: list[str] = []
    silent = {"enter": lambda host: seen.append("enter"), "leave": lambda *_: seen.append("leave")}
    must = {"leave": lambda *_: seen.append("must"), "pausable": False}
    hook(
        spec("Host.plain", **silent, **WATCHED[watched]),
        spec("Host.by_position", **must, **WATCHED[watched]),
        spec("Host.waits", **silent, awaits=True),
        paused=lambda: True,
    )
    assert Host().plain(1) == 1
    assert asyncio.run(Host().waits(1)) == 1
    assert Host().by_position(1, 2) == 6
    assert seen == ["must"]


@pytest.mark.parametrize("watched", [True, False])
def test_a_pause_that_cannot_be_found_out(hook: Hook, watched: bool) -> None:
    hook(spec("Host.plain", enter=lambda host: None, **WATCHED[watched]), paused=fails(ValueError()))
    assert Host().plain(1) == 1


def test_generators_come_out_untouched(hook: Hook) -> None:
    hook(spec("Host.generates", leave=lambda *_: None), spec("Host.generates_async", leave=lambda *_: None))
    generated = Host().generates(3)
    assert inspect.isgenerator(generated)
    assert list(generated) == [0, 1, 2]

    async def collect() -> list[int]:
        return [number async for number in Host().generates_async(3)]

    assert inspect.isasyncgenfunction(Host.generates_async)
    assert asyncio.run(collect()) == [0, 1, 2]


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        (("r",), {}, ("r", 7, False)),
        (("r", 1), {}, ("r", 1, False)),
        ((), {"request": "r"}, ("r", 7, False)),
        ((), {"flag": True, "index": 2, "request": "r"}, ("r", 2, True)),
        (("r",), {"index": 2, "extra": 1}, ("r", 2, False)),
        (("r", 1, "rest", "rest", "rest"), {"flag": True}, ("r", 1, True)),
        (("r", 1, "rest", "rest", "rest"), {}, ("r", 1, False)),
    ],
)
@pytest.mark.parametrize("takes", [("request", "index", "flag"), ("flag", "request"), ("index",), ("flag",)])
def test_arguments_are_found_however_they_are_passed(
    hook: Hook, args: Any, kwargs: Any, expected: Any, takes: tuple[str, ...]
) -> None:
    seen: list[Any] = []
    hook(spec("Host.plain", enter=lambda host, *values: seen.append(values), takes=takes))
    assert Host().plain(*args, **kwargs) == "r"
    known = dict(zip(("request", "index", "flag"), expected, strict=True))
    assert seen == [tuple(known[name] for name in takes)]


def test_a_call_that_is_wrong_fails_as_it_would_without_us(hook: Hook) -> None:
    hook(spec("Host.by_position", enter=lambda host, *values: None, takes=("first", "second", "third")))
    assert Host().by_position(1, second=2) == 6
    with pytest.raises(TypeError, match="by_position"):
        Host().by_position()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="by_position"):
        Host().by_position(1, 2, 3)  # type: ignore[misc]


def test_a_call_through_the_class(hook: Hook) -> None:
    seen: list[Any] = []
    hook(spec("Host.plain", enter=lambda host, request: seen.append((host, request)), takes=("request",)))
    host = Host()
    assert Host.plain(host, "r") == "r"
    assert functools.partial(host.plain, "s")() == "s"
    assert seen == [(host, "r"), (host, "s")]


# ---------------------------------------------------------------- inheritance


def test_a_hook_on_a_parent_sees_its_children_s_calls_once(hook: Hook) -> None:
    seen: list[Any] = []
    hook(spec("Host.plain", enter=lambda host, request: seen.append(request), takes=("request",)))
    assert [each().plain(each.__name__) for each in (Host, Child, Grandchild)] == ["Host", "Child", "Grandchild"]
    assert seen == ["Host", "Child", "Grandchild"]


def test_a_hook_on_an_inherited_method_is_that_class_s_own(hook: Hook) -> None:
    seen: list[Any] = []
    installer = hook(spec("Child.by_position", enter=lambda host: seen.append(type(host).__name__)))
    assert [each().by_position(1, 2) for each in (Host, Child, Grandchild)] == [6, 6, 6]
    assert seen == ["Child", "Grandchild"]
    installer.uninstall()
    assert "by_position" not in Child.__dict__
    assert Child().by_position(1, 2) == 6
    assert seen == ["Child", "Grandchild"]


def test_methods_look_as_they_did(hook: Hook) -> None:
    before = inspect.signature(Host.plain), Host.plain.__doc__, Host.plain.__qualname__
    hook(spec("Host.plain"), spec("Host.waits", awaits=True))
    assert before == (inspect.signature(Host.plain), Host.plain.__doc__, Host.plain.__qualname__)
    assert inspect.iscoroutinefunction(Host.waits)
    assert inspect.iscoroutinefunction(Host().waits)


@pytest.mark.parametrize("name", ["static", "of_class", "value", "partly", "nothing", "__class__", "__hash__"])
def test_what_is_no_plain_method_is_refused(hook: Hook, name: str) -> None:
    """Its first argument is no instance: every argument we take would be another one."""
    installer = hook(spec(f"Host.{name}", enter=lambda host: None))
    assert installer.states[f"{MINE}:Host.{name}"].startswith("refused: ")
    assert Host.static(1, 2) == 3
    assert Host.of_class(1) == Host().value == 1


@pytest.mark.parametrize("path", ["Nobody.plain", "plain", "Host", "Hook.plain", "MINE.plain", ".", ""])
def test_what_is_no_class_is_refused(hook: Hook, path: str) -> None:
    assert hook(spec(path)).states[f"{MINE}:{path}"].startswith("refused: ")


def test_missing_arguments_are_named(hook: Hook) -> None:
    installer = hook(spec("Host.plain", takes=("request", "unheard", "of")))
    assert installer.states[f"{MINE}:Host.plain"] == f"refused: {MINE}:Host.plain has no argument unheard, of"


def test_only_a_coroutine_function_can_be_awaited(hook: Hook) -> None:
    """Awaiting what was never a coroutine would break the host."""
    installer = hook(spec("Host.plain", awaits=True))
    assert "not a coroutine function" in installer.states[f"{MINE}:Host.plain"]
    assert Host().plain(1) == 1


# ---------------------------------------------------------------- coroutines


def watching(seen: list[Any]) -> dict[str, Any]:
    return {
        "enter": lambda host, request: seen.append(("enter", request)) or "state",
        "leave": lambda state, host, result: seen.append(("leave", state, result)),
        "fail": lambda state, host, error: seen.append(("fail", state, type(error))),
        "takes": ("request",),
        "awaits": True,
    }


def test_leave_comes_after_the_coroutine(hook: Hook) -> None:
    seen: list[Any] = []
    hook(spec("Host.waits", **watching(seen)))
    host = Host()
    coroutine = host.waits(5)
    assert inspect.iscoroutine(coroutine)
    assert (seen, host.calls) == ([], [])
    assert asyncio.run(coroutine) == 5
    assert seen == [("enter", 5), ("leave", "state", 5)]
    assert host.calls == [5]


def test_leave_may_replace_what_is_awaited(hook: Hook) -> None:
    hook(spec("Host.waits", leave=lambda state, host, result: [result], awaits=True, replaces=True))
    assert asyncio.run(Host().waits(5)) == [5]


def test_their_exceptions_pass_through_coroutines(hook: Hook) -> None:
    seen: list[Any] = []
    hook(spec("Host.waits", **watching(seen)))
    error = ValueError("theirs")
    with pytest.raises(ValueError, match="theirs") as caught:
        asyncio.run(Host().waits(error))
    assert caught.value is error
    assert seen == [("enter", error), ("fail", "state", ValueError)]


@pytest.mark.parametrize("part", ["enter", "leave", "fail"])
def test_our_exceptions_stay_ours_in_coroutines(hook: Hook, part: str) -> None:
    hook(spec("Host.waits", awaits=True, **{part: fails(ZeroDivisionError("ours"))}))
    host = Host()
    for _ in range(2 * MAX_FAILURES):
        assert asyncio.run(host.waits(1)) == 1
        with pytest.raises(ValueError, match="theirs"):
            asyncio.run(host.waits(ValueError("theirs")))
    assert len(host.calls) == 4 * MAX_FAILURES


def test_a_cancelled_coroutine_is_cancelled(hook: Hook) -> None:
    seen: list[Any] = []
    hook(spec("Host.waits", **watching(seen)))

    async def cancel() -> None:
        task = asyncio.create_task(Host().waits(event := asyncio.Event()))
        while not seen:
            await asyncio.sleep(0)
        task.cancel("enough")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert seen == [("enter", event), ("fail", "state", asyncio.CancelledError)]

    asyncio.run(cancel())


def test_cancelled_before_it_began_or_never_awaited(hook: Hook) -> None:
    """Nothing of the host's has run, and there is no warning that it would not have had without us."""
    seen: list[Any] = []
    hook(spec("Host.waits", **watching(seen)))
    host = Host()

    async def cancel() -> None:
        task = asyncio.create_task(host.waits(1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    host.waits(2).close()
    assert (seen, host.calls) == ([], [])


def test_coroutines_that_run_at_the_same_time_keep_their_states(hook: Hook) -> None:
    pairs: list[Any] = []
    hook(
        spec(
            "Host.waits", enter=lambda host, request: request, takes=("request",), awaits=True,
            leave=lambda state, host, result: pairs.append((state, result)),
        )
    )  # fmt: skip

    async def together() -> list[Any]:
        return await asyncio.gather(*[Host().waits(number) for number in range(50)])

    assert asyncio.run(together()) == list(range(50))
    assert sorted(pairs) == [(number, number) for number in range(50)]


def test_unresolved_is_an_exception() -> None:
    """So that one in an import hook can be contained."""
    assert issubclass(Unresolved, Exception)
