"""Serve a model by the completions and chat endpoints of OpenAI's API.

    python examples/serve_http.py --model FOLDER --port 8000
    curl localhost:8000/v1/completions -d '{"prompt": "The with statement"}'

With JKV_API_KEY in the environment clients need that key. `/health` says that the
server is there, `/metrics` has numbers for Prometheus (`served/api.py`). `--processes
2` shares the model among processes (`served/processes.py`). SIGUSR1 reads the weights
of the folder anew (`served/renewing.py`).
"""

import argparse

from generating.exiting import answering_errors, errors_in_one_line


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    from served import loading, processes, renewing, running

    loading.add_options(parser)
    running.add_options(parser)
    add = parser.add_argument
    add("--max-waiting", type=int, default=256, help="more are refused; %(default)s")
    said = "of the fields user, such as alice=2; 1 for the others"
    add("--shares", nargs="+", type=loading.read_share, default=[], help=said)
    add("--grammars", type=int, default=8, help="at one time; 0: none; %(default)s")
    add("--rules", type=int, default=0, help="requests with biases, bans; %(default)s")
    add("--tool-tags", nargs=2, metavar="TAG", help="around a call; <tool_call> ...")
    add("--checks", action="store_true", help="of the cache after each window; slow")
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
    renewing.renew_when_asked(served, options)
    running.run(served, options)


if __name__ == "__main__":
    with errors_in_one_line():
        main()
