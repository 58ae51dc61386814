"""Every private name of torch that graphzero uses, and every name that only some of torch 2.11 to 2.15 have.

Differences between versions are handled here; the rest of the package imports these names.
"""

from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import placement_types
from torch.fx import _lazy_graph_module

from graphzero._compat.dispatch import (
    add_autocast, attention_order, behind_autocast, below_autocast, direct, functional_form, has_own_kernel, has_tiles,
    makes_tensors_of_numbers, op_packet, ops_with_autocast, overload_of_custom_op, spare_autocast, without_mkldnn,
)  # fmt: skip
from graphzero._compat.distributed import (
    all_gather_single, break_gloo, dump_nccl_trace, fake_store, forget_default_group, forget_groups, gloo, job_store,
    lost_by_gloo, mesh_of_other_ranks, nccl, nccl_version, own_connection, prefixed, reduce_scatter_single, timeout_of,
)  # fmt: skip
from graphzero._compat.inductor import (
    clear_workspaces, end_failed_capture, inductor_compile, inductor_folder, inductor_lacks,
)  # fmt: skip
from graphzero._compat.interrupts import (
    assigned, contextmanager, cpu_by_default, forget_change, note_change, patched, patched_all,
    undoing,
)  # fmt: skip
from graphzero._compat.modes import (
    answers_whether_traced, autograd_under, below_autograd, compiled_functions_inline, device_asked, dynamo_runs,
    flex_attention_check, is_compiling, modes_are_on, no_modes, outside_inference_mode, sequence_number, without_modes,
)  # fmt: skip
from graphzero._compat.objects import (
    COUNTS_ATTRIBUTES, accumulation_hooks, alias, alike, dict_version, gradient_hooks, has_step_hooks, is_dtensor,
    is_saved, is_torchs_step, loads_by_code, local_of_dtensor, local_tensor, note_step, redefines_torch, storage_id,
    take_class, unhooked_step, users_class, with_local,
)  # fmt: skip
from graphzero._compat.tracing import (
    ASSERT, ASSERT_ASYNC, MODULE_CALL, add_node, annotate, arguments, assert_condition, checks_given_to, compile_guards,
    constant_of, foreach_lerp_, forget_fakes, forget_names, functional_value, functions, guarded_number, inferring,
    input_nodes, is_traced_after, keep_constant, kept_symbolic, last_traced, make_fx, new_symbol, preserve_node_meta,
    properties, reparametrize, set_arguments, shape_env, silent_fakes, small_constants, symbol_name, traced_call,
    traced_from, unknown, validity_as_tensor,
)  # fmt: skip

LazyGraphModule = _lazy_graph_module._LazyGraphModule
StridedShard = placement_types._StridedShard
