"""Looking targets up: in source alone, as ``doctor`` does, it must say what it says of the imported module."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stagetrace.hooks import HookSpec
from stagetrace.hooks.install import resolve
from stagetrace.hooks.resolve import Unresolved, live, parsed, ready, split, static
from tests.unit.helpers import Engine

Engines = Callable[..., Engine]

SOURCE = """
    import functools
    from .parent import Base as Parent, Elsewhere
    from . import parent

    def decorator(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            return function(*args, **kwargs)
        return inner

    class Thing(Parent):
        attribute = 5
        class Inner: pass
        def plain(self, first, second=2, *rest, third, fourth=4, **more): pass
        def position(self, first, /, second): pass
        def alone(self): pass
        async def waits(self, first): pass
        @decorator
        def decorated(self, first): pass
        @staticmethod
        def static(first): pass
        @classmethod
        def of_class(cls, first): pass
        @property
        def value(self): pass
        @functools.cached_property
        def cached(self): pass
        if True:
            def conditional(self, first): pass
        else:
            def conditional(self): pass
        try:
            import nothing_of_that_name
            def tried(self): pass
        except ImportError:
            def tried(self, first): pass
        def twice(self): pass
        def twice(self, first): pass

    if True:
        class Conditional:
            def plain(self): pass
    number = 5
"""
PARENT = """
    class Grand:
        def oldest(self, first): pass
    class Base(Grand):
        def inherited(self, first): pass
        def plain(self): pass
    class Elsewhere:
        def plain(self, first): pass
"""


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("Thing.plain", ["first", "second", "third", "fourth"]),
        ("Thing.position", ["first", "second"]),
        ("Thing.alone", []),
        ("Thing.waits", ["first"]),
        ("Thing.decorated", ["first"]),
        ("Thing.tried", ["first"]),
        ("Thing.twice", ["first"]),
        ("Thing.inherited", ["first"]),
        ("Thing.oldest", ["first"]),
        ("Elsewhere.plain", ["first"]),
        ("Conditional.plain", []),
    ],
)
def test_source_and_module_agree_on_what_is_there(engine: Engines, path: str, names: list[str]) -> None:
    made = engine(thing=SOURCE, parent=PARENT)
    target = made.target(f"thing:{path}")
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    assert static(target, names) == names
    assert f"{made.name}.thing" not in sys.modules
    made.load("thing")
    owner, name, parameters = live(target, names)
    assert sorted(p.name for p in parameters if p.kind not in variadic) == sorted(names)
    assert (owner.__name__, name) == tuple(path.split("."))


@pytest.mark.parametrize(
    "path",
    ["Thing.nothing", "Thing.attribute", "Thing.Inner", "Thing.static", "Thing.of_class", "Thing.value",
     "Thing.cached", "Nothing.plain", "decorator.plain", "number.plain", "parent.plain", "plain", ""],
)  # fmt: skip
def test_source_and_module_agree_on_what_is_not(engine: Engines, path: str) -> None:
    made = engine(thing=SOURCE, parent=PARENT)
    target = made.target(f"thing:{path}")
    with pytest.raises(Unresolved) as from_source:
        static(target)
    made.load("thing")
    with pytest.raises(Unresolved) as from_module:
        live(target)
    for caught in (from_source, from_module):
        assert made.name in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("how", ["source", "module"])
def test_arguments_and_coroutines_are_looked_at(engine: Engines, how: str) -> None:
    made = engine(thing=SOURCE, parent=PARENT)
    if how == "module":
        made.load("thing")

    def why(path: str, *takes: str, awaits: bool = False) -> str:
        with pytest.raises(Unresolved) as caught:
            resolve(HookSpec(made.target(f"thing:{path}"), takes=takes, awaits=awaits))
        return str(caught.value)

    assert why("Thing.plain", "first", "fifth", "self").endswith("Thing.plain has no argument fifth, self")
    assert why("Thing.plain", awaits=True).endswith("Thing.plain is not a coroutine function")
    waits = made.target("thing:Thing.waits")
    assert resolve(HookSpec(waits, takes=("first",), awaits=True)) == waits


def test_the_first_place_that_exists(engine: Engines) -> None:
    made = engine(thing=SOURCE, parent=PARENT)
    here, gone, nowhere = (made.target(path) for path in ("thing:Thing.alone", "thing:Thing.gone", "no:Thing.gone"))
    assert resolve(HookSpec(here, otherwise=(gone,))) == here
    assert resolve(HookSpec(gone, otherwise=(nowhere, here))) == here
    with pytest.raises(Unresolved, match=r"Thing has no gone"):
        resolve(HookSpec(gone, otherwise=(nowhere,)))


def test_another_directory_s_source(tmp_path: Path) -> None:
    """``doctor`` and the contract tests look at engines that are not installed."""
    for version, argument in (("1", "old"), ("2", "new")):
        package = tmp_path / version / "engine_elsewhere" / "core"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"class Thing:\n    def run(self, {argument}): pass\n")
        assert static("engine_elsewhere.core:Thing.run", root=tmp_path / version) == [argument]
    with pytest.raises(Unresolved, match=r"no module engine_elsewhere\.gone"):
        static("engine_elsewhere.gone:Thing.run", root=tmp_path / "1")
    with pytest.raises(Unresolved, match="engine_elsewhere is not installed"):
        static("engine_elsewhere.core:Thing.run")


def test_a_parent_whose_source_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(
        "from elsewhere import Base\nclass Thing(Base, 5): pass\nclass Loop(Loop): pass"
    )
    for path in ("Thing.run", "Loop.run"):
        with pytest.raises(Unresolved, match="has no run"):
            static(f"engine:{path}", root=tmp_path)


def test_a_single_file_is_a_module_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "single_file_engine.py").write_text("class Thing:\n    def run(self, one): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert static("single_file_engine:Thing.run") == ["one"]
    parsed.cache_clear()


def test_ready() -> None:
    assert ready("sys")
    assert ready("stagetrace")
    assert not ready("a.module.nobody.has")


@pytest.mark.parametrize(
    ("target", "parts"),
    [("a.b:C.d", ("a.b", "C", "d")), ("a:d", ("a", "", "d")), ("a", ("a", "", "")), ("", ("", "", ""))],
)
def test_split(target: str, parts: tuple[str, str, str]) -> None:
    assert split(target) == parts
