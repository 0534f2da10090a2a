"""Write transformers' beam-search results for `test_beam_parity.py`.

    PYTHONPATH=tests python tests/support/checkpoints/beam_fixtures.py

writes ``tests/fixtures/beams.json``. ``transformers`` is imported only to write; if it
is installed, the parity test compares the committed results with new ones.
"""

import json
from typing import Any, NamedTuple

import numpy as np

from support.checkpoints import checkpoint_fixtures as checkpoints
from support.paths import FIXTURES

FIXTURE = FIXTURES / "beams.json"
NEW_TOKENS = 16
TEXTS = (
    "A class that",
    "Return a list of the names that",
    "The with statement is used",
)


class Search(NamedTuple):
    """A checkpoint and its search options; one program serves all length penalties."""

    name: str
    num_beams: int
    early_stopping: bool | str
    penalties: tuple[float, ...]


# One beam is greedy search; mistral and qwen2 have windows, pydoc is trained.
SEARCHES = (
    Search("llama2", 4, False, (1.0, 0.0)),
    Search("qwen2", 8, True, (1.0, -1.0)),
    Search("pydoc", 3, "never", (2.0, 0.0, -0.5)),
    Search("mistral", 1, "never", (1.0,)),
)


def prompts_and_stops(name: str) -> tuple[list[list[int]], list[int]]:
    """Return prompts of unequal lengths, and tokens that stop some completions."""
    if name == "pydoc":
        import tokenizers

        path = checkpoints.PYDOC / "tokenizer.json"
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        return [tokenizer.encode(text).ids for text in TEXTS], tokenizer.encode(".").ids
    rng = np.random.default_rng(len(name))
    prompts = [rng.integers(3, 128, n).tolist() for n in (5, 17, 11)]
    return prompts, rng.choice(128, 5, replace=False).tolist()


def expected(search: Search) -> dict[str, Any]:
    """Return all beams of each prompt by transformers, for each penalty."""
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
        sequences = output.sequences[:, width:].tolist()
        # Greedy search (one beam) has no scores.
        scores = getattr(output, "sequences_scores", None)
        found.append(
            {
                "sequences": [_cut(tokens, stops) for tokens in sequences],
                "scores": None if scores is None else scores.tolist(),
            }
        )
    return {"prompts": prompts, "stops": stops, "found": found}


def _cut(tokens: list[int], stops: list[int]) -> list[int]:
    """Cut the padding after a stop token."""
    ends = [i + 1 for i, token in enumerate(tokens) if token in stops]
    return tokens[: min(ends, default=len(tokens))]


def main() -> None:
    """Write the results of all searches."""
    written = {search.name: expected(search) for search in SEARCHES}
    FIXTURE.write_text(json.dumps(written) + "\n")


if __name__ == "__main__":
    main()
