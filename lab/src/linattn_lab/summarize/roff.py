"""Manual pages as text: the sections of a page in roff, written with the macros of man or of mdoc."""

import re
import shlex
from collections.abc import Callable, Iterable

GLYPHS = {
    "aq": "'",
    "dq": '"',
    "lq": '"',
    "rq": '"',
    "oq": "'",
    "cq": "'",
    "em": " - ",
    "en": "-",
    "bu": "*",
    "co": "(c)",
}
GLYPHS |= {
    "hy": "-",
    "mi": "-",
    "rs": "\\",
    "ti": "~",
    "ha": "^",
    "ga": "`",
    "at": "@",
    "sh": "#",
    "Do": "$",
    "bv": "|",
}
GLYPHS |= {"<=": "<=", ">=": ">=", "->": "->", "mu": "x", "tm": "(tm)", "rg": "(R)", "or": "|", "ul": "_", "sl": "/"}
STRINGS = {
    "Aq": "'",
    "lq": '"',
    "rq": '"',
    'L"': '"',
    'R"': '"',
    "C`": "",
    "C'": "",
    "--": "-",
    "PI": "pi",
    "R": "(R)",
    "Tm": "(tm)",
}
ESCAPES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r'\\["#].*'), ""),  # a comment
    (re.compile(r"\\f(?:\[[^\]]*\]|\(..|.)"), ""),  # fonts
    (re.compile(r"\\s(?:[-+]?\d+|\[[^\]]*\])"), ""),  # sizes
    (re.compile(r"\\m\[[^\]]*\]|\\k.|\\[hvwXDlLZz]'[^']*'"), ""),  # colours and moves
    (re.compile(r"\\\*\[[^\]]*\]|\\\*\(..|\\\*."), lambda found: STRINGS.get(found.group()[2:].strip("[]("), "")),
    (re.compile(r"\\\[u([0-9A-Fa-f]{4,5})\]"), lambda found: chr(int(found.group(1), 16))),
    (re.compile(r"\\\[([^\]]*)\]|\\\((..)"), lambda found: GLYPHS.get(found.group(1) or found.group(2), "")),
    (re.compile(r"\\([-'`.])"), r"\1"),
    (re.compile(r"\\[ ~0]"), " "),
    (re.compile(r"\\e|\\\\"), "\0"),  # a backslash that is meant
    (re.compile(r"\\[&|^/,:%!?{}ac]|\\$"), ""),
    (re.compile(r"\0"), r"\\"),
]
BREAKS = {"PP", "P", "LP", "sp", "HP", "Pp", "SS", "Ss", "RE", "RS", "El", "Bl", "Ed", "Bd"}
ITEMS = {"TP", "IP", "It", "TQ"}
FONTS = {"B", "I", "SM", "SB", "R", "BR", "RB", "BI", "IB", "IR", "RI", "CW", "UR", "MT"}
ALTERNATING = {"BR", "RB", "BI", "IB", "IR", "RI"}
LITERAL = {
    "nf": "fi",
    "EX": "EE",
    "TS": "TE",
    "EQ": "EN",
    "PS": "PE",
    "de": ".",
    "ig": ".",
    "ie": "el",
    "Vb": "Ve",
    "DS": "DE",
}
MDOC = {
    "Ar",
    "Em",
    "Sy",
    "Li",
    "Va",
    "Vt",
    "Fa",
    "Pa",
    "Cm",
    "Ic",
    "Dv",
    "Ev",
    "Er",
    "Op",
    "Tn",
    "Ad",
    "An",
    "Ft",
    "Ns",
}
MDOC |= {
    "Bx",
    "Ux",
    "Fx",
    "Nx",
    "Ox",
    "At",
    "No",
    "Pf",
    "Ap",
    "Sx",
    "St",
    "Lb",
    "Lk",
    "Mt",
    "Ms",
    "Cd",
    "In",
    "Dl",
    "D1",
}
QUOTES = {"Dq": '"', "Sq": "'", "Ql": "'", "Qq": '"', "Aq": "", "Pq": "()", "Bq": "[]", "Brq": "{}"}


def sections(page: str) -> dict[str, str]:
    """The text of each section by its heading in capitals: paragraphs apart by an empty line; literal blocks left out."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    name, until = "", ""
    for raw in re.sub(r"\\\n", " ", page).splitlines():
        macro, rest = _macro(raw)
        if until:
            until = "" if macro == until else until
        elif macro in ("SH", "Sh"):
            lines = found.setdefault(" ".join(_arguments(rest)).upper(), [])
        elif macro in LITERAL:
            until = LITERAL[macro]
            lines.append("")
        elif not macro:
            lines.append(unescape(raw))
        else:
            words = _arguments(rest)
            if macro == "Nm":
                name = name or next((word for word in words if word not in (",", ".")), "")
            lines += _lines(macro, words, name)
    return {heading: _paragraphs(part) for heading, part in found.items()}


def _lines(macro: str, words: list[str], name: str) -> list[str]:
    """What a macro and its arguments say: a line, or none. name: what .Nm stands for."""
    if macro == "Nm":
        return [_mdoc(words, name) if words and words[0] not in (",", ".") else name + "".join(words)]
    if macro == "Nd":
        return ["- " + " ".join(words)]
    if macro == "Xr":
        return [f"{words[0]}({words[1]})" + "".join(words[2:3]) if len(words) > 1 else " ".join(words)]
    if macro in BREAKS:
        return [""]
    if macro in ITEMS:
        return ["\n" + (_mdoc(words, name) if macro == "It" else _tag(macro, words))]
    if macro in FONTS:
        return [("" if macro in ALTERNATING else " ").join(words)]
    return [_mdoc([macro, *words], name)] if macro in MDOC or macro in QUOTES or macro in ("Fl", "Fn") else []


def unescape(line: str) -> str:
    """A line without roff's escapes."""
    for pattern, put in ESCAPES:
        line = pattern.sub(put, line)
    return line


def _macro(line: str) -> tuple[str, str]:
    """The macro of a line and its arguments; no macro for a line of text, `-` for a comment."""
    if not line.startswith((".", "'")):
        return "", line
    word, _, rest = line[1:].strip().partition(" ")
    if word.startswith(".") and not word.strip("."):
        return ".", ""
    return ("-" if not word or word.startswith(("\\", '"')) else word), rest.strip()


def _arguments(rest: str) -> list[str]:
    """Words, quoted ones together."""
    rest = re.sub(r'\s*\\".*', "", rest)
    try:
        lexer = shlex.shlex(rest, posix=True)
        lexer.whitespace_split, lexer.quotes, lexer.escape, lexer.commenters = True, '"', "", ""
        words = list(lexer)
    except ValueError:
        words = rest.replace('"', "").split()
    return [unescape(word) for word in words]


def _tag(macro: str, words: list[str]) -> str:
    return f"{words[0]} " if macro == "IP" and words and words[0] not in ("*", "o", "-", "") else ""


def _mdoc(words: Iterable[str], name: str) -> str:
    """mdoc's inline macros as text: options get their dash, quoted words their quotes, marks no blank before them."""
    said: list[str] = []
    closing: list[str] = []
    dash = glue = False
    for word in words:
        if word == "Fl":
            dash = True
        elif word == "Ns":
            glue = True
        elif word == "Nm":
            said.append(name)
        elif word in QUOTES:
            mark = QUOTES[word]
            said.append(mark[:1] + "\0")
            closing.append(mark[-1:])
        elif word in MDOC or word in ("Fn", "Xr", "-nosplit", "Bk", "Ek"):
            dash = False
        elif re.fullmatch(r"[.,:;)!?\]]", word) and said:
            said[-1] += "".join(reversed(closing)) + word
            closing = []
        else:
            word = ("-" if dash else "") + word
            if glue and said:
                said[-1] += word
            else:
                said.append(word)
            glue = False
    return " ".join(said).replace("\0 ", "").replace("\0", "") + "".join(reversed(closing))


def _paragraphs(lines: list[str]) -> str:
    parts = re.split(r"\n\s*\n", "\n".join(line.strip() if line.strip() else line[:1] and "" for line in lines))
    return "\n\n".join(" ".join(part.split()) for part in parts if part.strip())
