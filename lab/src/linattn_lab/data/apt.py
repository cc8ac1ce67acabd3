"""Downloads files of Debian packages and apt's index files, without installing anything."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from linattn._archives import last_line, unpack_tar

from .cache import DataMissing


def fetch_deb(package: str, inside: str, target: Path) -> None:
    """Downloads a Debian package with apt-get and puts the files of its folder `inside` into the folder `target`.

    Package lists are downloaded into a folder of their own, so that the machine's apt state stays as it is and no
    rights are needed.
    """
    _need("apt-get", "dpkg-deb")
    with _beside(target) as folder:
        (folder / "download").mkdir()
        apt = _updated_apt(folder / "apt", languages="none")
        _run([*apt, "download", package], f"apt-get download {package}", folder / "download")
        deb = next((folder / "download").glob("*.deb"), None)
        if deb is None:
            raise DataMissing(f"apt-get download {package} left no file")
        with open(folder / "files.tar", "wb") as tar:
            _run(["dpkg-deb", "--fsys-tarfile", str(deb)], "dpkg-deb --fsys-tarfile", stdout=tar)
        if not unpack_tar(folder / "files.tar", inside, target):
            raise DataMissing(f"the package {package} holds no {inside}")


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


def download_debs(packages: Sequence[str], target: Path, state: Path) -> list[tuple[str, Path]]:
    """Downloads packages into `target`, with apt's lists in `state`, a folder that many calls may share.

    Returns the packages that came, each with its file.
    """
    _need("apt-get", "dpkg-deb")
    apt = _updated_apt(state, languages="none") if not (state / "apt.conf").exists() else _apt(state, "none")
    _run([*apt, "download", *packages], "apt-get download", target)
    return [(path.name.partition("_")[0], path) for path in sorted(target.glob("*.deb"))]


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
    apt = _apt(folder, languages)
    _run([*apt, "update"], "apt-get update", must_succeed=False)  # a single dead source is no obstacle
    return apt


def _apt(folder: Path, languages: str) -> list[str]:
    """The words of an apt-get that keeps everything in `folder`."""
    options = {
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "Acquire::Languages": languages,
        "Acquire::GzipIndexes": "false",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "true",
    }
    apt = ["apt-get", "-qq", "-c", str(folder / "apt.conf")]
    return apt + [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A temporary folder on the target's own disk, so that moving into place is one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        yield Path(folder)


def _run(
    words: list[str],
    name: str,
    folder: Path | None = None,
    *,
    must_succeed: bool = True,
    stdout: IO[bytes] | None = None,
) -> None:
    done = subprocess.run(
        words,
        cwd=folder,
        stdout=stdout or subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if must_succeed and done.returncode:
        error = subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
        raise DataMissing(f"`{name}` failed ({last_line(error)})")
