"""Loading of a checkpoint's tokenizer."""

from pathlib import Path

from tokenizers import Tokenizer

from .gguf_reading import find_folder


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer.json of a checkpoint folder.

    Padding and truncation are disabled: their settings are for training, and padding
    would be taken for tokens of the prompt.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file cannot be read.
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
