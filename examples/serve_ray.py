"""Serve several replicas of a model on Ray, behind one address.

    python examples/serve_ray.py --model FOLDER --replicas 2
    python examples/serve_ray.py --model FOLDER --replicas 1-8 --address auto
    python examples/serve_ray.py --model FOLDER --address auto --weights NEWER

The endpoints are those of `serve_http.py`. A request goes to the replica with the
longest cached prefix, else to the one with the most free blocks. The second command
joins a cluster and scales the number of replicas with the load. The third loads new
weights into running replicas, one after the other. The code is in `replicated/`.
"""

import argparse
import os
import signal
import threading

from generating.arguments import Parser, at_least
from generating.exiting import FAILED, errors_in_one_line, fail


def main():
    parser, number, amount = Parser(__doc__), at_least(0), at_least(0, float)
    from served.loading import add_options

    add_options(parser, may_share=False)
    add, help_text = parser.add_argument, "per replica; %(default)s"
    add("--replicas", type=read_range, default=(2, 2), help="number, or range 1-8; 2")
    add("--address", help="address of a Ray cluster, or auto; default: a local one")
    add("--weights", help="load weights of the same model from this folder")
    add("--host", default="127.0.0.1", help="0.0.0.0 for all interfaces; %(default)s")
    add("--port", type=number, default=8000, help="%(default)s")
    add("--max-waiting", type=at_least(1), default=256, help=help_text)
    add("--grammars", type=number, default=8, help="at a time, " + help_text)
    add(
        "--kept-sequences",
        type=number,
        default=64,
        help="kept in each pool; %(default)s",
    )
    add("--cpus", type=amount, default=1.0, help=help_text)
    add("--gpus", type=amount, default=0.0, help=help_text)
    options = parser.parse_args()
    try:
        from ray import serve
        from replicated.application import join_cluster, make_application, run
    except ImportError as error:
        fail(FAILED, f"{error}; pip install '.[ray]' has it")

    join_cluster(options.address)
    run(
        make_application(options, api_key=os.environ.get("JKV_API_KEY")),
        options.host,
        options.port,
    )
    print(f"http://{options.host}:{options.port} answers", flush=True)
    if options.address is None:
        # The local cluster ends with this process.
        is_over = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: is_over.set())
        is_over.wait()
        serve.shutdown()


def read_range(text):
    """Parse `3` or `1-8` as the minimum and maximum."""
    try:
        least, _, most = text.partition("-")
        found = int(least), int(most or least)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"must be 3 or 1-8, got {text!r}")
    return found


if __name__ == "__main__":
    with errors_in_one_line():
        main()
