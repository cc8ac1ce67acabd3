"""The tree of commands: a one-line summary of each, and where its code is."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Command:
    """A command (`module`), a group of commands (`commands`), or one that another distribution provides (`distribution`).

    Attributes:
        summary: its purpose in one line, without a full stop.
        module: has `add_arguments(parser)` and `run(args) -> int`; imported only when the command is used.
        commands: name -> Command.
        examples: for the end of a group's --help; a module describes its own.
        distribution: what to `pip install`; cli/plugins.py finds its command when it is used.
    """

    summary: str
    module: str = ""
    commands: dict[str, "Command"] = field(default_factory=dict)
    examples: str = ""
    distribution: str = ""


COMMANDS = {
    "info": Command("show versions, engines, threads and CPU features", "linattn.cli.info"),
    "compare": Command(
        "compare time, memory and error of kernels with softmax, on this machine", "linattn.cli.compare"
    ),
    "fidelity": Command("compare a pretrained model with replaced attention to the original", "linattn.cli.fidelity"),
    "explore": Command("show attention and its kernels on an interactive page", "linattn.cli.explore"),
    "generate": Command("continue a long prompt with a bounded cache", "linattn.cli.generate"),
    "serve": Command("serve a model over HTTP, with OpenAI's protocol and stored states", "linattn.cli.serve"),
    "read": Command("read a document once and save the state after it", "linattn.cli.read"),
    "ask": Command("ask about a document that was read", "linattn.cli.ask"),
    "lab": Command("the companion systems", distribution="linattn-lab"),
    "completion": Command("print a script that completes commands and options in your shell", "linattn.cli.completion"),
}
EXAMPLES = """examples:
  linattn info                                     # what this installation can use
  linattn compare --html report.html               # kernels next to softmax, on this machine, in about a minute
  linattn explore --save page.html                 # see attention and its kernels in a browser
  linattn generate --model smollm2 --prompt-file README.md
  linattn serve --model smollm2 --kernel nearfar   # a local server; documents are read once
  linattn COMMAND --help                           # options and examples of one command"""
