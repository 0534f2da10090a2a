"""Measure the bundled model: perplexity on held-out documents and sample completions.

    python examples/measure_pydoc.py

Writes the last section of the model card, and prints it.
"""

from pathlib import Path

from bundled.model import FOLDER, write_card
from generating.arguments import Parser
from generating.exiting import answering_errors, errors_in_one_line


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--model", type=Path, default=FOLDER, help="the folder of the model"
    )
    options = parser.parse_args()
    with answering_errors():
        print(write_card(options.model))


if __name__ == "__main__":
    with errors_in_one_line():
        main()
