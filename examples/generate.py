"""Generate completions of prompts with a checkpoint, on a paged cache.

    python examples/generate.py "The with statement" --temperature 0.8 --seeds 3
    python examples/generate.py --file prompts.txt --model FOLDER --num-samples 2
    python examples/generate.py --chat "Why is the sky blue?" --model FOLDER --json

Prompts are arguments or the lines of a file. A single completion is streamed; several
prompts run as one batch. The code is in `generating/command.py`.
"""

from generating.exiting import errors_in_one_line
from generating.options import parse_arguments

if __name__ == "__main__":
    with errors_in_one_line():
        options = parse_arguments(__doc__.splitlines()[0])
        # Imported here so that --help is fast and Ctrl-C works during the imports.
        from generating.command import generate

        generate(options)
