"""``explain``: compile a model once, just to see what would be done to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from loka_compile._compat.dynamo_errors import BackendCompilerFailed
from loka_compile.backend import loka
from loka_compile.errors import LokaError
from loka_compile.report import Report, merge_reports, reports


def explain(
    model: nn.Module, *inputs: Any, options: Mapping[str, Any] | None = None, show: bool = True, **kwargs: Any
) -> Report:
    """Compile ``model`` on ``inputs`` with ``backend="loka"`` and say what became of every chain and GEMM.

    The model is left as it was: its gradients, buffers and the random state are put back. With ``table="auto"`` and no
    cached table the given inputs are the only sample, so the plan is a preview, and it is not cached.

    Args:
        model: the module, in the mode (train or eval) that is to be explained.
        *inputs: arguments of its forward; **kwargs: keyword arguments.
        options: as for ``torch.compile(model, backend="loka", options=...)``.
        show: print the report.

    Returns:
        The report; one for all graphs if the model has graph breaks. Its ``graph`` and ``diff`` work.

    Raises:
        LokaError: as the compile itself would.
    """
    chosen = {**(options or {}), "inspect": True, "auto_calls": 1}
    before = reports()
    compiled = torch.compile(_new_call(model), backend=functools.partial(loka, options=chosen))
    with _restored(model):
        try:
            # The first call is the sample, the second one runs the plan.
            for _ in range(2):
                _run(compiled, model, inputs, kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, LokaError):
                raise error.inner_exception from None
            raise
    report = merge_reports([r for r in reports() if not any(r is old for old in before)])
    if show:
        print(report)
    return report


def _new_call(model: nn.Module) -> Callable[..., Any]:
    """A function that calls ``model``, with code of its own: Dynamo keeps what it compiles by code object, so that
    neither an earlier explanation is found again nor the user's own compiles run into the limit of recompiles."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return FunctionType(call.__code__.replace(), globals(), closure=call.__closure__)


def _run(compiled: Any, model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    out = compiled(*inputs, **kwargs)
    if not torch.is_grad_enabled():
        return
    leaves = torch.utils._pytree.tree_leaves(out)
    losses = [t.float().sum() for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    wanted: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    wanted += [t for t in torch.utils._pytree.tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad]
    if losses and wanted:
        torch.autograd.grad(torch.stack(losses).sum(), wanted, allow_unused=True)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put buffers and random state back afterwards."""
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    with torch.random.fork_rng():
        yield
    with torch.no_grad():
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
