"""Continue prompts with a checkpoint that `pretrained` reads, on a paged cache.

    python examples/generate.py "The with statement" --temperature 0.8 --seeds 3
    python examples/generate.py --file prompts.txt --model FOLDER --num-samples 2
    python examples/generate.py --chat "Why is the sky blue?" --model FOLDER --json

Prompts are arguments or lines of a file; one is streamed, several run as one batch.
The steps are in `generating/command.py`.
"""

from generating.exiting import errors_in_one_line
from generating.options import parse_arguments

if __name__ == "__main__":
    with errors_in_one_line():
        options = parse_arguments(__doc__.splitlines()[0])
        # Imported here, so that --help comes at once and Ctrl-C is answered meanwhile.
        from generating.command import generate

        generate(options)
