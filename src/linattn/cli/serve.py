"""`linattn serve`: a local server with OpenAI's protocol."""

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

from .._commandline import real, require, whole
from .model_options import add_model_options, load_served
from .models import check_model

MIB = 2**20
EXAMPLES = """examples:
  linattn serve --model smollm2 --kernel nearfar --state-dir states
  linattn serve --model ./model-folder --api-key "$KEY" --host 0.0.0.0 --max-tokens 512
  curl localhost:8080/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Hello"}]}'
  curl localhost:8080/v1/states -H 'Content-Type: text/plain' --data-binary @book.txt      # read once; then "state": id
  OPENAI_BASE_URL=http://localhost:8080/v1 OPENAI_API_KEY=none python your_program.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_model_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than loopback need --api-key")
    parser.add_argument("--port", type=whole(0, 65535), default=8080, help="0 takes a free one")
    parser.add_argument(
        "--api-key", metavar="KEY", help="clients must send it (default: $LINATTN_API_KEY, or none is needed)"
    )
    parser.add_argument(
        "--cors-origin", action="append", default=[], metavar="URL", help="pages that may call it, or *"
    )
    parser.add_argument(
        "--state-dir", type=Path, metavar="FOLDER", help="where states are saved (default: memory only)"
    )
    parser.add_argument("--state-memory", type=whole(), default=1024, metavar="MIB", help="of stored states")
    parser.add_argument("--state-disk", type=whole(), default=8192, metavar="MIB", help="of prefixes in --state-dir")
    parser.add_argument("--max-concurrent", type=whole(), default=64, metavar="N", help="answers written together")
    parser.add_argument("--max-queue", type=whole(0), default=256, metavar="N", help="requests that may wait")
    parser.add_argument("--max-tokens", type=whole(), default=1024, metavar="N", help="of one answer")
    parser.add_argument("--max-body", type=whole(), default=16, metavar="MIB", help="of one request")
    parser.add_argument("--timeout", type=real(above=0), default=600.0, metavar="S", help="seconds for one request")
    parser.add_argument("--piece", type=whole(), default=128, metavar="N", help="tokens of a prompt read at once")
    parser.add_argument(
        "--reproducible", action="store_true", help="answers do not depend on other requests to the last bit; slower"
    )
    parser.add_argument("--log-text", action="store_true", help="write prompts and answers to the log")


def run(args: argparse.Namespace) -> int:
    require("starlette", "uvicorn", "pydantic", "prometheus_client", "python_multipart")
    require("jinja2", requirement="'linattn[serve]'")
    from ..serve.middleware import is_loopback

    for origin in args.cors_origin:
        _check_origin(origin)
    key = _key(args.api_key)
    if not is_loopback(args.host) and key is None:
        raise ValueError(f"--host {args.host} is open to other machines: give an --api-key too.")
    if args.state_dir is not None:
        args.state_dir.mkdir(parents=True, exist_ok=True)
    check_model(args.model)
    with _bind(args.host, args.port) as listening:
        _serve(args, key, listening)
    return 0


def _serve(args: argparse.Namespace, key: str | None, listening: socket.socket) -> None:
    """Loads the model and answers until it is told to stop."""
    import uvicorn

    from ..serve.app import create_app
    from ..serve.limits import Limits
    from ..serve.middleware import is_loopback
    from ..serve.schedule import Schedule
    from ..serve.service import Service

    model = load_served(args, reproducible_rows=args.reproducible)
    limits = Limits(
        max_body=args.max_body * MIB,
        max_tokens=args.max_tokens,
        max_concurrent=args.max_concurrent,
        max_queue=args.max_queue,
        timeout=args.timeout,
        context=model.context,
    )
    service = Service(
        model,
        limits,
        schedule=Schedule(piece=args.piece, every=args.piece, rows=args.max_concurrent),
        memory=args.state_memory * MIB,
        folder=args.state_dir,
        disk=args.state_disk * MIB,
        reproducible=args.reproducible,
        log_text=args.log_text,
    )
    app = create_app(service, key=key, loopback=is_loopback(args.host), origins=tuple(args.cors_origin))
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("linattn.serve").setLevel(logging.INFO)
    config = uvicorn.Config(app, host=args.host, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    address, port = listening.getsockname()[:2]
    host = f"[{address}]" if ":" in address else address
    print(f"serving {service.name} ({args.kernel}) at http://{host}:{port}", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[listening])


def _key(given: str | None) -> str | None:
    """The key that clients must send, from the option or the environment; ValueError for one that none could send."""
    if given is not None and not given.strip():
        raise ValueError("--api-key is empty: no client would need a key. Leave it out if that is meant.")
    key = given or os.environ.get("LINATTN_API_KEY") or None
    if key is not None and not all("!" <= c <= "~" for c in key):
        where = "--api-key" if given else "$LINATTN_API_KEY"
        raise ValueError(
            f"{where} must be of ASCII letters, digits and signs, without spaces: no client could send it."
        )
    return key


def _check_origin(origin: str) -> None:
    """Raises ValueError for what no browser sends as an origin."""
    if origin != "*" and not origin.startswith(("http://", "https://")):
        raise ValueError(f"--cors-origin must be * or begin with http:// or https://, got {origin!r}.")
    if "/" in origin.partition("://")[2]:
        raise ValueError(f"--cors-origin is a page's scheme, host and port without a path or slash, got {origin!r}.")


def _bind(host: str, port: int) -> socket.socket:
    """The address, taken before the model is loaded; ValueError if it cannot be had."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise ValueError(f"cannot listen at --host {host} --port {port}: {error.strerror}.") from error
    return found
