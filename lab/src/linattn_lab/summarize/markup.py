"""Markdown and reStructuredText as plain text: what a README says, without what only a browser shows."""

import html
import re

LONGEST = 3000  # characters of a README or a manual page: what it is about stands at its beginning
M, S, I = re.MULTILINE, re.DOTALL, re.IGNORECASE
# Sections that do not say what a project is, up to the next heading.
ASIDE = re.compile(
    r"^(?:(?:how to )?install\w*|licen[sc]\w*|contribut\w+|change ?logs?|table of contents|contents|toc|requirements|links"
    r"|dependencies|support|sponsors?|authors?|credits|badges|status|build status|download|donat\w+|contact"
    r"|(?:code of conduct|versioning|citation|citing|acknowledge?ments|release notes|project links).*)\b.{0,24}$",
    I,
)
UNDERLINE = re.compile(r"^\s*([=\-~^\"'*+#`.:_])\1{2,}\s*$")
HEADING = "\x02"  # before a heading, until it is known what stands under it
PATTERNS: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"\A---\n.*?\n---\n", S), ""),
    (re.compile(r"<!--.*?-->", S), ""),
    (re.compile(r"^[ \t]*(```+|~~~+).*?^[ \t]*\1[^\n]*$", M | S), ""),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?"), r"\1"),
    (re.compile(r"<(style|script|svg|pre|table|summary)\b.*?</\1>", S | I), ""),
    (re.compile(r"<h\d[^<>]*>(.*?)</h\d>", S | I), "\n\n# \\1\n\n"),
    (re.compile(r"<(?:br|/?p|/?div|/?li|/?ul)\b[^<>]*>", I), "\n"),
    (re.compile(r"<(?:https?:|mailto:)[^<>]*>"), ""),
    (re.compile(r"</?[a-zA-Z][^<>]*>", S), ""),
    # reStructuredText: directives with what is indented under them, literal blocks, comments, marks of roles and links
    (re.compile(r"^[ \t]*\.\. +(?:\|[^|\n]*\| +)?(?:[\w:-]+::|_)[^\n]*\n(?:[ \t]*\n|[ \t]+[^\n]*\n)*", M), "\n"),
    (re.compile(r"^\.\.(?: [^\n]*)?\n(?:[ \t]+[^\n]*\n)*", M), "\n"),
    (re.compile(r"::[ \t]*\n\s*\n(?:[ \t]+[^\n]*(?:\n|\Z)|[ \t]*\n)+"), ":\n\n"),
    (re.compile(r"::[ \t]*$", M), ":"),
    (re.compile(r":[\w:+-]+:`~?\.?([^`<]*?)(?:\s*<[^`>]*>)?`"), r"\1"),
    (re.compile(r"`([^`\n]+)`__?"), r"\1"),
    (re.compile(r"^[ \t]*(?:\|[\w .+-]+\|\s*)+$", M), ""),
    (re.compile(r"(?<![\w`])_([^\s_](?:[^_\n]*[^\s_])?)_(?!\w)"), r"\1"),
    (re.compile(r"(?<=\w)_(?=[\s.,;:)])"), ""),
    # Markdown: images, links, definitions, tables, code
    (re.compile(r"!\[[^\]]*\](?:\([^)]*\)|\[[^\]]*\])"), ""),
    # lines of nothing but links are for going elsewhere
    (re.compile(r"^[ \t]*(?:[-*\u2022\u00b7|,]?[ \t]*\[[^\[\]]*\]\([^()]*\)[ \t]*[-\u2022\u00b7|,]?[ \t]*)+$", M), ""),
    (re.compile(r"\[([^\[\]]*)\](?:\([^()]*(?:\([^()]*\)[^()]*)*\)|\[[^\]]*\])"), r"\1"),
    (re.compile(r"^[ \t]*\[[^\]]+\]:.*$", M), ""),
    (re.compile(r"^[ \t]*(?:\||\+[-=+]+\+|:?-+:?[ \t]*\|).*$", M), ""),
    # the languages of a README, or its pages, in a row
    (re.compile(r"^[ \t]*[|\u2022\u00b7] .*$|^.* [|\u2022\u00b7][ \t]*$|^.*(?: [|\u2022\u00b7] .*){2,}$", M), ""),
    (re.compile(r"(?<![\w\]!\\])\[([A-Za-z][\w .+-]*)\](?![(\[:])"), r"\1"),
    (re.compile(r"^(?:\$|>>>|%|pip3? install|conda install) .*$", M), ""),
    (re.compile(r"^[ \t]*>\s?(?:\[![A-Z]+\])?", M), ""),
    (re.compile(r"(\*\*|__|``|`)(?=\S)(.+?)(?<=\S)\1", S), r"\2"),
    (re.compile(r"(?<![\w*])\*(?=[^\s*])([^*\n]+)(?<=\S)\*(?![\w*])"), r"\1"),
    (re.compile(r"https?://\S+"), ""),
    (re.compile(r"(?<!\S):[a-z0-9_+]+:(?!\S)"), ""),
    (re.compile("[\U0001f000-\U0001faff\u2600-\u27bf\ufe0f\u200d]"), ""),
]


def plain_text(text: str) -> str:
    """What a marked-up text says without code, tables, images, badges, HTML and marks.

    Headings stay, as lines of their own; sections on installation, licence and the like are left out.
    """
    text = text.replace("\r\n", "\n").expandtabs(4)
    for pattern, put in PATTERNS:
        text = pattern.sub(put, text)
    return reflow(_without_asides(_marked_headings(html.unescape(text))))


def looks_marked(text: str) -> bool:
    """Whether a text has a heading, a fence, an image or a link as Markdown or reStructuredText write them."""
    return bool(
        re.search(r"^#{1,3} \S|^```|\]\(\S+\)|^\S.*\n(?:={4,}|-{4,})$|^\.\. [\w-]+::|^<(?:p|h1|div)\b", text, M)
    )


def reflow(text: str) -> str:
    """Paragraphs on one line each, apart by an empty line, as in the text that the model has read."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part)


def _marked_headings(text: str) -> list[str]:
    """The lines, headings with a mark before them and without their own."""
    lines: list[str] = []
    for line in text.split("\n"):
        if found := re.match(r"^ {0,3}#{1,6}\s+(.*?)\s*#*$", line):
            lines += ["", HEADING + found.group(1).strip(), ""]
        elif UNDERLINE.match(line):
            title = lines[-1].strip() if lines else ""
            if title and not title.startswith(HEADING) and len(title.split()) <= 12:
                lines[-1:] = ["", HEADING + title]
            lines.append("")
        else:
            lines.append(line)
    return lines


def _without_asides(lines: list[str]) -> str:
    kept: list[str] = []
    aside = False
    for line in lines:
        if line.startswith(HEADING):
            title = line.removeprefix(HEADING).strip()
            aside = bool(ASIDE.match(re.sub(r"^[\d.\s]+", "", title)))
            line = "" if aside else title
        if not aside:
            kept.append(line)
    return "\n".join(kept)
