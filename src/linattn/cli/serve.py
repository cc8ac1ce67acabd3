"""`linattn serve`: a local server with OpenAI's protocol."""

import argparse
import logging
import os
import sys
from pathlib import Path

from .._commandline import real, require, whole
from .model_options import add_model_options, load_served

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

    if args.api_key is not None and not args.api_key.strip():
        raise ValueError("--api-key is empty: no client would need a key. Leave it out if that is meant.")
    for origin in args.cors_origin:
        if origin != "*" and not origin.startswith(("http://", "https://")):
            raise ValueError(f"--cors-origin must be * or begin with http:// or https://, got {origin!r}.")
    key = args.api_key or os.environ.get("LINATTN_API_KEY") or None
    if not is_loopback(args.host) and key is None:
        raise ValueError(f"--host {args.host} is open to other machines: give an --api-key too.")
    if args.state_dir is not None:
        args.state_dir.mkdir(parents=True, exist_ok=True)
    import uvicorn

    from ..serve.app import create_app
    from ..serve.limits import Limits
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
    config = uvicorn.Config(
        app, host=args.host, port=args.port, log_level="warning", access_log=False, timeout_graceful_shutdown=5
    )
    listening = config.bind_socket()
    address, port = listening.getsockname()[:2]
    host = f"[{address}]" if ":" in address else address
    print(f"serving {service.name} ({args.kernel}) at http://{host}:{port}", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[listening])
    return 0
