"""The sizes of a layer's parts that not every model has."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Perceptrons, a few of them used by each token.

    count: int, experts of a layer.
    per_token: int, how many a token is sent to.
    inner: int, hidden units of each.
    latent: int, numbers of a token that experts see and return; None for the hidden
        size.
    router_inner: int, hidden units of a router that is a perceptron, and sees its state
        in the layer before (`routers.py`); None for a matrix.
    shared_inner: int, of the perceptron that every token uses as well; 0 for none.
    shared_scale: float, multiplies that perceptron's output.
    has_shared_gate: the output is weighed, by a sigmoid of the token.
    has_sigmoid: scores are sigmoids, chosen with a learnt bias, not softmaxes.
    has_choice_bias: softmaxes are chosen with a learnt bias too.
    is_unbiased: sigmoids are chosen without that bias.
    score_cap: float, bound of the scores before the sigmoid or softmax; None for none.
    jitter: float, of Phi's sparse mixer: an expert's weight is its part in a softmax
        over the experts at most this far below it, relatively; None for one over all.
    is_normalised: the weights of a token's experts add up to one.
    epsilon: float, added to the sum that they are divided by.
    least_sum: float, their divisor at least.
    scale: float, multiplies the weights.
    groups, groups_per_token: ints; a token's experts are all from that many groups.
    has_biases: the router and the experts add biases.
    has_own_norms: experts and router take the input of the perceptron's norm, by norms
        of their own, and both outputs are normed before they are added; an expert's
        weight is multiplied by a learnt number (Gemma 4).
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
    is_unbiased: bool = False
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

    @property
    def is_biased(self) -> bool:
        """True if a learnt bias takes part in the choice of experts."""
        return self.has_choice_bias or (self.has_sigmoid and not self.is_unbiased)

    def __post_init__(self) -> None:
        """Reject a choice of experts that is impossible."""
        if self.count % self.groups or self.groups_per_token > self.groups:
            raise ValueError(
                f"config.json: {self.count} experts cannot be split into {self.groups} "
                f"groups, of which a token uses {self.groups_per_token}"
            )
        if self.per_token > self.count // self.groups * self.groups_per_token:
            raise ValueError(
                f"config.json: a token cannot use {self.per_token} of {self.count} "
                f"experts in {self.groups_per_token} of {self.groups} groups"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputGate:
    """Weights of attention's output, projected from the layer's input.

    of_heads: one weight for each head, not one for each component.
    function: turns the projection into the weight.
    is_beside_queries: the rows of each head follow those of its query in one tensor.
    """

    of_heads: bool = False
    function: Literal["sigmoid", "softplus"] = "sigmoid"
    is_beside_queries: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """Inputs of every layer about a token, as in Gemma 4's small models.

    vocab_size: int, tokens that have an embedding for each layer.
    dim: int, components of a layer's input.
    """

    vocab_size: int
    dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention with one small vector as the keys and values of all heads.

    rank: int, components of that vector, from which each head's key and value follow.
    query_rank: int, components that queries are squeezed to; None if they are not.
    plain_dim, turned_dim: ints, components of a query without and with position.
    value_dim: int, components of a head's value.
    """

    rank: int
    query_rank: int | None
    plain_dim: int
    turned_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpace:
    """A mixer of Mamba 2.

    num_heads, head_dim: ints, `H` and `P` of `mixers/state_space.py`.
    num_groups, state_dim: ints, `G` and `N`.
    width: int, tokens that the convolution before it sees, itself counted.
    step_limits: floats, the least and the largest step of a token.
    has_bias, has_taps_bias, has_output_bias: biases of the first projection, of the
        convolution, and of the last projection.
    norm: whether heads are normed, by groups, "before" or "after" they are gated; None
        if they are not.
    scales: floats that multiply gates, values, keys, queries and steps.
    input_scale, output_scale: floats that multiply the input and the output.
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
        """Reject heads that cannot share their groups."""
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"config.json: {self.num_heads} heads cannot share {self.num_groups} "
                "groups of keys and queries evenly"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convolution:
    """A mixer that convolves the last tokens, between two gates.

    width: int, tokens that it sees, itself counted.
    has_bias: the projections and the convolution have biases.
    """

    width: int
    has_bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolvedHeads:
    """Queries and keys that are convolved twice, of channels and of heads.

    widths: ints, tokens that each convolution sees, the token itself counted.
    """

    widths: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """Layers with a matrix of each head as the state, corrected by every token.

    num_key_heads, num_heads: ints; a key head serves neighbouring heads of the state.
    key_dim, value_dim: ints, components of a head's key and value.
    width: int, tokens that the convolution before it sees, itself counted.
    gates: int, components of the rank that gates are squeezed to; None if they are not.
    forgets_by_channel: each channel of a key forgets by itself, else each head.
    least_decay: float below 0, bound of the logarithms of a token's decays; None for no
        bound.
    strength: float, the most that a token corrects: 2 lets it turn the old value over.
    norm_epsilon: float, of the norm behind it.
    gate: the function of the gate that multiplies the normed output.
    is_grouped: the projections of a key head and its heads lie together in a tensor.
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
        """Reject heads that cannot be shared."""
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"config.json: {self.num_heads} value heads of linear attention cannot "
                f"share {self.num_key_heads} key heads evenly"
            )
