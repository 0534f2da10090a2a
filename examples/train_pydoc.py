"""Train the bundled model: a Llama with 2.2 million parameters, on Python's docs.

From an empty folder to a Hugging Face checkpoint, in about half an hour on two cores:

    python examples/train_pydoc.py

The script reads the corpus (`bundled/corpus.py`), trains a byte-level BPE tokenizer and
a decoder (`bundled/model.py`, `bundled/training.py`), measures the perplexity of the
held-out documents with the saved float16 weights, and writes a folder that
`generate.py` loads. A test run of a few minutes, which trains a poor model:

    python examples/train_pydoc.py --steps 20 --output /tmp/pydoc
"""

import json
import time
from pathlib import Path

from bundled import corpus
from bundled.model import CONFIG, END_OF_TEXT, FOLDER, encode, write_card
from bundled.training import train, train_tokenizer
from generating.arguments import Parser, at_least
from generating.exiting import answering_errors, errors_in_one_line

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "model_max_length": 2048,
    "clean_up_tokenization_spaces": False,
}
NUM_STEPS = 1273  # of the bundled checkpoint


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=at_least(1), default=NUM_STEPS)
    minutes = at_least(0.1, float)
    parser.add_argument("--minutes", type=minutes, help="instead of steps")
    parser.add_argument("--output", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    folder = arguments.output
    with answering_errors():
        folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()

    documents, _ = corpus.split()
    tokenizer = train_tokenizer(documents)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (("config", CONFIG), ("tokenizer_config", TOKENIZER_CONFIG)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    encoded = encode(tokenizer, documents)
    print(f"{len(encoded)} documents, {sum(map(len, encoded)):,} tokens", flush=True)

    train(encoded, arguments.steps, arguments.minutes, folder)
    print(f"trained in {(time.perf_counter() - start) / 60:.0f} min; measuring ...")
    print(write_card(folder))


if __name__ == "__main__":
    with errors_in_one_line():
        main()
