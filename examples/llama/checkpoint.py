"""Reading a Hugging Face checkpoint folder as it is.

Weights lie in ``model.safetensors`` or, sharded, in the files that
``model.safetensors.index.json`` maps tensor names to. One table says which tensor of
the checkpoint becomes which parameter and what shape it must have, so that a missing,
misshapen or unexpected tensor is named before anything is computed with it.

Parameters are a dict: ``embedding [V, E]``, ``final_norm [E]``, ``head [V, E]`` unless
tied, and ``layers``, a dict of arrays stacked over layers. Matrices keep the
checkpoint's ``[out, in]``.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from .config import LlamaConfig

Params = dict[str, Any]  # arrays, and under "layers" a dict of arrays


def layer_tensors(config: LlamaConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return, per parameter of a layer, its name in the checkpoint and its shape."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads * dim, config.num_kv_heads * dim
    table: dict[str, tuple[str, tuple[int, ...]]] = {
        "attention_norm": ("input_layernorm.weight", (hidden,)),
        "query": ("self_attn.q_proj.weight", (heads, hidden)),
        "key": ("self_attn.k_proj.weight", (kv_heads, hidden)),
        "value": ("self_attn.v_proj.weight", (kv_heads, hidden)),
        "output": ("self_attn.o_proj.weight", (hidden, heads)),
        "mlp_norm": ("post_attention_layernorm.weight", (hidden,)),
        "gate": ("mlp.gate_proj.weight", (inner, hidden)),
        "up": ("mlp.up_proj.weight", (inner, hidden)),
        "down": ("mlp.down_proj.weight", (hidden, inner)),
    }
    if config.has_qkv_bias:
        table["query_bias"] = ("self_attn.q_proj.bias", (heads,))
        table["key_bias"] = ("self_attn.k_proj.bias", (kv_heads,))
        table["value_bias"] = ("self_attn.v_proj.bias", (kv_heads,))
    if config.has_output_bias:
        table["output_bias"] = ("self_attn.o_proj.bias", (hidden,))
    if config.has_qk_norm:
        table["query_norm"] = ("self_attn.q_norm.weight", (dim,))
        table["key_norm"] = ("self_attn.k_norm.weight", (dim,))
    return table


def model_tensors(config: LlamaConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the same for the parameters outside the layers."""
    matrix = (config.vocab_size, config.hidden_size)
    table: dict[str, tuple[str, tuple[int, ...]]] = {
        "embedding": ("model.embed_tokens.weight", matrix),
        "final_norm": ("model.norm.weight", (config.hidden_size,)),
    }
    if not config.tied:
        table["head"] = ("lm_head.weight", matrix)
    return table


def read_params(
    folder: str | Path, config: LlamaConfig, dtype: jnp.dtype | None = None
) -> Params:
    """Read the weights of a checkpoint folder.

    Args:
        folder: holds model.safetensors, or shards and their index.
        config: what ``read_config`` made of the folder's config.json.
        dtype: floating type to cast to; float32 on a CPU and the checkpoint's own
            elsewhere when it is None.

    Raises:
        FileNotFoundError: when a file is missing.
        ValueError: when a tensor is missing, misshapen, unexpected or quantised.
    """
    dtype = jnp.dtype(dtype if dtype is not None else default_dtype(config))
    paths = _tensor_files(Path(folder))
    _refuse_unexpected(paths, config)
    read = _reader(paths, dtype)
    params: Params = {
        name: jnp.asarray(read(*entry)) for name, entry in model_tensors(config).items()
    }
    if config.tied and "lm_head.weight" in paths:
        # Harmless when it repeats the embedding; otherwise the config is wrong.
        head = read("lm_head.weight", params["embedding"].shape)
        if not np.array_equal(head, np.asarray(params["embedding"])):
            raise ValueError(
                f"config.json in {folder} says that lm_head.weight is tied to the "
                "embedding, but the checkpoint holds a different one"
            )
    params["layers"] = {}
    for name, (suffix, shape) in layer_tensors(config).items():
        # One parameter at a time, so that the peak is the model plus one stack.
        stack = np.empty((config.num_layers, *shape), dtype)
        for i in range(config.num_layers):
            stack[i] = read(f"model.layers.{i}.{suffix}", shape)
        params["layers"][name] = jnp.asarray(stack)
    return params


def random_params(
    config: LlamaConfig, key: jax.Array, dtype: jnp.dtype | None = None
) -> Params:
    """Return random parameters of the right shapes, for tests and benchmarks.

    Norms are ones and biases zeros, matrices normal with standard deviation
    1/sqrt(inputs), embeddings 0.02.
    """
    dtype = jnp.dtype(dtype if dtype is not None else default_dtype(config))
    keys = iter(jax.random.split(key, len(layer_tensors(config)) + 3))

    def draw(name: str, shape: tuple[int, ...], num_stacked: tuple[int, ...]):
        shape_of_all = (*num_stacked, *shape)
        if len(shape) == 1:
            fill = 0 if name.endswith("bias") else 1
            return jnp.full(shape_of_all, fill, dtype)
        scale = 0.02 if name == "embedding" else shape[-1] ** -0.5
        drawn = jax.random.normal(next(keys), shape_of_all, jnp.float32)
        return (scale * drawn).astype(dtype)

    return {
        **{n: draw(n, shape, ()) for n, (_, shape) in model_tensors(config).items()},
        "layers": {
            name: draw(name, shape, (config.num_layers,))
            for name, (_, shape) in layer_tensors(config).items()
        },
    }


def default_dtype(config: LlamaConfig) -> jnp.dtype:
    """Return float32 on a CPU, elsewhere the type the checkpoint says it has."""
    named = config.dtype_name in ("float16", "bfloat16", "float32")
    return jnp.dtype(
        config.dtype_name if named and jax.default_backend() != "cpu" else "float32"
    )


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return where each tensor of the checkpoint lies."""
    single, index = (
        folder / "model.safetensors",
        folder / "model.safetensors.index.json",
    )
    if single.is_file():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is not a shard index: {error!r}") from error
        missing = {f for f in weight_map.values() if not (folder / f).is_file()}
        if missing:
            raise FileNotFoundError(
                f"{folder} lacks shards named by {index.name}: {sorted(missing)}"
            )
        return {name: folder / file for name, file in weight_map.items()}
    pickled = [p.name for p in folder.glob("pytorch_model*.bin")]
    hint = f"; convert {sorted(pickled)} to safetensors first" if pickled else ""
    raise FileNotFoundError(
        f"{folder} has neither {single.name} nor {index.name}{hint}"
    )


def _reader(
    paths: Mapping[str, Path], dtype: jnp.dtype
) -> Callable[[str, tuple[int, ...]], np.ndarray]:
    """Return a function that reads one tensor, checks its shape and casts it."""
    files: dict[Path, Any] = {}

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in paths:
            hint = "; is tie_word_embeddings missing?" if "lm_head" in name else ""
            raise ValueError(f"the checkpoint lacks the tensor {name!r}{hint}")
        path = paths[name]
        if path not in files:
            files[path] = _open(path)
        try:
            stored_as = files[path].get_slice(name).get_dtype()
        except SafetensorError as error:
            raise ValueError(f"{path} does not hold {name!r}: {error}") from error
        if stored_as not in ("F16", "BF16", "F32", "F64"):
            raise ValueError(
                f"tensor {name!r} is stored as {stored_as}: quantised checkpoints "
                "are not supported"
            )
        tensor = files[path].get_tensor(name)
        if tensor.shape != shape:
            raise ValueError(
                f"tensor {name!r} has shape {tensor.shape}, but config.json makes it "
                f"{shape}"
            )
        return tensor.astype(dtype)

    return read


def _refuse_unexpected(paths: Mapping[str, Path], config: LlamaConfig) -> None:
    """Refuse tensors that would be silently left out of the computation."""
    suffixes = [suffix for suffix, _ in layer_tensors(config).values()]
    known = {name for name, _ in model_tensors(config).values()} | {"lm_head.weight"}
    for i in range(config.num_layers):
        known |= {f"model.layers.{i}.{suffix}" for suffix in suffixes}
    # Old checkpoints carry the RoPE frequencies, which config.json gives as well.
    unexpected = sorted(
        n for n in set(paths) - known if not n.endswith("rotary_emb.inv_freq")
    )
    if unexpected:
        raise ValueError(
            f"the checkpoint holds {len(unexpected)} tensors that this model would not "
            f"use, so its answers would be wrong: {', '.join(unexpected[:4])}"
        )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({error}); a clone without Git "
            "LFS leaves a short text in its place"
        ) from error
