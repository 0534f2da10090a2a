"""Continue a file of prompts, and write each result as soon as it is there.

    python examples/serve_batch.py prompts.jsonl results.jsonl --model FOLDER

A line of the first file is an object in the words of OpenAI's API: "prompt" or
"messages", and what else docs/how-to/http.md says of a text; and an "id", which its
result has, too. Lines of OpenAI's batches ("custom_id", "method", "url", "body") are
answered in that form. A line that cannot be answered has an "error" as its result; then
the exit status is 1. What is in the second file is not computed again: run it again
after an interrupt. `--processes 2 --restarts 1` shares the model, and goes on by itself
after a process has died. What happens is in `batching/command.py`.
"""

from generating.arguments import Parser
from generating.ending import ending_in_one_line

COUNTS = ("max_running", "context", "max_new_tokens", "blocks", "rows")


def main():
    # Imported here, so that Ctrl-C is answered meanwhile.
    from batching.command import serve
    from served import processes
    from served.loading import add_options

    parser = Parser(__doc__)
    parser.add_argument("prompts", help="lines of JSON")
    parser.add_argument("results", help="where to; what is there is gone on with")
    add_options(parser)
    options = parser.parse_args()
    for name in COUNTS:
        if (count := getattr(options, name, None)) is not None and count < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {count}")
    processes.begin(parser, options)
    serve(options)


if __name__ == "__main__":
    with ending_in_one_line():
        main()
