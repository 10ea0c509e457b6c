"""What a kernel library must offer, and what all of them share: quantisation, empty products, common refusals."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from loka_compile.errors import UnknownNameError
from loka_compile.gemm import Gemm, Recipe, Role, Scaling
from loka_compile.lowering.quantize import Quantized, quantize

__all__ = [
    "ALL_ROLES",
    "Provider",
    "Quantized",
    "default_device",
    "gpu_reason",
    "import_reason",
    "multiple_of",
]

logger = logging.getLogger(__name__)

ALL_ROLES = frozenset(Role)

#: Kernel libraries index with 32-bit integers.
_MAX_ELEMENTS = 2**31


class Provider:
    """One kernel library. Subclasses state facts; whether a kernel is used is decided by the plan alone.

    Everything that :meth:`gemm` does is functional and traceable: ``make_fx`` over fake tensors (a symbolic batch
    too) gives aten ops and ``loka::`` custom ops, which the lowering pass puts into the joint graph.
    """

    #: How the plan and the options name this library.
    name: ClassVar[str]
    #: The recipes it has, by name.
    recipes: ClassVar[Mapping[str, Recipe]]
    #: The roles it can compute; a recipe may be narrower (:meth:`refuses_shape` says so).
    roles: ClassVar[frozenset[Role]] = ALL_ROLES
    #: dtypes of the GEMM's operands and result, as ``str(dtype)`` without "torch.".
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16", "float16", "float32"})
    #: Distributions whose versions identify the kernels (for cache keys and table headers).
    distributions: ClassVar[tuple[str, ...]] = ("torch",)

    def recipe(self, name: str) -> Recipe:
        """The recipe of that name.

        Raises:
            UnknownNameError: this provider has no such recipe; the text lists those it has.
        """
        if name not in self.recipes:
            raise UnknownNameError(f"recipe of provider {self.name!r}", name, self.recipes)
        return self.recipes[name]

    def version(self) -> str:
        """The installed distributions that the kernels come from, e.g. ``"mslk-cuda 1.1.0"``; "" if there is none."""
        found = []
        for distribution in self.distributions:
            if distribution == "torch":
                # With the build tag (+cu130), which the distribution's metadata may leave out.
                found.append(f"torch {torch.__version__}")
                continue
            try:
                found.append(f"{distribution} {metadata.version(distribution)}")
            except metadata.PackageNotFoundError:
                continue
        return ", ".join(found)

    def supported(self, recipe: Recipe | None = None, device: str | None = None) -> str | None:
        """Why this machine cannot run the provider (or one recipe of it), or None. Platform and library only.

        Args:
            recipe: ask about this recipe; None asks whether the provider can be used at all.
            device: "cuda" or "cpu", where the operands are; None is CUDA where there is one.
        """
        return None

    def refuses(self, gemm: Gemm, recipe: Recipe, device: str | None = None) -> str | None:
        """Why this GEMM cannot run in ``recipe`` on this machine, or None. Never raises."""
        return self.refuses_shape(gemm, recipe) or self.supported(recipe, device)

    def refuses_shape(self, gemm: Gemm, recipe: Recipe) -> str | None:
        """The part of :meth:`refuses` that knows no machine: role, dtype, sizes. For planning for another device."""
        if self.recipes.get(recipe.name) != recipe:
            return f"{self.name} has no recipe {recipe.name!r} (it has: {', '.join(self.recipes)})"
        if gemm.role not in self.roles:
            return f"{self.name} does not compute {gemm.role}"
        if gemm.dtype not in self.dtypes:
            return f"{self.name}:{recipe.name} computes {', '.join(sorted(self.dtypes))}, not {gemm.dtype}"
        for what, rows, columns in (("A", gemm.m, gemm.k), ("B", gemm.n, gemm.k), ("the output", gemm.m, gemm.n)):
            if rows * columns >= _MAX_ELEMENTS:
                return f"{what} has {rows} x {columns} elements; kernels index with 32 bits (fewer than 2**31)"
        return self._refuses_shape(gemm, recipe)

    def _refuses_shape(self, gemm: Gemm, recipe: Recipe) -> str | None:
        """The library's own limits."""
        return None

    def multiples(self, recipe: Recipe) -> Mapping[str, int]:
        """Sizes that the kernels want as multiples: ``{"k": 16, "n": 16}``; others are padded with zeros to that."""
        return {}

    def padding(self, gemm: Gemm, recipe: Recipe, letter: str) -> int:
        """What :meth:`gemm` pads the size m, n or k to a multiple of; 1 where it leaves it as it is."""
        divisor = self.multiples(recipe).get(letter, 1)
        return divisor if letter in gemm.dynamic or getattr(gemm, letter) % divisor else 1

    def padded(self, gemm: Gemm, recipe: Recipe) -> Gemm:
        """The GEMM that the kernel gets to see once :meth:`gemm` has padded the operands; its cost is this one's.

        ``gemm`` itself where nothing has to be padded, and where padding does not help. A dynamic size that is padded
        is no longer dynamic in what comes back: whatever it is, it will be a multiple. An operand that is padded along
        the contraction is not the one that a fused kernel quantises.
        """
        divisors = {letter: self.padding(gemm, recipe, letter) for letter in "mnk"}
        sizes = {
            letter: -(-getattr(gemm, letter) // divisor) * divisor
            for letter, divisor in divisors.items()
            if divisor > 1
        }
        if not sizes:
            return gemm
        found = replace(gemm, **sizes, dynamic="".join(letter for letter in gemm.dynamic if letter not in sizes))
        if "k" in sizes:
            found = replace(found, a_fused=False, b_fused=False)
        if found.norm and sizes.keys() & {"m", "n"}:
            found = replace(found, norm="apart")  # the result is cut before the norm reads it
        return gemm if self.refuses_shape(found, recipe) else found

    def quantize(
        self, x: Tensor, scaling: Scaling, dtype: torch.dtype, transpose: bool, bound: float | None
    ) -> Quantized:
        """One operand; see :func:`loka_compile.lowering.quantize.quantize`."""
        return quantize(x, scaling, transpose=transpose, dtype=dtype, bound=bound)

    def compute(self, a: Quantized, b: Quantized, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        """``A @ B.T`` of quantised operands A [m, k] and B [n, k]: a fresh contiguous [m, n] of ``out_dtype``.

        None of m, n, k is 0, and :meth:`refuses` has been asked.
        """
        raise NotImplementedError

    def gemm(
        self,
        a_base: Tensor,
        a_transposed: bool,
        b_base: Tensor,
        b_transposed: bool,
        recipe: Recipe,
        out_dtype: torch.dtype,
        a_bound: float | None = None,
        b_bound: float | None = None,
    ) -> Tensor:
        """Quantise both operands and multiply: ``A @ B.T`` with A = ``a_base`` (or its transpose), B likewise.

        Sizes that are no multiples of what the kernel wants are padded with zeros before they are quantised (in the
        same loop, in compiled code), and the result is cut.

        Args:
            a_base: the operand as it is stored, 2-D, any strides; ``a_transposed`` says that A is ``a_base.T``.
            b_base: likewise for B [n, k]. A forward GEMM is (x, False, W, False), grad_input (dy, False, W, True),
                grad_weight (dy, True, x, True).
            recipe: one of this provider's, with which :meth:`refuses` accepted the GEMM, or that :meth:`padded` made.
            out_dtype: dtype of the result.
            a_bound: proven bound of ``|A|``, or None; ``b_bound`` likewise.

        Returns:
            [m, n], contiguous. An empty m, n or k is answered without a kernel where it is known when tracing; torch
            specialises on the sizes 0 and 1, so that a symbolic size is neither.
        """
        m, k = reversed(a_base.shape) if a_transposed else a_base.shape
        n = b_base.shape[1] if b_transposed else b_base.shape[0]
        if any(statically_known_true(size == 0) for size in (m, n, k)):
            return a_base.new_zeros((m, n), dtype=out_dtype)
        a, b = self.operands(a_base, a_transposed, b_base, b_transposed, recipe, a_bound, b_bound)
        out = self.compute(a, b, recipe, out_dtype)
        if all(statically_known_true(size == wide) for size, wide in zip((m, n), out.shape, strict=True)):
            return out
        return out[:m, :n].contiguous()

    def operands(
        self,
        a_base: Tensor,
        a_transposed: bool,
        b_base: Tensor,
        b_transposed: bool,
        recipe: Recipe,
        a_bound: float | None = None,
        b_bound: float | None = None,
    ) -> tuple[Quantized, Quantized]:
        """A and B as :meth:`compute` takes them: padded and quantised. Arguments as of :meth:`gemm`."""
        wanted = self.multiples(recipe)
        a_base = _pad(a_base, wanted.get("m", 1), wanted.get("k", 1), a_transposed)
        b_base = _pad(b_base, wanted.get("n", 1), wanted.get("k", 1), b_transposed)
        return (
            self.quantize(a_base, recipe.a, getattr(torch, recipe.a_dtype), a_transposed, a_bound),
            self.quantize(b_base, recipe.b, getattr(torch, recipe.b_dtype), b_transposed, b_bound),
        )

    def form(self, gemm: Gemm, recipe: Recipe) -> object:
        """What :meth:`operands` depends on: kernels of one form can be given the same operands."""
        return recipe.a, recipe.a_dtype, recipe.b, recipe.b_dtype, [self.padding(gemm, recipe, x) for x in "mnk"]


def _pad(x: Tensor, rows: int, contraction: int, transposed: bool) -> Tensor:
    """x as stored, with zeros up to multiples of ``rows`` and ``contraction`` of the operand; x itself if it fits."""
    wanted = (contraction, rows) if transposed else (rows, contraction)
    # Only what is known without a guard: a moving size is always padded, by 0 where it happens to fit.
    fits = [statically_known_true(size % multiple == 0) for size, multiple in zip(x.shape, wanted, strict=True)]
    if all(fits):
        return x
    below, right = (
        0 if fit else (size + multiple - 1) // multiple * multiple - size
        for fit, size, multiple in zip(fits, x.shape, wanted, strict=True)
    )
    return torch.nn.functional.pad(x, (0, right, 0, below))


def more_rows(x: Tensor, count: int) -> Tensor:
    """An FP8 operand [rows, k] with ``count`` rows of zeros below, contiguous."""
    return torch.nn.functional.pad(x.view(torch.uint8), (0, 0, 0, count)).view(x.dtype)


def default_device() -> str:
    """Where kernels run when nobody says: "cuda" if there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_reason(lowest: tuple[int, int], below: tuple[int, int] | None = None, device: str | None = None) -> str | None:
    """Why the GPU here is not an NVIDIA one with ``lowest <= compute capability < below``, or None if it is."""
    span = f"compute capability {lowest[0]}.{lowest[1]}" + (" or newer" if below is None else "")
    if (device or default_device()) != "cuda":
        return f"needs an NVIDIA GPU of {span}; the operands are on the CPU"
    if torch.version.hip:
        return "needs an NVIDIA GPU; ROCm's FP8 format (e4m3fnuz) is not supported"
    if not torch.cuda.is_available():
        return f"needs an NVIDIA GPU of {span}; torch sees none"
    here = torch.cuda.get_device_capability()
    if here < lowest or (below is not None and here >= below):
        return f"needs an NVIDIA GPU of {span}; this one has {here[0]}.{here[1]}"
    return None


def import_reason(module: str) -> str | None:
    """Import a kernel library; returns None, or the reason why it cannot be used.

    A broken wheel raises anything: ImportError, OSError for an undefined symbol, AssertionError for a missing nvcc.
    None of that may break a compile that can do without the library.
    """
    try:
        importlib.import_module(module)
    except Exception as error:
        logger.debug("import of %s failed", module, exc_info=True)
        return f"import of {module} failed with {type(error).__name__}: {str(error).strip() or 'no text'}"
    return None


def multiple_of(gemm: Gemm, divisors: Mapping[str, int], why: str) -> str | None:
    """Refuse a GEMM whose sizes are not multiples: ``{"k": 16, "n": 16}``; ``why`` names who wants that.

    A size that varies from call to call (``Gemm.dynamic``) is refused whatever its present value: the next batch may
    be ragged.
    """
    for letter, divisor in divisors.items():
        size = getattr(gemm, letter)
        if letter in gemm.dynamic:
            what = "the batch, " if gemm.role is Role.GRAD_WEIGHT and letter == "k" else ""
            return (
                f"{why} needs {letter} to be a multiple of {divisor}, but {letter} is {what}dynamic "
                f"(now {size}): it is not provably a multiple"
            )
        if size % divisor:
            return f"{why} needs {letter} to be a multiple of {divisor}; it is {size}"
    return None
