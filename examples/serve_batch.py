"""Generate completions for a file of prompts; write each result when it is finished.

    python examples/serve_batch.py prompts.jsonl results.jsonl --model FOLDER

Each input line is a JSON object as in OpenAI's API: "prompt" or "messages", the fields
of docs/how-to/openai-server.md, and an "id" that is copied to the result. Lines in the
format of OpenAI's Batch API ("custom_id", "method", "url", "body") get results in that
format. If a line fails, its result has an "error" and the exit status is 1.
To resume after an interrupt, run the command again: finished results are skipped.
`--processes 2 --restarts 1` shards the model and restarts after a process has died.
"""

from generating.arguments import Parser
from generating.exiting import errors_in_one_line

COUNTS = ("max_running", "context", "max_new_tokens", "blocks", "rows")


def main():
    # Imported here so that Ctrl-C works during the imports.
    from batching.command import serve
    from served import processes
    from served.loading import add_options

    parser = Parser(__doc__)
    parser.add_argument("prompts", help="input, JSON Lines")
    parser.add_argument("results", help="output; finished results are kept")
    add_options(parser)
    options = parser.parse_args()
    for name in COUNTS:
        if (count := getattr(options, name, None)) is not None and count < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {count}")
    processes.begin(parser, options)
    serve(options)


if __name__ == "__main__":
    with errors_in_one_line():
        main()
