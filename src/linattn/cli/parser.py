"""argparse with one-line errors, suggestions, and help that shows defaults."""

import argparse
import importlib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from .._commandline import MissingExtra, did_you_mean
from .commands import COMMANDS, EXAMPLES, Command
from .plugins import resolve


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions and examples, and appends "(default X)" where the help does not say it."""

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, **{"max_help_position": 28, **options})

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if "default" in text or default is None or default is argparse.SUPPRESS or isinstance(default, bool):
            return text
        if isinstance(default, (list, tuple)):
            shown = " ".join(map(str, default)).replace("%", "%%")
            return f"{text} (default {shown})" if shown else text
        return f"{text} (default %(default)s)"


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line on stderr and exits with 2; suggests the nearest command, choice or option."""

    def __init__(self, *args: Any, **options: Any):
        options.setdefault("formatter_class", Formatter)
        super().__init__(*args, **options)

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument ([^:]+): (must )?", lambda m: f"{m[1]} must " if m[2] else f"{m[1]}: ", message)
        self.exit(2, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        hint = did_you_mean(str(value), known) or f"; choose from {', '.join(known)}"
        if action.nargs == argparse.PARSER:
            self.error(f"unknown command {str(value)!r}{hint}")
        raise argparse.ArgumentError(action, f"unknown value {str(value)!r}{hint}")

    def every_action(self) -> Iterator[argparse.Action]:
        """The arguments of this parser and of all commands under it."""
        for action in self._actions:
            yield action
            if action.nargs == argparse.PARSER and isinstance(action.choices, Mapping):
                for sub in action.choices.values():
                    yield from sub.every_action()

    def parse_words(self, words: Sequence[str], leaf: "Parser") -> argparse.Namespace:
        """The arguments; `leaf`, the parser of the command that was asked for, reports unknown arguments."""
        args, unknown = self.parse_known_args(words)
        if unknown:
            known = [option for action in leaf._actions for option in action.option_strings]
            name = unknown[0].partition("=")[0]
            leaf.error(f"unknown argument {name!r}{did_you_mean(name, known) if name.startswith('-') else ''}")
        if not hasattr(args, "run"):
            leaf.error("name a command first")
        return args


def one_line(message: str) -> str:
    return " ".join(message.split())


def build(words: Sequence[str] | None) -> tuple[Parser, Parser]:
    """The parser, and the one of the command that `words` ask for, which alone is filled in: --help stays quick.

    words: None fills in all of them.
    """
    from .. import __version__

    parser = Parser(
        prog="linattn",
        description="Attention in linear time: what it costs and what it gives, on this machine.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"linattn {__version__}")
    return parser, _add_commands(parser, COMMANDS, words)


def _add_commands(parser: Parser, commands: Mapping[str, Command], words: Sequence[str] | None) -> Parser:
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    leaf = parser
    for name, command in commands.items():
        used = words is None or name in words[:1]
        if used:
            try:
                command = resolve(name, command)
            except MissingExtra:
                if words is not None:
                    raise
                used = False  # all commands are asked for: those that are installed
        purpose = command.summary[0].upper() + command.summary[1:] + "."
        sub = subparsers.add_parser(name, help=command.summary, description=purpose, epilog=command.examples or None)
        if not used:
            continue
        if command.commands:
            leaf = _add_commands(sub, command.commands, None if words is None else words[1:])
        else:
            leaf = sub
            module = importlib.import_module(command.module)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return leaf
