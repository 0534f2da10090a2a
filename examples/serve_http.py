"""Serve a model by the completions and chat endpoints of OpenAI's API.

    python examples/serve_http.py --model FOLDER --port 8000

    curl localhost:8000/v1/completions -d '{"prompt": "The with statement"}'

`/metrics` has the numbers for Prometheus. What happens is in `served/api.py`.
"""

import argparse

from generating.ending import ending_in_one_line


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    from served.loading import add_options, load

    add_options(parser)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-waiting", type=int, default=256, help="more are refused")
    options = parser.parse_args()

    import uvicorn
    from served.api import make_app
    from served.display import warm_up

    served = load(options, max_waiting=options.max_waiting)
    print(f"{warm_up(served.engine)} programs are ready")
    uvicorn.run(make_app(served), host=options.host, port=options.port)


if __name__ == "__main__":
    with ending_in_one_line():
        main()
