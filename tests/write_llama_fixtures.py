"""Tiny checkpoints of every architecture and what transformers computes from them.

    python tests/write_llama_fixtures.py [NAME ...]

writes ``tests/fixtures/llama``: random checkpoints as ``transformers`` saves them and,
beside each, ``expected.npz`` with the logits and greedy tokens that ``transformers``
gets from reading the folder back. The parity tests call the same functions with a
temporary folder where ``transformers`` is installed, and read the committed ones
everywhere. ``transformers`` is imported only when something is written. Of the bundled
model (``pydoc``) only the logits are written: do so again when it was trained anew.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

FIXTURES = Path(__file__).parent / "fixtures" / "llama"
PYDOC = Path(__file__).parents[1] / "examples" / "models" / "pydoc"

NUM_STEPS = 50
VOCAB_SIZE = 128
# A batch of unequal prompts: one token, one longer than every window, one between.
PROMPT_LENGTHS = (1, 26, 11)
# Decode logits are kept for this one (the others' greedy tokens tell enough), and of
# the bundled model, whose vocabulary is large, only those of a few steps.
DETAILED = 1
PYDOC_PROMPTS = ("A class that", "Return a list of the")
PYDOC_STEPS = (0, 23, 49)

SMALL = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint: what it is made of and in which form it is saved."""

    model_type: str
    settings: dict[str, Any]
    seed: int
    dtype: str = "float16"
    max_shard_size: str = "5GB"
    old_form: bool = False  # config.json as transformers 4 wrote it


# Seeds were picked for varied text in which no greedy token wins by a hair.
CASES = {
    "llama2": Case(
        "llama",
        dict(num_key_value_heads=4, rms_norm_eps=1e-5),
        seed=7,
        max_shard_size="20KB",
        old_form=True,
    ),
    "llama_linear": Case(
        "llama",
        dict(
            num_key_value_heads=2,
            tie_word_embeddings=True,
            attention_bias=True,
            rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=5_000.0),
        ),
        seed=3,
        old_form=True,
    ),
    "llama3": Case(
        "llama",
        dict(
            num_hidden_layers=3,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
            # Of the eight frequencies one is kept, one blended and six are scaled.
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10_000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        ),
        seed=12,
        dtype="bfloat16",
    ),
    "mistral": Case(
        "mistral",
        dict(num_key_value_heads=1, sliding_window=8),
        seed=6,
        dtype="bfloat16",
        old_form=True,
    ),
    # The first layer sees everything, the other two sixteen tokens.
    "qwen2": Case(
        "qwen2",
        dict(
            num_hidden_layers=3,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=1,
        ),
        seed=0,
    ),
    "qwen3": Case(
        "qwen3",
        dict(num_key_value_heads=2, head_dim=16),
        seed=12,
        dtype="bfloat16",
        max_shard_size="20KB",
    ),
}


def write_checkpoint(name: str, folder: Path) -> None:
    """Save the random checkpoint of a case with transformers."""
    import torch
    import transformers

    case = CASES[name]
    config = transformers.AutoConfig.for_model(
        case.model_type, **{**SMALL, **case.settings}
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(parameter_name, drawn))
    model = model.to(getattr(torch, case.dtype))
    with _quiet():
        model.save_pretrained(folder, max_shard_size=case.max_shard_size)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors are saved readable by their owner alone
    if case.old_form:
        _rewrite_config_in_old_form(folder / "config.json")


def checkpoint_folder(name: str) -> Path:
    """Return where the committed checkpoint lies."""
    return PYDOC if name == "pydoc" else FIXTURES / name


def expected(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Compute with transformers, in float32, what the paged model has to equal.

    Returns:
        ``prompt_lengths [P]`` and ``prompts``, all prompts on end, int32;
        ``prefill f32[sum, V]``, the logits of every prompt token;
        ``generated i32[P, NUM_STEPS + 1]``, greedy tokens;
        ``decode f32[len(steps), V]``, logits of the DETAILED prompt after its generated
        tokens number ``steps``;
        ``margin f32[]``, the least lead of a chosen token over the runner-up.
    """
    import torch
    import transformers

    # Its threads would only wait for each other over matrices this small.
    torch.set_num_threads(1)
    prompts = _pydoc_prompts() if name == "pydoc" else _random_prompts()
    kept = np.asarray(PYDOC_STEPS if name == "pydoc" else range(NUM_STEPS), np.int32)
    with _quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    prefill, decode, generated, margin = [], [], [], np.inf
    for prompt in prompts:
        # Each prompt alone and with transformers' own cache: nothing is padded.
        rows, past, chosen, steps = torch.tensor(prompt)[None].long(), None, [], []
        for _ in range(NUM_STEPS + 1):
            with torch.no_grad():
                out = model(rows, past_key_values=past, use_cache=True)
            past, logits = out.past_key_values, out.logits[0].float()
            steps.append(logits.numpy())
            second, first = torch.sort(logits[-1]).values[-2:]
            margin = min(margin, float(first - second))
            rows = logits[-1].argmax()[None, None]
            chosen.append(int(rows))
        prefill.append(steps[0])
        decode.append(np.concatenate(steps[1:]))
        generated.append(chosen)
    return dict(
        prompt_lengths=np.asarray([len(prompt) for prompt in prompts], np.int32),
        prompts=np.concatenate(prompts).astype(np.int32),
        prefill=np.concatenate(prefill),
        generated=np.asarray(generated, np.int32),
        decode=decode[DETAILED][kept],
        steps=kept,
        margin=np.float32(margin),
    )


def _random_prompts() -> list[np.ndarray]:
    """Return the unequal prompts, the same on every machine."""
    generator = np.random.default_rng(7)
    return [generator.integers(0, VOCAB_SIZE, length) for length in PROMPT_LENGTHS]


def _pydoc_prompts() -> list[np.ndarray]:
    """Return prompts of the bundled model, in its own tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(str(PYDOC / "tokenizer.json"))
    return [np.asarray(tokenizer.encode(text).ids) for text in PYDOC_PROMPTS]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def _scaled(name: str, drawn: Any) -> Any:
    """Scale normal numbers so that every part of the model moves the logits."""
    if name.endswith("norm.weight"):
        return 1 + 0.3 * drawn
    if name.endswith("bias"):
        return 0.5 * drawn
    if "embed_tokens" in name:
        # Small against what the layers add: a tied model would echo its last token.
        return 0.3 * drawn
    return 1.5 * drawn / drawn.shape[-1] ** 0.5


def _rewrite_config_in_old_form(path: Path) -> None:
    """Write a config.json as transformers 4 did, which most checkpoints still have."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main(names: Sequence[str]) -> None:
    for name in names or [*CASES, "pydoc"]:
        folder = FIXTURES / name
        folder.mkdir(parents=True, exist_ok=True)
        if name in CASES:
            write_checkpoint(name, folder)
        result = expected(name, checkpoint_folder(name))
        np.savez(folder / "expected.npz", **result)
        size = sum(path.stat().st_size for path in folder.iterdir())
        distinct = [len(set(row)) for row in result["generated"].tolist()]
        print(
            f"{name}: {size / 1024:.0f} KiB, distinct tokens {distinct}, "
            f"|logit| up to {abs(result['prefill']).max():.1f}, least lead of a greedy "
            f"token {result['margin']:.4f}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
