"""Commands that other distributions provide, found by their entry points."""

from importlib.metadata import entry_points

from .._commandline import MissingExtra
from .commands import Command

GROUP = "linattn.commands"


def resolve(name: str, command: Command) -> Command:
    """The command itself, or what the distribution that provides it registered under `name`: a Command.

    Raises MissingExtra, with the pip command, if the distribution is not installed.
    """
    if not command.distribution:
        return command
    for entry in entry_points(group=GROUP, name=name):
        found = entry.load()
        if not isinstance(found, Command):
            raise TypeError(f"the entry point {entry.value} is a {type(found).__name__}; it must be a Command.")
        return found
    raise MissingExtra(f"not installed: pip install {command.distribution}")
