"""Generate with a prefix language model, HRM-Text.

    python examples/prefix_lm.py --model path/to/hrm-text --prompt "Why?"

Attention is bidirectional within the prompt, which forms one span, and causal in the
answer.
"""

from generating.arguments import Parser, at_least, text
from generating.exiting import answering_errors, errors_in_one_line


def main():
    parser = Parser(__doc__)
    parser.add_argument("--model", required=True, help="an HRM-Text folder")
    parser.add_argument("--prompt", type=text, default="Why is the sky blue?")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=64)
    options = parser.parse_args()
    # Imported here so that --help is fast.
    import pretrained
    from pretrained.hrm_text import load

    import jkv
    from jkv.decoding import Prompts

    with answering_errors():
        model, params = load(options.model)
        tokenizer = pretrained.load_tokenizer(options.model)
    ids = tokenizer.encode(options.prompt).ids
    length = len(ids) + options.max_new_tokens
    config = model.cache_config(length, num_blocks=length // 16 + 2, max_sequences=1)
    # The whole prompt is one span.
    prompts = Prompts.of([ids], spans=[[len(ids) - 1] * len(ids)])
    _, result = jkv.jitted.generate(
        model,
        params,
        jkv.init(config),
        prompts,
        max_new_tokens=options.max_new_tokens,
        row_counts=(1, max(len(ids), 2)),
    )
    tokens = result.tokens[0, : int(result.lengths[0])].tolist()
    print(tokenizer.decode(tokens))


if __name__ == "__main__":
    with errors_in_one_line():
        main()
