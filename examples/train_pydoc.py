"""Train the bundled model: a Llama of 2.2 million parameters on Python's own prose.

From an empty folder to a Hugging Face checkpoint in about half an hour on two cores:

    python examples/train_pydoc.py

reads the corpus (`corpus.py`), learns a byte-level BPE on it, trains the decoder of
`pydoc_model.py`, measures the perplexity of the held-out documents with the weights as
saved (float16), and writes the folder that `generate.py` loads. A run of a few minutes,
which shows that everything works and makes a poor model:

    python examples/train_pydoc.py --steps 20 --output /tmp/pydoc

The steps are many at a short context, where they are cheap, and few at the full
context of 2,048 tokens, where the model learns to use positions it has not seen. Both
take the same number of tokens.
"""

import json
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import corpus
import jax
import numpy as np
import optax
from generating.arguments import Parser, at_least
from generating.exiting import answering_errors, errors_in_one_line
from pydoc_model import (
    CONFIG,
    END_OF_TEXT,
    FOLDER,
    Params,
    encode,
    init_params,
    token_losses,
    write_card,
)
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "model_max_length": 2048,
    "clean_up_tokenization_spaces": False,
}
SEED = 0
NUM_STEPS = 1273  # as many as the bundled checkpoint had
TOKENS_PER_STEP = 4096
SHORT_CONTEXT, FULL_CONTEXT = 256, 2048
# The last steps are at the full context, where a step takes about twice as long.
FULL_CONTEXT_FROM = {"steps": 0.86, "minutes": 0.8}
PEAK_LEARNING_RATE, WARMUP_SHARE, WEIGHT_DECAY, MAX_GRADIENT_NORM = 6e-3, 0.05, 0.1, 1.0


def train_tokenizer(documents: list[corpus.Document]) -> Tokenizer:
    """Learn a byte-level BPE: any text can be encoded, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in documents), trainer)
    return tokenizer


def batches(
    documents: list[np.ndarray], context: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield i32[B, context + 1] for ever: every epoch shuffled and cut afresh."""
    size = TOKENS_PER_STEP // context
    while True:
        order = rng.permutation(len(documents))
        stream = np.concatenate([documents[i] for i in order])
        stream = stream[rng.integers(context) :]
        # Windows overlap by one token: the last target of one starts the next.
        starts = rng.permutation((len(stream) - 1) // context) * context
        for chosen in starts[: len(starts) // size * size].reshape(-1, size):
            yield np.stack([stream[s : s + context + 1] for s in chosen])


def make_optimizer() -> optax.GradientTransformation:
    """Muon for the matrices, Adam for the embedding and the norms.

    The learning rate is 1: `take_step` multiplies the updates by its own. A hundred
    steps of Muon reached a held-out loss of 4.84, of AdamW 5.74, in about the same
    time (256 wide, 4 layers, contexts of 256).
    """

    def matrices(params: Params):
        matrix = optax.contrib.MuonDimensionNumbers()
        return {k: matrix if k.endswith("proj.weight") else None for k in params}

    return optax.chain(
        optax.clip_by_global_norm(MAX_GRADIENT_NORM),
        optax.contrib.muon(
            1.0,
            weight_decay=WEIGHT_DECAY,
            adam_b2=0.95,
            # Updates as large as Adam's, so that both can share the learning rate.
            consistent_rms=0.2,
            muon_weight_dimension_numbers=matrices,
        ),
    )


def take_step(optimizer, params, state, gradients, rate):
    """Return the parameters and the optimizer's state after an update."""
    updates, state = optimizer.update(gradients, state, params)
    updates = jax.tree.map(lambda update: rate * update, updates)
    return optax.apply_updates(params, updates), state


def learning_rate(progress: float) -> float:
    """Warm up linearly, then follow a cosine down to a fiftieth of the peak."""
    warmup = min(1.0, progress / WARMUP_SHARE)
    cosine = 0.5 * (1 + math.cos(math.pi * max(0.0, progress - WARMUP_SHARE)))
    return PEAK_LEARNING_RATE * min(warmup, max(cosine, 0.02))


def train(
    documents: list[np.ndarray], num_steps: int, minutes: float | None, folder: Path
) -> Params:
    """Train from scratch, for `minutes` or else for `num_steps`, showing progress."""
    optimizer = make_optimizer()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, windows, rate):
        loss, gradients = jax.value_and_grad(
            lambda params: token_losses(params, windows).mean()
        )(params)
        return *take_step(optimizer, params, state, gradients, rate), loss

    params = init_params(jax.random.key(SEED))
    state = optimizer.init(params)
    rng = np.random.default_rng(SEED)
    streams = {c: batches(documents, c, rng) for c in (SHORT_CONTEXT, FULL_CONTEXT)}
    full_from = FULL_CONTEXT_FROM["minutes" if minutes else "steps"]
    losses, progress = [], 0.0
    start = last = time.perf_counter()
    while progress < 1:
        context = FULL_CONTEXT if progress >= full_from else SHORT_CONTEXT
        rate = np.float32(learning_rate(progress))
        params, state, loss = step(params, state, next(streams[context]), rate)
        losses.append(float(loss))
        now = time.perf_counter()
        spent = now - start
        progress = spent / (60 * minutes) if minutes else len(losses) / num_steps
        if len(losses) % 20 == 0 or progress >= 1:
            recent = losses[-(len(losses) % 20 or 20) :]
            speed = len(recent) * TOKENS_PER_STEP / (now - last)
            left = spent * (1 / progress - 1) / 60
            print(
                f"step {len(losses):4}  context {context:4}  "
                f"loss {np.mean(recent):.3f}  {speed:5.0f} tokens/s  "
                f"{progress:4.0%}, {left:4.1f} min left",
                flush=True,
            )
            last = now
        if len(losses) % 200 == 0 or progress >= 1:
            save(params, folder)
    return params


def save(params: Params, folder: Path) -> None:
    weights = {name: np.asarray(x, np.float16) for name, x in params.items()}
    path = folder / "model.safetensors"
    save_file(weights, path, {"format": "pt"})
    path.chmod(0o644)  # safetensors are saved readable by their owner alone


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=at_least(1), default=NUM_STEPS)
    minutes = at_least(0.1, float)
    parser.add_argument("--minutes", type=minutes, help="instead of a number of steps")
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
