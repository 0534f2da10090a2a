"""What stands where a named backend does not apply: an error when it is lowered."""

import dataclasses
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jkv.attention.backend import Backend
from jkv.attention.call import Call
from jkv.attention.cards import Card
from jkv.attention.derivative import Cotangents, Gradients, shape_gradients


@dataclasses.dataclass(frozen=True)
class Refusal(Backend):
    """Raises NotImplementedError in programs that come to be lowered for a platform."""

    reason: str

    def attend(self, call: Call, card: Card) -> tuple[jax.Array, jax.Array]:
        """Stand for a result."""
        del card
        return _bind(self.reason, call.results)

    def differentiate(
        self, call: Call, cotangents: Cotangents, card: Card
    ) -> Gradients:
        """Stand for gradients."""
        del cotangents, card
        return _bind(self.reason, shape_gradients(call))


def _bind(reason: str, shapes: Any) -> Any:
    leaves, structure = jax.tree.flatten(shapes)
    refused = _refuse.bind(reason=reason, results=tuple(leaves))
    return jax.tree.unflatten(structure, refused)


def _find_types(*, results: Any, **_params: Any) -> Any:
    return [jax.core.ShapedArray(result.shape, result.dtype) for result in results]


def _lower(_ctx: Any, *, reason: str, **_params: Any) -> Any:
    raise NotImplementedError(reason)


_refuse = Primitive("jkv_refuse")
_refuse.multiple_results = True
_refuse.def_abstract_eval(_find_types)
mlir.register_lowering(_refuse, _lower)
