"""Running a published command anew, and comparing what it prints now."""

import os
import resource
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .figure import Figure
from .published import Published, read_figures

LINATTN = (sys.executable, "-m", "linattn")


@dataclass(frozen=True)
class Row:
    """A published figure beside a fresh one; `now` is None where the fresh run has no such figure."""

    key: str
    published: Figure
    now: float | None

    @property
    def moved(self) -> bool:
        return self.now is None or self.published.moved(self.now)


def compare(published: dict[str, Figure], now: dict[str, Figure]) -> list[Row]:
    """A row for each published figure."""
    return [Row(key, one, now[key].value if key in now else None) for key, one in published.items()]


def unpublished(published: dict[str, Figure], now: dict[str, Figure]) -> list[str]:
    """Keys that the command prints and the docs do not."""
    return [key for key in now if key not in published]


def rerun(published: Published, folder: Path) -> tuple[dict[str, Figure], float]:
    """The figures of a fresh run in a folder, and the minutes of one core that it took.

    The folder is where the command keeps what it trains: an empty one makes everything anew.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = (folder / "figures.json").resolve()
    target.unlink(missing_ok=True)
    before = _seconds()
    commands = [shlex.split(part) for part in published.command.split("&&")]
    commands[-1] += ["--figures", str(target)]
    for words in commands:
        if words[:2] != ["linattn", "lab"]:
            raise ValueError(f"{published.name}: a command begins with `linattn lab`, got {shlex.join(words)!r}.")
        log = folder / "log.txt"
        with log.open("a") as output:
            done = subprocess.run(
                [*LINATTN, *words[1:]],
                cwd=folder,
                env=os.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if done.returncode != 0:
            said = log.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(
                f"`{shlex.join(words)}` ended with code {done.returncode}: {said[-1] if said else 'no output'}"
            )
    return read_figures(target), (_seconds() - before) / 60


def _seconds() -> float:
    """Processor time of all commands that were run so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
