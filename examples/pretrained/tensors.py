"""Checkpoint tensors of each parameter, and their required shapes.

Parameters are a dict: ``embedding [V, E]``, ``final_norm [E]``, ``head [V, E]`` unless
tied, and ``layers``, for each of `DecoderConfig.runs` a dict of arrays stacked over its
layers. Matrices keep the checkpoint's ``[out, in]``; matrices of experts are
``[experts, in, out]``.
"""

from collections.abc import Callable

import numpy as np

from .architectures import ARCHITECTURES
from .config import DecoderConfig, Run
from .mixers import MIXERS
from .parts import Experts, Latent
from .sources import Shape, Source, list_whole

# Default names: Llama's, and further ones for parts that it lacks. Rows of
# `ARCHITECTURES` override some. {} is replaced by the expert's number.
NAMES = {
    "embedding": "embed_tokens.weight",
    "final_norm": "norm.weight",
    "attention_norm": "input_layernorm.weight",
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "query_gate": "self_attn.q_proj.weight",
    "sinks": "self_attn.sinks",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "shared_gate": "mlp.shared_experts.gate_proj.weight",
    "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
    "shared_weight": "mlp.shared_expert_gate.weight",
    "router": "mlp.gate.weight",
    "choice_bias": "mlp.gate.e_score_correction_bias",
    "expert_gate": "mlp.experts.{}.gate_proj.weight",
    "expert_up": "mlp.experts.{}.up_proj.weight",
    "expert_down": "mlp.experts.{}.down_proj.weight",
    "layer_scale": "layer_scalar",
    "layer_embedding": "embed_tokens_per_layer.weight",
    "layer_projection": "per_layer_model_projection.weight",
    "layer_projection_norm": "per_layer_projection_norm.weight",
    "layer_input_gate": "per_layer_input_gate.weight",
    "layer_input_output": "per_layer_projection.weight",
    "layer_input_norm": "post_per_layer_input_norm.weight",
    "query_down": "self_attn.q_a_proj.weight",
    "query_down_norm": "self_attn.q_a_layernorm.weight",
    "query_up": "self_attn.q_b_proj.weight",
    "latent": "self_attn.kv_a_proj_with_mqa.weight",
    "latent_norm": "self_attn.kv_a_layernorm.weight",
    "key_up": "self_attn.kv_b_proj.weight",
    "value_up": "self_attn.kv_b_proj.weight",
}


def layer_tensors(config: DecoderConfig, run: Run) -> dict[str, Source]:
    """Return the source of each parameter of a layer of the run."""
    table = _norms(config, run)
    if run.has_attention:
        if config.latent:
            table |= _latent(config, config.latent)
        else:
            table |= _attention(config, run.start)
    for mixer in run.state_mixers:
        table |= MIXERS[mixer].list_tensors(config)
    if run.feeds == "experts" and config.experts:
        table |= _experts(config, config.experts, run.start)
    elif run.feeds == "perceptron":
        table |= _perceptron(config, "", config.find_inner_size(run.start))
    if config.layer_inputs:
        dim, hidden = config.layer_inputs.dim, config.hidden_size
        table |= list_whole(
            layer_input_gate=(dim, hidden),
            layer_input_output=(hidden, dim),
            layer_input_norm=(hidden,),
        )
    if config.has_layer_scales:
        table |= list_whole(layer_scale=(1,))
    if config.has_residual_scales:
        table |= _residual_scales(config)
    names = NAMES | ARCHITECTURES[config.architecture].tensors
    named = {}
    for parameter, source in table.items():
        name = names.get(parameter)
        if name is None:
            name = names[parameter.removesuffix("_bias")].replace("weight", "bias")
        named[parameter] = source._replace(name=name)
    return _share(named, ARCHITECTURES[config.architecture].fused_experts)


def model_tensors(config: DecoderConfig) -> dict[str, Source]:
    """Return the source of each parameter outside the layers."""
    matrix, vector = (config.vocab_size, config.hidden_size), (config.hidden_size,)
    row = ARCHITECTURES[config.architecture]
    names = NAMES | row.tensors
    table = {
        name: Source(shape, shape, name=f"{row.prefix}{names[name]}")
        for name, shape in (("embedding", matrix), ("final_norm", vector))
    }
    if layer_inputs := config.layer_inputs:
        width = config.num_layers * layer_inputs.dim
        for name, shape in (
            ("layer_embedding", (layer_inputs.vocab_size, width)),
            ("layer_projection", (width, config.hidden_size)),
            ("layer_projection_norm", (layer_inputs.dim,)),
        ):
            table[name] = Source(shape, shape, name=f"{row.prefix}{names[name]}")
    if config.has_residual_scales:
        for name in ("input_scale", "input_bias"):
            table[name] = Source(vector, vector, name=f"{row.prefix}{names[name]}")
    if config.has_norm_bias:
        name = table["final_norm"].name.replace("weight", "bias")
        table["final_norm_bias"] = Source(vector, vector, name=name)
    if not config.tied:
        table["head"] = Source(matrix, matrix, name="lm_head.weight")
    if config.has_head_bias:
        biases = (config.vocab_size,)
        table["head_bias"] = Source(biases, biases, name="lm_head.bias")
    return table


def _norms(config: DecoderConfig, run: Run) -> dict[str, Source]:
    norms = config.state_norms if run.state_mixers else None
    norms = norms or config.norms
    before, after = norms != "after", norms != "before"
    mixes, feeds = bool(run.mixers), run.feeds is not None
    is_there = dict(
        attention_norm=before and mixes,
        attention_post_norm=after and mixes,
        mlp_norm=before and feeds and not config.is_parallel,
        mlp_post_norm=after and feeds,
    )
    names = [name for name, there in is_there.items() if there]
    if config.has_norm_bias:
        names += [f"{name}_bias" for name in names]
    return list_whole(**dict.fromkeys(names, (config.hidden_size,)))


def _attention(config: DecoderConfig, layer: int) -> dict[str, Source]:
    num_kv_heads, dim = config.find_heads(layer)
    num_heads, hidden = config.find_query_heads(layer), config.hidden_size
    heads, kv_heads = num_heads * dim, num_kv_heads * dim
    table = list_whole(
        query=(heads, hidden),
        key=(kv_heads, hidden),
        value=(kv_heads, hidden),
        output=(hidden, heads),
    )
    if config.has_qkv_bias:
        table |= list_whole(
            query_bias=(heads,), key_bias=(kv_heads,), value_bias=(kv_heads,)
        )
    if config.has_output_bias:
        table |= list_whole(output_bias=(hidden,))
    if config.convolved_heads:
        # The mixer lists the other projections.
        return {n: each for n, each in table.items() if n.startswith("output")}
    if config.qk_norm == "all":
        table |= list_whole(query_norm=(heads,), key_norm=(kv_heads,))
    elif config.qk_norm == "heads":
        table |= list_whole(query_norm=(num_heads, dim), key_norm=(num_kv_heads, dim))
    elif config.qk_norm and config.qk_norm != "unit":
        table |= list_whole(query_norm=(dim,), key_norm=(dim,))
    if config.key_layers and config.key_layers[layer] != layer:
        # The layer uses the keys and values of an earlier one.
        names = ("key", "value", "key_bias", "value_bias", "key_norm")
        table = {name: each for name, each in table.items() if name not in names}
    elif config.values_of_keys and config.values_of_keys[layer]:
        table = {n: each for n, each in table.items() if not n.startswith("value")}
    if gate := config.output_gate:
        if gate.is_beside_queries:
            table |= _gated_queries(num_heads, dim, hidden)
        else:
            table |= list_whole(
                query_gate=(num_heads if gate.of_heads else heads, hidden)
            )
    if config.has_sinks:
        table |= list_whole(sinks=(num_heads,))
    return table


def _residual_scales(config: DecoderConfig) -> dict[str, Source]:
    names = (
        f"{part}_{side}_{kind}"
        for part in ("attention", "mlp")
        for side in ("mixed", "kept")
        for kind in ("scale", "bias")
    )
    return list_whole(**dict.fromkeys(names, (config.hidden_size,)))


def _gated_queries(num_heads: int, dim: int, hidden: int) -> dict[str, Source]:
    """Return queries and gates, alternating by head in the rows of one tensor."""
    heads = num_heads * dim

    def take(half: int) -> Callable[[np.ndarray], np.ndarray]:
        def rows(tensor: np.ndarray) -> np.ndarray:
            pairs = tensor.reshape(num_heads, 2, dim, hidden)
            return pairs[:, half].reshape(heads, hidden)

        return rows

    both = {"query": take(0), "query_gate": take(1)}
    return {
        name: Source((heads, hidden), (2 * heads, hidden), each)
        for name, each in both.items()
    }


def _latent(config: DecoderConfig, latent: Latent) -> dict[str, Source]:
    hidden, heads = config.hidden_size, config.num_heads
    query_dim = latent.plain_dim + latent.turned_dim
    table = list_whole(
        latent=(latent.rank + latent.turned_dim, hidden),
        latent_norm=(latent.rank,),
        output=(hidden, heads * latent.value_dim),
    )
    if config.output_gate:
        table |= list_whole(query_gate=(heads, hidden))
    if latent.query_rank is None:
        table |= list_whole(query=(heads * query_dim, hidden))
    else:
        table |= list_whole(
            query_down=(latent.query_rank, hidden),
            query_down_norm=(latent.query_rank,),
            query_up=(heads * query_dim, latent.query_rank),
        )

    # Each head has the rows of its key, then the rows of its value.
    stored = (heads * (latent.plain_dim + latent.value_dim), latent.rank)

    def take(part: slice) -> Callable[[np.ndarray], np.ndarray]:
        return lambda tensor: tensor.reshape(heads, -1, latent.rank)[:, part]

    table["key_up"] = Source(
        (heads, latent.plain_dim, latent.rank), stored, take(np.s_[: latent.plain_dim])
    )
    table["value_up"] = Source(
        (heads, latent.value_dim, latent.rank), stored, take(np.s_[latent.plain_dim :])
    )
    return table


def _perceptron(config: DecoderConfig, prefix: str, inner: int) -> dict[str, Source]:
    hidden = config.hidden_size
    table = list_whole(gate=(inner, hidden), up=(inner, hidden), down=(hidden, inner))
    if config.has_mlp_bias:
        table |= list_whole(gate_bias=(inner,), up_bias=(inner,), down_bias=(hidden,))
    if not config.is_gated:
        table = {name: each for name, each in table.items() if "gate" not in name}
    return {f"{prefix}{name}": source for name, source in table.items()}


def _experts(config: DecoderConfig, experts: Experts, layer: int) -> dict[str, Source]:
    hidden, inner, count = config.hidden_size, experts.inner, experts.count
    seen = experts.latent or hidden

    def stack(shape: Shape) -> Source:
        stored = shape[::-1] if len(shape) == 2 else shape
        return Source((count, *shape), stored, np.transpose, count)

    table = _router(experts, hidden, layer) | dict(
        expert_gate=stack((seen, inner)),
        expert_up=stack((seen, inner)),
        expert_down=stack((inner, seen)),
    )
    if not config.is_gated:
        del table["expert_gate"]
    if experts.latent:
        table |= list_whole(routed_in=(seen, hidden), routed_out=(hidden, seen))
        if config.has_mlp_bias:
            table |= list_whole(routed_in_bias=(seen,), routed_out_bias=(hidden,))
    if experts.has_biases:
        table |= list_whole(router_bias=(count,)) | dict(
            expert_gate_bias=stack((inner,)),
            expert_up_bias=stack((inner,)),
            expert_down_bias=stack((hidden,)),
        )
    if experts.has_own_norms:
        table |= list_whole(
            routed_norm=(hidden,),
            routed_post_norm=(hidden,),
            shared_post_norm=(hidden,),
            router_scale=(hidden,),
            routed_scale=(count,),
        )
    if experts.shared_inner:
        table |= _perceptron(config, "shared_", experts.shared_inner)
    if experts.has_shared_gate:
        table |= list_whole(shared_weight=(1, hidden))
    return table


def _router(experts: Experts, hidden: int, layer: int) -> dict[str, Source]:
    """Return the parameters of a linear or MLP router."""
    count, inner = experts.count, experts.router_inner
    if inner is None:
        table = list_whole(router=(count, hidden))
        if experts.has_choice_bias:
            # ERNIE, the only one with softmaxes, stores the bias as a row.
            stored = (count,) if experts.has_sigmoid else (1, count)
            table["choice_bias"] = Source((count,), stored, np.ravel)
        return table
    table = list_whole(
        router=(count + 1, inner),
        router_down=(inner, hidden),
        router_down_bias=(inner,),
        router_norm=(inner,),
        router_first=(inner, inner),
        router_first_bias=(inner,),
        router_second=(inner, inner),
        router_second_bias=(inner,),
        choice_bias=(count + 1,),
    )
    return table | (list_whole(router_state_scale=(inner,)) if layer else {})


def _share(table: dict[str, Source], fused_experts: str) -> dict[str, Source]:
    """Split tensors shared by several parameters.

    Matrices are stacked by rows; fused experts follow `Architecture.fused_experts`.
    """
    shared = dict(table)
    by_name: dict[str, list[str]] = {}
    for parameter, source in table.items():
        by_name.setdefault(source.name, []).append(parameter)
    for name, parameters in by_name.items():
        sources = [table[parameter] for parameter in parameters]
        is_fused = bool(sources[0].num_experts) and "{}" not in name
        if is_fused and fused_experts == "rows":
            shared |= _stack_rows(parameters, sources)
        elif is_fused:
            number = len(parameters)
            for first, (parameter, source) in enumerate(
                zip(parameters, sources, strict=True)
            ):
                *kept, last = source.shape[1:]
                shared[parameter] = source._replace(
                    stored=(*kept, last * number),
                    take=lambda tensor, part=np.s_[..., first::number]: tensor[part],
                )
        elif len(parameters) > 1 and sources[0].shape == sources[0].stored:
            rows = np.cumsum([0, *(source.shape[0] for source in sources)])
            for first, (parameter, source) in enumerate(
                zip(parameters, sources, strict=True)
            ):
                part = np.s_[rows[first] : rows[first + 1]]
                shared[parameter] = source._replace(
                    stored=(int(rows[-1]), *source.shape[1:]),
                    take=lambda tensor, part=part: tensor[part],
                )
    return shared


def _stack_rows(parameters: list[str], sources: list[Source]) -> dict[str, Source]:
    """Return sources of fused experts, with [out, in] matrices stacked by rows."""
    rows = np.cumsum([0, *(source.stored[0] for source in sources)])
    return {
        parameter: source._replace(
            stored=(int(rows[-1]), *source.stored[1:]),
            take=lambda tensor, part=np.s_[rows[i] : rows[i + 1]]: tensor[part].T,
        )
        for i, (parameter, source) in enumerate(zip(parameters, sources, strict=True))
    }
