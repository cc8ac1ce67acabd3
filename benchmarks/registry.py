"""The registry of benchmarks: a case is a function that yields rows; a new one is one entry in one file of suites/."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure, and the bar it must reach if it has one."""

    what: str
    figure: float
    unit: str
    bar: float | None = None
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.figure >= self.bar if self.at_least else self.figure <= self.bar

    def record(self) -> dict[str, object]:
        return {**asdict(self), "met": self.met}

    def __str__(self) -> str:
        verdict = {True: "met", False: "MISSED", None: ""}[self.met]
        bar = "" if self.bar is None else f"{'>=' if self.at_least else '<='} {self.bar:g}"
        return f"{self.what:76} {self.figure:9.3g} {self.unit:15} {bar:8} {verdict}"


@dataclass(frozen=True)
class Settings:
    """quick: small sizes, to see that a case runs. budget: seconds for each group of calls that take turns."""

    quick: bool = False
    budget: float = 12.0


@dataclass(frozen=True)
class Case:
    name: str
    about: str
    run: Callable[[Settings], Iterator[Row]]
    slow: bool = False  # left out by --quick


CASES: dict[str, Case] = {}


def case(name: str, *, slow: bool = False) -> Callable[[Callable[[Settings], Iterator[Row]]], Case]:
    """Registers a function that yields rows. Its docstring says in one line what is measured."""

    def register(function: Callable[[Settings], Iterator[Row]]) -> Case:
        if name in CASES:
            raise ValueError(f"two benchmarks are called {name!r}")
        CASES[name] = made = Case(name, (function.__doc__ or "").strip().splitlines()[0], function, slow)
        return made

    return register
