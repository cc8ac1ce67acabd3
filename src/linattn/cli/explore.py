"""`linattn explore`: a page on which one sees kernel attention."""

import argparse
from typing import Any

from .._commandline import add_output, require, whole, words
from .._files import write_text
from .models import HELP, check_model, load_model, read_text

EXAMPLES = """examples:
  linattn explore                                          serves the page; Ctrl-C ends it
  linattn explore --model smollm2                          with every layer and head of a model, on your own text
  linattn explore --save page.html                         one file that works offline
  linattn explore --save page.html --model smollm2 --layers 5 17 --text-file README.md --length 256
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_output(parser, "--save", "write the page to one file instead of serving it", suffixes=(".html", ".htm"))
    parser.add_argument("--port", type=whole(0, 65535), default=8765, metavar="N", help="of the server; 0 takes any")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("--model", help=f"show its heads: {HELP}")
    parser.add_argument(
        "--layers",
        type=whole(0),
        nargs="+",
        metavar="N",
        help="layers to save, or to start with (default: the middle one)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--text", type=words, metavar="TEXT", help="what the model reads first (default: a short story)"
    )
    source.add_argument("--text-file", metavar="FILE", help="the same, from a file")
    parser.add_argument("--length", type=whole(2, 2048), default=2048, metavar="N", help="tokens of it at most")
    parser.add_argument(
        "--times", action="store_true", help="with --save: also measure times on this machine, a few seconds"
    )


def run(args: argparse.Namespace) -> int:
    require("jinja2")
    if args.model:
        check_model(args.model)
    elif args.layers or args.text is not None or args.text_file:
        raise ValueError("--layers, --text and --text-file go with --model: name a model.")
    if args.text is not None and not args.text.strip():
        raise ValueError("--text is empty.")
    if args.times and not args.save:
        raise ValueError("--times goes with --save; the served page measures at the press of a button.")
    from ..explore.page import explorer_page, sample_heads

    text = sample_heads()["text"] if args.text is None else args.text
    if args.text_file is not None:
        text = read_text(args.text_file)

    reader = _Reader(args.model, args.length) if args.model else None
    heads = reader.heads(text, args.layers) if reader else None
    if args.save:
        return _save(args, heads)
    from ..explore.server import make_server

    answers: dict[str, Any] = {"/api/times": _times}
    if reader:
        answers["/api/heads"] = reader.answer
    page = explorer_page(heads=heads, live={"model": args.model, "times": True})
    return _serve(make_server(page, answers, args.port), args.open)


def _save(args: argparse.Namespace, heads: dict[str, Any] | None) -> int:
    from ..explore.page import explorer_page
    from ..explore.times import measure_times

    times = None
    if args.times:
        times = measure_times({"kernel": "positive", "features": 64, "causal": True}, 64)
    page = explorer_page(heads=heads, times=times)
    write_text(args.save, page)
    print(f"page: {args.save} ({len(page.encode()) / 2**20:.2f} MB)")
    return 0


def _serve(server: Any, open_browser: bool) -> int:
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    print(f"{address}  (Ctrl-C ends it)", flush=True)
    if open_browser:
        import webbrowser

        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0


def _times(question: dict[str, Any]) -> dict[str, Any]:
    from ..explore.times import measure_times

    return measure_times(question["settings"], int(question["dim"]))


class _Reader:
    """A loaded model that gives the heads of a layer on any text."""

    def __init__(self, name: str, length: int):
        from ..hf.heads import layer_numbers

        self.name, self.length = name, length
        self.model, self.tokenizer = load_model(name)
        self.layers = layer_numbers(self.model)

    def heads(self, text: str, layers: list[int] | None) -> dict[str, Any]:
        from ..hf.heads import capture_heads

        chosen = layers or [self.layers[len(self.layers) // 2]]
        return capture_heads(self.model, self.tokenizer, text, chosen, tokens=self.length, name=self.name)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        return self.heads(str(question["text"]), [int(question["layer"])])
