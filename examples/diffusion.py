"""Generate by block diffusion with DiffusionGemma, and compare with a causal loop.

    python examples/diffusion.py --model path/to/diffusiongemma --prompt "Once upon"

Several samples share one prompt in the cache. Each sample denoises blocks of tokens
with bidirectional attention; a finished block is written to the cache once. The whole
loop is one jitted function.
"""

import time

from generating.arguments import Parser, at_least, text
from generating.exiting import answering_errors, errors_in_one_line


def main():
    parser = Parser(__doc__)
    add, number = parser.add_argument, at_least(1)
    add("--model", required=True, help="a folder with a DiffusionGemma checkpoint")
    add("--prompt", type=text, default="Once upon a time", help="%(default)r")
    add("--samples", type=number, default=4, help="number of samples; %(default)s")
    add("--blocks", type=number, default=2, help="per sample; %(default)s")
    add("--steps", type=number, default=8, help="steps per block; %(default)s")
    add("--seed", type=at_least(0), default=0, help="random seed; %(default)s")
    options = parser.parse_args()
    # Imported here so that --help is fast.
    import jax
    import numpy as np
    import pretrained
    from denoising.checkpoint import load
    from denoising.loop import Sizes, denoise, make_cache

    import jkv

    with answering_errors():
        denoiser = load(options.model)
        tokenizer = pretrained.load_tokenizer(options.model)
    prompt = np.asarray(tokenizer.encode(options.prompt).ids, np.int32)
    num_new = options.blocks * denoiser.canvas_length
    sizes = Sizes(options.samples, options.blocks, options.steps, len(prompt) + num_new)

    def run_blocks():
        cache = make_cache(denoiser, sizes, len(prompt))
        key = jax.random.key(options.seed)
        return denoise(denoiser, cache, prompt, key, sizes)[1]

    def run_causally():
        cache = make_cache(denoiser, sizes, len(prompt))
        prompts = [prompt.tolist()] * options.samples
        loop = jkv.jitted.generate
        given = denoiser.model, denoiser.encoder, cache, prompts
        return loop(*given, max_new_tokens=num_new)[1].tokens

    for name, run in {"block diffusion": run_blocks, "causal": run_causally}.items():
        jax.block_until_ready(run())  # compile
        start = time.perf_counter()
        tokens = np.asarray(run())
        seconds = time.perf_counter() - start
        print(f"{name}: {tokens.size / seconds:.1f} tokens/s, compiled")
        if run is run_blocks:
            for row in tokens:
                print("*", tokenizer.decode(row[row >= 0].tolist()))


if __name__ == "__main__":
    with errors_in_one_line():
        main()
