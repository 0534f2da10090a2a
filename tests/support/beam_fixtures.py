"""Texts and scores that transformers' beam search finds, for `test_beam_parity.py`.

    PYTHONPATH=tests python tests/support/beam_fixtures.py

writes ``tests/fixtures/beams.json``. ``transformers`` is imported only when something
is written; the parity test compares the committed results with new ones where it is
installed.
"""

import json
from typing import Any, NamedTuple

import numpy as np

from support import checkpoint_fixtures as checkpoints
from support.paths import FIXTURES

FIXTURE = FIXTURES / "beams.json"
NEW_TOKENS = 16
TEXTS = (
    "A class that",
    "Return a list of the names that",
    "The with statement is used",
)


class Search(NamedTuple):
    """A checkpoint, and how it is searched: one program for all of its penalties."""

    name: str
    num_beams: int
    early_stopping: bool | str
    penalties: tuple[float, ...]


# One beam is greedy search; windows (mistral, qwen2) and text (pydoc).
SEARCHES = (
    Search("llama2", 4, False, (1.0, 0.0)),
    Search("qwen2", 8, True, (1.0, -1.0)),
    Search("pydoc", 3, "never", (2.0, 0.0, -0.5)),
    Search("mistral", 1, "never", (1.0,)),
)


def prompts_and_stops(name: str) -> tuple[list[list[int]], list[int]]:
    """Prompts of unequal lengths, and tokens that end a text now and then."""
    if name == "pydoc":
        import tokenizers

        path = checkpoints.PYDOC / "tokenizer.json"
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        return [tokenizer.encode(text).ids for text in TEXTS], tokenizer.encode(".").ids
    rng = np.random.default_rng(len(name))
    prompts = [rng.integers(3, 128, n).tolist() for n in (5, 17, 11)]
    return prompts, rng.choice(128, 5, replace=False).tolist()


def expected(search: Search) -> dict[str, Any]:
    """The results of transformers, all beams of each prompt, for each penalty."""
    import torch
    import transformers

    folder = checkpoints.checkpoint_folder(search.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )
    prompts, stops = prompts_and_stops(search.name)
    width = max(map(len, prompts))
    model.generation_config.eos_token_id = stops
    model.generation_config.pad_token_id = 0
    found: list[dict[str, Any]] = []
    for penalty in search.penalties:
        options: dict[str, Any] = dict(
            num_return_sequences=search.num_beams,
            early_stopping=search.early_stopping,
            length_penalty=penalty,
        )
        if search.num_beams == 1:
            options = {}
        with torch.no_grad():
            output = model.generate(
                torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
                attention_mask=torch.tensor(
                    [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
                ),
                do_sample=False,
                num_beams=search.num_beams,
                max_new_tokens=NEW_TOKENS,
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
        texts = output.sequences[:, width:].tolist()
        # Greedy search, which one beam is, has no scores.
        scores = getattr(output, "sequences_scores", None)
        found.append(
            {
                "texts": [_cut(text, stops) for text in texts],
                "scores": None if scores is None else scores.tolist(),
            }
        )
    return {"prompts": prompts, "stops": stops, "found": found}


def _cut(text: list[int], stops: list[int]) -> list[int]:
    """Leave out the padding after a stop token."""
    ends = [i + 1 for i, token in enumerate(text) if token in stops]
    return text[: min(ends, default=len(text))]


def main() -> None:
    """Write all of them."""
    written = {search.name: expected(search) for search in SEARCHES}
    FIXTURE.write_text(json.dumps(written) + "\n")


if __name__ == "__main__":
    main()
