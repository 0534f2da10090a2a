"""Continue a file of prompts, and write each result as soon as it is there.

    python examples/serve_batch.py prompts.jsonl results.jsonl --model FOLDER

Each line of the first file is a JSON object in the form of OpenAI's API: "prompt" or
"messages", the fields of docs/how-to/openai-server.md and an "id", which the result
repeats. Lines of OpenAI's batches ("custom_id", "method", "url", "body") are answered
in that form. A line that cannot be answered gets an "error", and the exit status is 1.
Results in the second file are not computed again: rerun the command after an interrupt.
`--processes 2 --restarts 1` shares the model and resumes after a process has died.
"""

from generating.arguments import Parser
from generating.exiting import errors_in_one_line

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
    with errors_in_one_line():
        main()
