"""Train an EAGLE-3 head for a published model, from the model's own hidden states.

    python examples/train_drafter.py model.gguf --output drafter --minutes 40
    python examples/serve_http.py --model model.gguf --drafter drafter

The model writes the training text: prompts sampled from the beginning of a chat (Xu et
al., "Magpie", 2024), then completions, half of them greedy. The head is one layer over
hidden states of three layers, with a draft vocabulary of the most frequent tokens. It
learns the distribution of several draft tokens from its own hidden states (Li et al.,
"EAGLE-3", 2025), later ones with less weight, and is saved in SGLang's form.
"""

import json
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
from bundled.training import learning_rate, make_optimizer, take_step
from generating.arguments import Parser, at_least
from generating.exiting import answering_errors, errors_in_one_line
from training.eagle3_head import Frozen, find_loss, init_head, save_head
from training.model_texts import read_texts, write_texts

import jkv

TEXTS_PER_STEP, HELD_OUT_ONE_IN, REPORT, SEED = 8, 16, 20, 0
LEAST_TEXTS = 2 * TEXTS_PER_STEP
REPORTED = "step {:4}, {:4.1f} min: loss {:.3f}, {:.2f} tokens; held out {:.3f}, {:.2f}"


def train(config, params, frozen, texts, options):
    """Train a head, for `minutes` or else for `steps`, and return it.

    Yields the parameters and a line of the loss curve: steps, minutes, the loss and the
    tokens of a step (1 and the leading right draft tokens), and both of held-out texts.
    """
    # `benchmarks/results/train_drafter.json` compares its rates with a lower one.
    optimizer = make_optimizer()
    find = partial(find_loss, config=config, num_runs=options.drafts)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, frozen, texts, rate):
        found, gradients = jax.value_and_grad(find, has_aux=True)(
            params, frozen=frozen, texts=texts
        )
        return *take_step(optimizer, params, state, gradients, rate), found

    num, state = len(texts.tokens), optimizer.init(params)
    held_out = num // HELD_OUT_ONE_IN
    drawn, measure = np.random.default_rng(SEED), jax.jit(find)
    num_steps, recent, progress, start = 0, [], 0.0, time.perf_counter()
    while progress < 1:
        rows = drawn.choice(np.arange(held_out, num), TEXTS_PER_STEP, replace=False)
        rate = np.float32(learning_rate(progress))
        given = frozen, texts.take(np.sort(rows)), rate
        params, state, found = step(params, state, *given)
        recent.append(np.asarray(found))  # waits for the step
        num_steps += 1
        spent = (time.perf_counter() - start) / 60
        part = spent / options.minutes if options.minutes else num_steps / options.steps
        progress = min(part, 1.0)
        if num_steps % REPORT == 0 or progress == 1:
            held = measure(params, frozen=frozen, texts=texts.take(np.arange(held_out)))
            means, recent = np.mean(recent, axis=0), []
            yield params, [num_steps, spent, *means.tolist(), *map(float, held)]


def main():
    parser = Parser(__doc__)
    parser.add_argument("model", help="a Hugging Face folder or a GGUF file")
    parser.add_argument("--output", type=Path, required=True)
    number = at_least(1)
    parser.add_argument("--texts", type=at_least(LEAST_TEXTS), default=512)
    parser.add_argument("--length", type=number, default=128, help="of a completion")
    parser.add_argument("--draft-vocabulary", type=number, default=4096)
    parser.add_argument("--drafts", type=number, default=3, help="tokens of a step")
    parser.add_argument("--steps", type=number, default=500)
    parser.add_argument("--minutes", type=at_least(0.1, float), help="instead of steps")
    options = parser.parse_args()
    with answering_errors():
        options.output.mkdir(parents=True, exist_ok=True)
        jkv.keep_compiled_programs()
        run(options)


def run(options):
    """Write texts, train, and save the head after each report."""
    loops = pretrained.prefers_loops()
    model, target = pretrained.load(options.model, jnp.float32, loop_layers=loops)
    config, count = model.config, model.config.num_layers
    layers, given = [1, count // 2, count - 1], (model, target)
    sizes = options.model, options.texts, options.length, LEAST_TEXTS
    written = write_texts(*given, *sizes)
    with tempfile.NamedTemporaryFile() as file:
        texts = read_texts(*given, *written, layers, file)
        likely = Counter(texts.best[texts.counted].tolist())
        common = dict(likely.most_common(options.draft_vocabulary))
        covered = sum(common.values()) / likely.total()
        print(f"{likely.total():,} tokens, {covered:.1%} in the draft vocabulary")
        tokens = np.sort(np.array([*common], np.int32))
        head = target["embedding" if config.tied else "head"]
        frozen = Frozen(target["embedding"], head[tokens], jnp.asarray(tokens))
        params = init_head(config, len(layers), frozen, target["final_norm"], SEED)
        curve = []
        for trained, line in train(config, params, frozen, texts, options):
            curve.append(line)
            print(REPORTED.format(*line), flush=True)
            save_head(options.output, config, trained, frozen, layers)
            (options.output / "curve.json").write_text(json.dumps(curve))


if __name__ == "__main__":
    with errors_in_one_line():
        main()
