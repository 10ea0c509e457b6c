"""What ``_compat/inductor_templates.py`` relies on exists in this torch with the signature it uses."""

from __future__ import annotations

import inspect

import sympy
import torch

from loka_compile._compat import inductor_templates


def test_template_api_has_the_parameters_we_pass() -> None:
    from torch._inductor.kernel.mm_common import mm_grid, persistent_mm_grid
    from torch._inductor.select_algorithm import TritonTemplate

    made = inspect.signature(TritonTemplate.__init__).parameters
    assert {"name", "grid", "source"} <= set(made)
    generated = inspect.signature(TritonTemplate.generate).parameters
    assert {"input_nodes", "layout", "num_stages", "num_warps", "mutated_inputs"} <= set(generated)
    assert callable(TritonTemplate.maybe_append_choice)
    assert isinstance(TritonTemplate.all_templates, dict)
    assert callable(mm_grid.fn)
    assert callable(persistent_mm_grid.fn)


def test_lowering_helpers_exist() -> None:
    from torch._inductor.ir import FixedLayout
    from torch._inductor.lowering import empty_strided, lowerings, register_lowering
    from torch._inductor.select_algorithm import realize_inputs
    from torch._inductor.sizevars import SizeVarAllocator

    assert "type_promotion_kind" in inspect.signature(register_lowering).parameters
    assert isinstance(lowerings, dict)
    assert callable(realize_inputs)
    assert callable(empty_strided)
    assert torch.ops.aten.full.default in lowerings
    assert list(inspect.signature(FixedLayout).parameters)[:3] == ["device", "dtype", "size"]
    for method in ("optimization_hint", "statically_known_multiple_of", "statically_known_equals"):
        assert callable(getattr(SizeVarAllocator, method))


def test_a_buffer_can_be_kept_out_of_fusion() -> None:
    from torch._inductor import graph, scheduler

    assert "self.no_fuse_buffer_names" in inspect.getsource(graph)
    assert "V.graph.no_fuse_buffer_names" in inspect.getsource(scheduler)


def test_a_template_is_made_once() -> None:
    from torch._inductor.select_algorithm import TritonTemplate

    source = "{{def_kernel('A')}}\n    pass\n"
    first = inductor_templates.template("loka_test_template", source, "tiles")
    try:
        assert inductor_templates.template("loka_test_template", source, "tiles") is first
    finally:
        del TritonTemplate.all_templates["loka_test_template"]


def test_programs_that_share_a_tile_come_in_whole_groups() -> None:
    from torch._inductor.select_algorithm import TritonTemplate

    name = "loka_test_split"
    grid = inductor_templates.template(name, "{{def_kernel('A')}}\n    pass\n", "split").grid
    del TritonTemplate.all_templates[name]
    sizes = {"BLOCK_M": 64, "BLOCK_N": 256, "SPLITS": 8, "NUM_SMS": 132}
    assert grid(1024, 256, sizes) == (128, 1, 1)
    assert grid(1, 384, sizes) == (16, 1, 1)
    assert grid(4096, 512, sizes) == (128, 1, 1)
    m = sympy.Symbol("m", positive=True, integer=True)
    assert grid.sympy_call(m, 256, sizes)[0].subs(m, 129) == 24


def test_a_lowering_is_not_registered_over_another() -> None:
    from torch._inductor.lowering import lowerings

    op = torch.ops.aten.add.Tensor
    before = lowerings[op]
    inductor_templates.register(op, lambda *args: None)
    assert lowerings[op] is before
