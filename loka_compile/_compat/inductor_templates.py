"""Inductor's Triton templates. Private: ``select_algorithm``, ``kernel.mm_common``, ``lowering``, ``ir``, ``graph``.

Differences that matter here: ``TritonTemplate`` asserts that its name is new (2.11 to 2.13; later it tolerates the same
source); a single choice needs no ``autotune_select_algorithm``, whose result changed from a node to a pair in 2.13.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch


def template(name: str, source: str, grid: str) -> Any:
    """The Triton template of that name, made once per process.

    ``grid`` is "tiles" (a program for each BLOCK_M x BLOCK_N tile), "persistent" (NUM_SMS programs at most) or "split"
    (SPLITS programs a tile, NUM_SMS at most, in whole groups) or "one" (a single program).
    """
    from torch._inductor.kernel.mm_common import mm_grid, persistent_mm_grid
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate

    def split_grid(m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any, min: Any) -> tuple[Any, int, int]:
        tiles = cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"])
        return min(meta["NUM_SMS"] // meta["SPLITS"], tiles) * meta["SPLITS"], 1, 1

    def one(*size_and_meta: Any) -> tuple[int, int, int]:
        return 1, 1, 1

    existing = TritonTemplate.all_templates.get(name)
    if existing is not None:
        return existing
    ours = {"split": SymbolicGridFn(split_grid), "one": SymbolicGridFn(one)}
    grids = {"tiles": mm_grid, "persistent": persistent_mm_grid, **ours}
    return TritonTemplate(name=name, grid=grids[grid], source=source)


def render(
    made: Any, name: str, inputs: Sequence[Any], layout: Any, *, launch_early: bool = False, **options: Any
) -> Any:  # fmt: skip
    """The lowered result of the template with one fixed configuration.

    ``launch_early`` launches the kernel while the one before it still runs (programmatic dependent launch): its source
    must then wait before it reads. Inductor's own switch, ``triton.enable_pdl``, leaves templates out.

    Raises:
        NotImplementedError: the template cannot be generated for these inputs.
    """
    choices: list[Any] = []
    if launch_early:
        options["triton_meta"] = {"launch_pdl": True}
    error = made.maybe_append_choice(choices, input_nodes=tuple(inputs), layout=layout, **options)
    if error is not None:
        raise error
    return choices[0].output_node()


def realized(*nodes: Any) -> list[Any]:
    """Inputs of a template must be buffers."""
    from torch._inductor.select_algorithm import realize_inputs

    out = realize_inputs(*nodes)
    return list(out) if isinstance(out, (list, tuple)) else [out]


def output_layout(device: torch.device, dtype: torch.dtype, size: Sequence[Any]) -> Any:
    """A contiguous layout that Inductor must not change."""
    from torch._inductor.ir import FixedLayout

    return FixedLayout(device, dtype, list(size))


def empty(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """A buffer that a template may write besides its output ("mutated input")."""
    from torch._inductor.lowering import empty_strided

    buffer = empty_strided(list(size), None, dtype=dtype, device=device)
    buffer.realize()
    return buffer


def written(x: Any) -> Any:
    """x, written to memory by a kernel that no reader is fused into. ``no_fuse_buffer_names`` is in 2.11 to 2.14."""
    from torch._inductor.virtualized import V

    x.realize()
    V.graph.no_fuse_buffer_names.add(x.get_name())
    return x


#: What was made once for a graph that is being lowered.
_of_graph: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def once_a_graph(key: Any, make: Callable[[], Any]) -> Any:
    """What ``make`` gives, made once for the graph that is being lowered."""
    from torch._inductor.virtualized import V

    made = _of_graph.setdefault(V.graph, {})
    if key not in made:
        made[key] = make()
    return made[key]


def constant(value: float, device: torch.device) -> Any:
    """A number as an fp32 buffer [] that the compiled graph holds; one of each per graph.

    In a graph inside of another (a branch of ``torch.cond``) a kernel writes it: torch 2.11 to 2.13 hand
    constants to the outermost graph's code alone.
    """
    from torch._inductor.graph import SubgraphLowering
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V
    from torch.utils._python_dispatch import _disable_current_modes

    if isinstance(V.graph, SubgraphLowering):
        return lowerings[torch.ops.aten.full.default]([], value, dtype=torch.float32, device=device)

    def make() -> Any:
        # Operators that Inductor calls instead of generating them are traced with the tensor itself. From here on: the
        # mode belongs to this compile, and freezing does the same to it.
        V.fake_mode.allow_non_fake_inputs = True
        with _disable_current_modes():  # a real tensor; through the host, so that it is there for every stream
            return V.graph.add_tensor_constant(torch.tensor(value, dtype=torch.float32, device="cpu").to(device))

    return once_a_graph(("constant", value, device), make)


def register(op: Any, lower: Callable[..., Any]) -> None:
    """Make ``lower`` Inductor's lowering of ``op``, unless it has one."""
    from torch._inductor.lowering import lowerings, register_lowering

    if op not in lowerings:
        register_lowering(op, type_promotion_kind=None)(lower)


def makes_triton_code(device: torch.device) -> bool:
    """Whether Inductor generates Triton for the device; on a CPU it does only when told to."""
    import torch._inductor.config as inductor_config

    return device.type != "cpu" or inductor_config.cpu_backend == "triton"


def call_kernel(op: Any, *args: Any) -> Any:
    """Lower ``op`` to a call of its registered kernel."""
    from torch._inductor.lowering import fallback_handler

    return fallback_handler(op, add_to_fallback_set=False)(*args)


def size_of(size: Any, fallback: int) -> int:
    """A dimension's value for choosing a configuration; adds no guard. ``optimization_hint`` is in 2.11 to 2.14."""
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.optimization_hint(size, fallback=fallback))


def multiple_of(size: Any, factor: int) -> bool:
    """Whether ``size`` is known to be a multiple of ``factor``, without a guard."""
    from torch._inductor.virtualized import V

    return bool(V.graph.sizevars.statically_known_multiple_of(size, factor))


def equals(size: Any, other: Any) -> bool:
    """Whether two sizes are known to be equal, without a guard."""
    from torch._inductor.virtualized import V

    return bool(V.graph.sizevars.statically_known_equals(size, other))


def is_aligned(node: Any) -> bool:
    """Whether the buffer surely starts on 16 bytes."""
    from torch._inductor.virtualized import V

    return node.get_name() not in V.graph.unaligned_buffers and equals(node.get_layout().offset, 0)


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors that a persistent kernel may fill; 132 (an H200) where there is no GPU to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use; those of an H200 where there is no GPU to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 232_448
    # HIP's properties lack it (torch 2.11 to 2.14); 64 kB is what its GPUs have.
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 65_536))


def launches_early(device: torch.device) -> bool:
    """Whether kernels may start before the one in front has ended; also where there is no GPU to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
