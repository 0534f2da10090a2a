"""The kernels as backends: supported calls and tiles for each GPU.

Kernels are imported when they are called, as most processes have no GPU.
"""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax

from jkv.attention.backend import (
    Backend,
    Call,
    Cotangents,
    DeviceType,
    Gradients,
    Past,
    Pools,
    Requests,
    SlotWrite,
    StepShape,
    find_gpu,
)
from jkv.attention.kernel.elements.formats import KERNEL_FORMATS
from jkv.attention.kernel.tiles import tuning
from jkv.attention.kernel.work import lists

if TYPE_CHECKING:
    from jkv.attention.kernel.backend import Way


@dataclasses.dataclass(frozen=True)
class Kernels(Backend):
    """The kernels: compiled for GPUs; interpreted on CPU, if named."""

    platforms: ClassVar[tuple[str, ...]] = ("cpu", "rocm", "cuda")
    is_by_position: ClassVar[bool] = True
    is_written: ClassVar[bool] = False  # lowered to Triton by jkv, not by Pallas

    def why_not(self, call: Call, device: DeviceType) -> str | None:
        """Return a reason unless the table has a row for the call and GPU, if known."""
        return tuning.why_not(call.queries, call.pools, *device) or self._why_missing()

    def attend(self, call: Call, device: DeviceType) -> tuple[jax.Array, jax.Array]:
        """Launch the kernels with the tiles of the GPU."""
        from jkv.attention.kernel.launches.attention import attend_kernel

        found = tuning.find_tuning(call.queries, call.pools, *device)
        assert found is not None  # checked by `why_not`
        return attend_kernel(call, tuning=found, way=self._find_way(device))

    def why_not_derived(self, call: Call, device: DeviceType) -> str | None:
        """Return a reason unless the table of derivatives has a row for the call."""
        if call.past is not None:
            return "the derivative's kernels support no past="
        reason = tuning.why_no_tile(call.queries, call.pools, *device)
        return reason or self._why_missing()

    def differentiate(
        self, call: Call, cotangents: Cotangents, device: DeviceType
    ) -> Gradients:
        """Launch the derivative's kernels."""
        from jkv.attention.kernel.launches.derivative import differentiate_kernel

        found = tuning.find_backward(call.queries, call.pools, *device)
        assert found is not None  # checked by `why_not_derived`
        way = self._find_way(device)
        return differentiate_kernel(call, cotangents, tuning=found, way=way)

    def why_not_stored(self, write: SlotWrite, device: DeviceType) -> str | None:
        """Return the reason to use scatters; also without a GPU of the platform."""
        if device.target is None:
            return f"there are no kernels for {device.platform}"
        from jkv.attention.kernel.launches.slots import why_scattered

        if tuning.find_family(*device) is None:
            return f"there are no kernels for {device.target}"
        if not {*write.formats} <= KERNEL_FORMATS.keys():
            return "there is no kernel for the format"
        return why_scattered(write.arrays) or self._why_missing()

    def store(self, write: SlotWrite, device: DeviceType) -> dict[str, jax.Array]:
        """Store with one launch for all arrays."""
        from jkv.attention.kernel.launches.slots import store_rows

        return store_rows(write, way=self._find_way(device))

    def _find_way(self, device: DeviceType) -> "Way":
        from jkv.attention.kernel.backend import Way

        if device.platform == "cpu":
            return Way(interpret=True)
        return Way(written_for=device.platform if self.is_written else None)

    def _why_missing(self) -> str | None:
        """Return the reason Pallas cannot lower kernels, if it is to; imports it."""
        if self.is_written:
            return None
        from jkv.attention.kernel.backend import why_missing

        return why_missing()


@dataclasses.dataclass(frozen=True)
class Pallas(Kernels):
    """The kernels with Pallas' lowering, and the work lists of a step."""

    name: ClassVar[str] = lists.NAME
    default_platforms: ClassVar[tuple[str, ...]] = ("rocm", "cuda")
    plan_nodes: ClassVar[tuple[type, ...]] = lists.NODES
    plan_sizes: ClassVar[tuple[type, ...]] = lists.SIZES

    def plan(
        self,
        pools: Pools,
        requests: Requests,
        reference_counts: jax.Array,
        step: StepShape,
        past: Past | None,
    ) -> tuple[lists.WorkList, ...] | None:
        """List the work of a step, if there is a GPU."""
        if find_gpu() is None:
            return None
        from jkv.attention.kernel.work.planning import plan_work

        return plan_work(pools, requests, reference_counts, step, past)


@dataclasses.dataclass(frozen=True)
class Triton(Kernels):
    """The kernels with jkv's own lowering to Triton, used only if named."""

    name: ClassVar[str] = "triton"
    is_written: ClassVar[bool] = True
