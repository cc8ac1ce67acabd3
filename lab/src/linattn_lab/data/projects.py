"""Python projects of the package index: their wheels, kept as the zip files that they are.

Nothing is installed, built or imported. pip is asked as the machine has it configured.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Progress = Callable[..., Iterable[Any]]
BATCH = 20  # projects that pip is asked for at once
WORKERS = 2
MISSING = re.compile(r"No matching distribution found for ([A-Za-z0-9._-]+)")
# Wheels of Python alone: small, and the same on every machine.
PURE = ["--only-binary=:all:", "--platform", "any", "--implementation", "py", "--abi", "none"]


def no_progress(items: Iterable[Any], **_: object) -> Iterable[Any]:
    return items


def normal_name(name: str) -> str:
    """A project's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_wheels(folder: Path) -> dict[str, Path]:
    """The wheels in a folder by the normal name of their project; of two versions, the file that sorts last."""
    return {normal_name(path.name.partition("-")[0]): path for path in sorted(folder.glob("*.whl"))}


def fetch_wheels(
    names: Sequence[str], folder: Path, progress: Progress = no_progress, *, pure: bool = True
) -> list[str]:
    """Downloads the newest wheel of each project into `folder`; what is there already stays.

    pure: wheels of Python alone. Returns the projects that have none, or whose wheel the index did not give.
    """
    folder.mkdir(parents=True, exist_ok=True)
    here = find_wheels(folder)
    wanted = [name for name in map(normal_name, names) if name not in here]
    groups = [wanted[i : i + BATCH] for i in range(0, len(wanted), BATCH)]
    with ThreadPoolExecutor(WORKERS) as pool:
        running = [pool.submit(_download, group, folder, pure) for group in groups]
        for done in progress(as_completed(running), total=len(running), desc="wheels"):
            done.result()
    here = find_wheels(folder)
    return [name for name in map(normal_name, names) if name not in here]


def _download(names: list[str], folder: Path, pure: bool) -> None:
    """Asks pip for all, and again without the one that it does not find."""
    names = list(names)
    while names:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += [*(PURE if pure else PURE[:1]), "--dest", str(folder), *names]
        done = subprocess.run(pip, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        missing = MISSING.search(done.stderr)
        if done.returncode == 0 or missing is None or missing.group(1) not in names:
            return
        names.remove(missing.group(1))
