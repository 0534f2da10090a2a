"""Sizes of optional parts of a layer."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts (MoE): each token uses its top-k of many MLPs.

    count: int, number of experts of a layer.
    per_token: int, experts per token, the router's top-k.
    inner: int, hidden units of an expert.
    latent: int, width of the experts' inputs and outputs; None: the hidden size.
    router_inner: int, hidden units of an MLP router, with a state from the previous
        layer (`routers.py`); None: a linear router.
    shared_inner: int, hidden units of the shared expert, which every token uses; 0: no
        shared expert.
    shared_scale: float, factor of the shared expert's output.
    has_shared_gate: sigmoid gate on the shared expert's output, one per token.
    has_sigmoid: router scores are sigmoids, instead of softmaxes.
    has_choice_bias: a learnt bias is added to the scores to select experts; weights do
        not include it.
    score_cap: float, tanh bound of the router logits; None: no bound.
    jitter: float, for Phi's SparseMixer: an expert's weight is its softmax among the
        experts within a relative distance of 2 * jitter; None: among all.
    is_normalised: the weights of a token's experts are divided by their sum.
    epsilon: float, added to that sum.
    least_sum: float, minimum of the divisor.
    scale: float, factor of the weights.
    groups, groups_per_token: ints, expert groups, and groups that a token may use.
    has_biases: biases of the router and the experts.
    has_own_norms: for Gemma 4: experts and router norm the MLP's unnormed input
        themselves, the outputs of experts and MLP are normed before they are added, and
        an expert's weight has a learnt factor.
    """

    count: int
    per_token: int
    inner: int
    latent: int | None = None
    router_inner: int | None = None
    shared_inner: int = 0
    shared_scale: float = 1.0
    has_shared_gate: bool = False
    has_sigmoid: bool = False
    has_choice_bias: bool = False
    score_cap: float | None = None
    jitter: float | None = None
    is_normalised: bool = False
    epsilon: float = 0.0
    least_sum: float = 0.0
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    has_biases: bool = False
    has_own_norms: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for groups or a top-k that the experts do not allow."""
        if self.count % self.groups or self.groups_per_token > self.groups:
            raise ValueError(
                f"config.json: {self.count} experts cannot be split into {self.groups} "
                f"groups (n_group), {self.groups_per_token} per token (topk_group)"
            )
        if self.per_token > self.count // self.groups * self.groups_per_token:
            raise ValueError(
                f"config.json: a token cannot use {self.per_token} of {self.count} "
                f"experts in {self.groups_per_token} of {self.groups} groups "
                "(num_experts_per_tok)"
            )
        # A group's score is the sum of its two best sigmoids (`experts.py`).
        if self.has_sigmoid and self.groups > 1 and self.count < 2 * self.groups:
            raise ValueError(
                f"config.json: {self.groups} groups of {self.count} experts have one "
                "each, but a router with sigmoids needs two or more per group; set "
                "n_group to 1"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputGate:
    """Gate on attention's output, projected from the layer's input.

    of_heads: one gate per head, instead of one per component.
    function: activation of the projection.
    is_beside_queries: a head's gate rows follow its query rows in one tensor.
    """

    of_heads: bool = False
    function: Literal["sigmoid", "softplus"] = "sigmoid"
    is_beside_queries: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """Per-layer embeddings, as in Gemma 4's small models.

    vocab_size: int, number of tokens with per-layer embeddings.
    dim: int, components of an embedding for one layer.
    """

    vocab_size: int
    dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (MLA): heads share a vector of keys and values.

    rank: int, components of the latent vector, projected to each head's key and value.
    query_rank: int, rank of the query projection; None: full rank.
    plain_dim, turned_dim: ints, query components without and with rotary embedding.
    value_dim: int, components of a head's value.
    """

    rank: int
    query_rank: int | None
    plain_dim: int
    turned_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpace:
    """A Mamba 2 mixer.

    num_heads, head_dim: ints, `H` and `P` of `mixers/state_space.py`.
    num_groups, state_dim: ints, `G` and `N`.
    width: int, kernel size of the convolution, including the token itself.
    step_limits: floats, minimum and maximum of a token's step.
    has_bias, has_taps_bias, has_output_bias: biases of the input projection, of the
        convolution and of the output projection.
    norm: RMSNorm by groups, "before" or "after" the gate; None: no norm.
    scales: floats, factors of gates, values, keys, queries and steps.
    input_scale, output_scale: floats, factors of the input and the output.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    width: int = 4
    step_limits: tuple[float, float] = (0.0, float("inf"))
    has_bias: bool = False
    has_taps_bias: bool = True
    has_output_bias: bool = False
    norm: Literal["before", "after"] | None = "after"
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    input_scale: float = 1.0
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError if the heads are not divisible by the groups."""
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"config.json: {self.num_heads} heads cannot share {self.num_groups} "
                "groups of keys and queries (mamba_n_groups) evenly"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convolution:
    """A short causal convolution between two gates (LFM2).

    width: int, kernel size, including the token itself.
    has_bias: biases of the projections and the convolution.
    """

    width: int
    has_bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolvedHeads:
    """Queries and keys after two convolutions, per channel and per head.

    widths: ints, kernel sizes of both, including the token itself.
    """

    widths: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """Gated delta rule: a matrix per head is the state, and every token corrects it.

    num_key_heads, num_heads: ints; adjacent heads of the state share a key head.
    key_dim, value_dim: ints, components of a head's key and value.
    width: int, kernel size of the convolution, including the token itself.
    gates: int, rank of the projections of gates and decays; None: full rank.
    forgets_by_channel: one decay per channel of a key, instead of one per head.
    least_decay: float below 0, minimum of a token's log decays; None: no bound.
    strength: float, maximum of a token's correction; 2 allows the old value to change
        its sign.
    norm_epsilon: float, of the norm of the output.
    gate: activation of the gate on the normed output.
    is_grouped: one tensor has the projections of a key head and its heads together.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    width: int = 4
    gates: int | None = None
    forgets_by_channel: bool = False
    least_decay: float | None = None
    strength: float = 1.0
    norm_epsilon: float = 1e-6
    gate: Literal["silu", "sigmoid"] = "silu"
    is_grouped: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError if the heads are not divisible by the key heads."""
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"config.json: {self.num_heads} value heads of linear attention cannot "
                f"share {self.num_key_heads} key heads (linear_num_key_heads) evenly"
            )
