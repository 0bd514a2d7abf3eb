"""A Triton backend that has the name `cpu` and nothing else. For tests; see ../../README.md."""

from __future__ import annotations

from typing import Any


def refuse_the_rest(backend: type) -> None:
    """Make every abstract method of ``backend`` raise: kernels run in the interpreter and never come here."""

    def refusing(name: str) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"{backend.__name__}.{name}: this backend only has a name; set TRITON_INTERPRET=1")

        return refuse

    for name in backend.__abstractmethods__:  # type: ignore[attr-defined]
        setattr(backend, name, refusing(name))
    backend.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
