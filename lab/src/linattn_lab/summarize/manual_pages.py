"""Manual pages as pairs: the DESCRIPTION, and what the NAME line says after its dash."""

import re

from .markup import LONGEST
from .roff import sections

FEWEST_WORDS = 10  # of a description; shorter ones say `see another page`
DASH = re.compile(r"\s+(?:-{1,2}|\u2013|\u2014)\s+")
OTHER = re.compile(r"^(?:this (?:man(?:ual)? )?page|manual page|documentation) (?:for|of|documents)\b", re.IGNORECASE)


def page_pair(page: str) -> tuple[str, str] | None:
    """(document, summary) of a page in roff; None where it has no name line, or too little text."""
    found = sections(page)
    name = " ".join(found.get("NAME", "").split())
    parts = DASH.split(name, maxsplit=1)
    if len(parts) != 2:
        return None
    summary = parts[1].strip().rstrip(".")
    document = found.get("DESCRIPTION", "")
    if len(document) > LONGEST:
        document = document[:LONGEST].rpartition(" ")[0]
    words = summary.split()
    if len(document.split()) < FEWEST_WORDS or not 2 <= len(words) <= 25 or OTHER.match(summary):
        return None
    if not summary.isascii() and sum(c.isascii() for c in summary) < 0.9 * len(summary):
        return None
    return document, summary
