"""Serve a model with an OpenAI-compatible HTTP server.

    python examples/serve_http.py --model FOLDER --port 8000
    curl localhost:8000/v1/completions -d '{"prompt": "The with statement"}'

If JKV_API_KEY is set, clients must send that key. `/health` is the health check and
`/metrics` exports Prometheus metrics (`served/api.py`). `--processes 2` shards the
model over two processes (`served/processes.py`). SIGUSR1 reloads the weights of the
folder (`served/renewing.py`).
"""

import argparse

from generating.exiting import answering_errors, errors_in_one_line


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    from served import loading, processes, renewing, running

    loading.add_options(parser)
    running.add_options(parser)
    add = parser.add_argument
    add("--max-waiting", type=int, default=256, help="queue length; %(default)s")
    help_text = "scheduling weights by client (user), such as alice=2; 1"
    add("--shares", nargs="+", type=loading.read_share, default=[], help=help_text)
    add("--grammars", type=int, default=8, help="at a time; 0 disables; %(default)s")
    add("--rules", type=int, default=0, help="requests with token rules; %(default)s")
    add(
        "--tool-tags", nargs=2, metavar="TAG", help="around tool calls; <tool_call> ..."
    )
    add("--checks", action="store_true", help="check the cache after each window; slow")
    options = parser.parse_args()
    if options.api_key == "":
        parser.error("the API key is empty")
    processes.begin(parser, options, lambda: running.listen(options.host, options.port))

    from served.display import warm_up

    with answering_errors():
        served = loading.load(
            options,
            max_waiting=options.max_waiting,
            shares=dict(options.shares),
            max_grammars=options.grammars,
            max_rules=options.rules,
            tool_tags=tuple(options.tool_tags or loading.TOOL_TAGS),
            checks=options.checks,
        )
    if processes.is_follower():
        return processes.follow(served.engine, lambda: renewing.read_weights(options))
    print(f"{warm_up(served.engine)} programs are ready", flush=True)
    renewing.renew_on_signal(served, options)
    running.run(served, options)


if __name__ == "__main__":
    with errors_in_one_line():
        main()
