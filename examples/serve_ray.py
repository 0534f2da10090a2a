"""Serve a model by several replicas on Ray, behind one address.

    python examples/serve_ray.py --model FOLDER --replicas 2
    python examples/serve_ray.py --model FOLDER --replicas 1-8 --address auto
    python examples/serve_ray.py --model FOLDER --address auto --weights NEWER

The endpoint is that of `serve_http.py`. A request goes to the replica that has most of
its beginning, else to the one with most free blocks. The second form joins a cluster,
where the number of replicas follows the load; the third gives running replicas other
weights, one after the other. The code is in `replicated/`.
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
    add, said = parser.add_argument, "of a replica; %(default)s"
    add("--replicas", type=read_range, default=(2, 2), help="a number, or 1-8; 2")
    add("--address", help="of a cluster of Ray, or auto; else one on this machine")
    add("--weights", help="another folder of the same model's weights")
    add("--host", default="127.0.0.1", help="0.0.0.0: from everywhere; %(default)s")
    add("--port", type=number, default=8000, help="%(default)s")
    add("--max-waiting", type=at_least(1), default=256, help=said)
    add("--grammars", type=number, default=8, help="at one time, " + said)
    add("--kept-texts", type=number, default=64, help="that a pool keeps; %(default)s")
    add("--cpus", type=amount, default=1.0, help=said)
    add("--gpus", type=amount, default=0.0, help=said)
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
        # The cluster on this machine ends with this process.
        is_over = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: is_over.set())
        is_over.wait()
        serve.shutdown()


def read_range(text):
    """Read `3` or `1-8`."""
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
