"""A gate that knows the loss: what each GEMM's FP8 error does to it, and plans within a budget of loss (issue 6).

An error gate (paper section III-C) treats all GEMMs alike; the loss does not. :func:`loss_sensitivity` measures the
change of the loss when a single GEMM runs in FP8, :func:`plan_by_loss` takes the set of kernels that saves the most
time within a budget, :func:`loss_of_plan` measures what a whole plan does.
"""

from loka_compile.loss.budget import LossPlan, plan_by_loss
from loka_compile.loss.effects import Effect, Sensitivity
from loka_compile.loss.sensitivity import loss_of_plan, loss_sensitivity

__all__ = ["Effect", "LossPlan", "Sensitivity", "loss_of_plan", "loss_sensitivity", "plan_by_loss"]
