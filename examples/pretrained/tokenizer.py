"""The tokenizer of a checkpoint."""

from pathlib import Path

from tokenizers import Tokenizer

from .gguf_reading import find_folder


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the tokenizer.json of a checkpoint folder.

    Its settings of padding and truncation are for training, and are switched off: a
    model would take the padding for text.

    Raises:
        FileNotFoundError: when there is none.
        ValueError: when it cannot be read.
    """
    path = find_folder(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; older formats (tokenizer.model, vocab.json) must be "
            "converted to it first"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a readable tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
