"""Writes the texts for measuring the fidelity of near/far, from Debian packages.

    python benchmarks/texts.py out/texts

calibration.txt (the jargon file) is for `linattn.hf.calibrate`; five others, of other kinds, were
used while the method was developed. fresh-*.txt are eight held-out texts: of the same kinds, and JSON,
tracebacks and C headers.
"""

import argparse
import ast
import datetime
import decimal
import fractions
import gzip
import html.entities
import html.parser
import inspect
import json
import re
import subprocess
import tarfile
import tempfile
import traceback
import unicodedata
import zlib
from pathlib import Path

PACKAGES = ("anarchism", "jargon-text", "bible-kjv", "bible-kjv-text", "r-cran-janeaustenr")
LICENCES = ("GPL-2", "LGPL-2.1", "LGPL-2", "GPL-1", "GPL-3", "GFDL-1.2", "GFDL-1.3")
# Every Debian has these. The short ones first: the same notice comes again and again.
NOTICES = ("grep", "tar", "coreutils", "apt", "dpkg", "sed", "bash", "util-linux")


class _Prose(html.parser.HTMLParser):
    """The text of a page's paragraphs."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.parts = 0, []

    def handle_starttag(self, tag, attrs):
        if tag == "p":
            self.open, self.parts = 1, [*self.parts, "\n\n"]

    def handle_endtag(self, tag):
        if tag in ("p", "body"):
            self.open = 0

    def handle_data(self, data):
        if self.open:
            self.parts.append(" ".join(data.split()) + " ")


def unpack(folder: Path) -> None:
    """Downloads the Debian packages and unpacks them into a folder, without installing anything."""
    subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=folder, check=True, capture_output=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)


def manual(name: str) -> str:
    page = ["man", name]
    environment = {"MANWIDTH": "80", "PATH": "/usr/bin:/bin"}
    return subprocess.run(page, check=True, capture_output=True, text=True, env=environment).stdout


def bible(folder: Path, verses: str) -> str:
    command = [folder / "usr/bin/bible", "-p", folder / "usr/lib", "-f", verses]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return "\n".join(verse.split(" ", 1)[1] for verse in found if " " in verse)


def novel(folder: Path, title: bytes) -> str:
    """The lines of one of Jane Austen's novels, which Debian has as a data file of R."""
    packed = (folder / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    while packed:  # every object: a length of 4 bytes, then a zlib stream
        stream = zlib.decompressobj()
        found, packed = stream.decompress(packed[4:]), stream.unused_data
        if title in found[:100]:  # a line: flags, a length of 4 bytes, characters
            lines = re.findall(rb"\x00\x04\x00\t\x00\x00\x00.([^\x00]*)", found, re.DOTALL)
            return b"\n".join(lines).decode()
    raise ValueError(f"there is no novel {title!r} among Jane Austen's.")


def entities() -> str:
    """JSON: the named characters of HTML."""
    rows = {
        name: {
            "characters": text,
            "names": [unicodedata.name(x, "?") for x in text],
            "codepoints": [ord(x) for x in text],
        }
        for name, text in sorted(html.entities.html5.items())
    }
    return json.dumps(rows, indent=2)


def tracebacks() -> str:
    """What Python says of numbers, dates and documents that are none."""
    wrong = [
        "twelve",
        "3,5",
        "",
        "2024-13-01",
        "{'a': 1}",
        "[1, 2",
        "10:61",
        "0x",
        "--",
        "nan nan",
        "4 March",
        "1e",
        "7/",
    ]
    readers = (json.loads, decimal.Decimal, fractions.Fraction, datetime.date.fromisoformat, ast.literal_eval, int)
    found = []
    for i, text in enumerate(wrong):
        for reader in readers:
            try:
                reader(text)
            except (ValueError, SyntaxError, ArithmeticError):
                found.append(f"ERROR job {17 * i % 101}: cannot read {text!r}\n{traceback.format_exc()}")
    return "\n".join(found)


def headers() -> str:
    return "\n".join(
        (Path("/usr/include") / name).read_text() for name in ("stdlib.h", "string.h", "stdio.h", "math.h")
    )


def fresh(folder: Path) -> dict[str, str]:
    notices = [(Path("/usr/share/doc") / name / "copyright").read_text() for name in NOTICES]
    return {
        "fresh-prose": novel(folder, b"MANSFIELD PARK"),
        "fresh-manual": manual("tar"),
        "fresh-code": inspect.getsource(tarfile),
        "fresh-old-english": bible(folder, "Luke1:1-Acts28:31"),
        "fresh-licences": "\n".join(notices),
        "fresh-json": entities(),
        "fresh-tracebacks": tracebacks(),
        "fresh-headers": headers(),
    }


def texts(folder: Path) -> dict[str, str]:
    share = folder / "usr/share/doc"
    pages = _Prose()
    for name in ("secA1", "secA2", "secI1", "secJ3"):
        pages.feed((share / f"anarchism/html/{name}.html").read_text(errors="replace"))
    licences = [(Path("/usr/share/common-licenses") / name).read_text() for name in LICENCES]
    return {
        "prose": "".join(pages.parts).strip(),
        "manual": manual("bash"),
        "code": inspect.getsource(argparse),
        "old-english": bible(folder, "Ruth1:1-Job42:17"),
        # Their openings first: they repeat each other almost word for word, so that even a short stretch repeats itself.
        "licences": "\n".join([text[:2800] for text in licences] + licences),
        "calibration": gzip.decompress((share / "jargon-text/jargon.txt.gz").read_bytes()).decode(errors="replace")[
            40000:
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        unpack(Path(name))
        for kind, text in {**texts(Path(name)), **fresh(Path(name))}.items():
            (folder / f"{kind}.txt").write_text(text)
            print(f"{folder / kind}.txt: {len(text)} characters")


if __name__ == "__main__":
    main()
