"""Every private name of torch that graphzero uses, and every name that only some of torch 2.11 to 2.15 have.

Differences between versions are handled here; the rest of the package imports these names.
"""

from torch._decomp import decomposition_table as decomposition_table
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.tensor import placement_types
from torch.fx import _lazy_graph_module

from graphzero._compat.dispatch import add_autocast as add_autocast
from graphzero._compat.dispatch import attention_order as attention_order
from graphzero._compat.dispatch import behind_autocast as behind_autocast
from graphzero._compat.dispatch import below_autocast as below_autocast
from graphzero._compat.dispatch import direct as direct
from graphzero._compat.dispatch import functional_form as functional_form
from graphzero._compat.dispatch import has_own_kernel as has_own_kernel
from graphzero._compat.dispatch import has_tiles as has_tiles
from graphzero._compat.dispatch import makes_tensors_of_numbers as makes_tensors_of_numbers
from graphzero._compat.dispatch import op_packet as op_packet
from graphzero._compat.dispatch import ops_with_autocast as ops_with_autocast
from graphzero._compat.dispatch import overload_of_custom_op as overload_of_custom_op
from graphzero._compat.dispatch import spare_autocast as spare_autocast
from graphzero._compat.dispatch import without_mkldnn as without_mkldnn
from graphzero._compat.distributed import all_gather_single as all_gather_single
from graphzero._compat.distributed import break_gloo as break_gloo
from graphzero._compat.distributed import dump_nccl_trace as dump_nccl_trace
from graphzero._compat.distributed import fake_store as fake_store
from graphzero._compat.distributed import gloo as gloo
from graphzero._compat.distributed import job_store as job_store
from graphzero._compat.distributed import lost_by_gloo as lost_by_gloo
from graphzero._compat.distributed import mesh_of_other_ranks as mesh_of_other_ranks
from graphzero._compat.distributed import nccl as nccl
from graphzero._compat.distributed import own_connection as own_connection
from graphzero._compat.distributed import prefixed as prefixed
from graphzero._compat.distributed import reduce_scatter_single as reduce_scatter_single
from graphzero._compat.distributed import timeout_of as timeout_of
from graphzero._compat.inductor import clear_workspaces as clear_workspaces
from graphzero._compat.inductor import end_failed_capture as end_failed_capture
from graphzero._compat.inductor import inductor_compile as inductor_compile
from graphzero._compat.inductor import inductor_folder as inductor_folder
from graphzero._compat.inductor import inductor_lacks as inductor_lacks
from graphzero._compat.interrupts import assigned as assigned
from graphzero._compat.interrupts import contextmanager as contextmanager
from graphzero._compat.interrupts import cpu_by_default as cpu_by_default
from graphzero._compat.interrupts import forget_change as forget_change
from graphzero._compat.interrupts import note_change as note_change
from graphzero._compat.interrupts import undoing as undoing
from graphzero._compat.modes import answers_whether_traced as answers_whether_traced
from graphzero._compat.modes import autograd_under as autograd_under
from graphzero._compat.modes import below_autograd as below_autograd
from graphzero._compat.modes import compiled_functions_inline as compiled_functions_inline
from graphzero._compat.modes import device_asked as device_asked
from graphzero._compat.modes import dynamo_runs as dynamo_runs
from graphzero._compat.modes import flex_attention_check as flex_attention_check
from graphzero._compat.modes import is_compiling as is_compiling
from graphzero._compat.modes import modes_are_on as modes_are_on
from graphzero._compat.modes import no_modes as no_modes
from graphzero._compat.modes import outside_inference_mode as outside_inference_mode
from graphzero._compat.modes import sequence_number as sequence_number
from graphzero._compat.modes import without_modes as without_modes
from graphzero._compat.objects import COUNTS_ATTRIBUTES as COUNTS_ATTRIBUTES
from graphzero._compat.objects import accumulation_hooks as accumulation_hooks
from graphzero._compat.objects import alias as alias
from graphzero._compat.objects import alike as alike
from graphzero._compat.objects import dict_version as dict_version
from graphzero._compat.objects import gradient_hooks as gradient_hooks
from graphzero._compat.objects import has_step_hooks as has_step_hooks
from graphzero._compat.objects import is_dtensor as is_dtensor
from graphzero._compat.objects import is_saved as is_saved
from graphzero._compat.objects import is_torchs_step as is_torchs_step
from graphzero._compat.objects import loads_by_code as loads_by_code
from graphzero._compat.objects import local_of_dtensor as local_of_dtensor
from graphzero._compat.objects import local_tensor as local_tensor
from graphzero._compat.objects import note_step as note_step
from graphzero._compat.objects import redefines_torch as redefines_torch
from graphzero._compat.objects import storage_id as storage_id
from graphzero._compat.objects import take_class as take_class
from graphzero._compat.objects import unhooked_step as unhooked_step
from graphzero._compat.objects import users_class as users_class
from graphzero._compat.objects import with_local as with_local
from graphzero._compat.tracing import ASSERT as ASSERT
from graphzero._compat.tracing import ASSERT_ASYNC as ASSERT_ASYNC
from graphzero._compat.tracing import MODULE_CALL as MODULE_CALL
from graphzero._compat.tracing import add_node as add_node
from graphzero._compat.tracing import annotate as annotate
from graphzero._compat.tracing import arguments as arguments
from graphzero._compat.tracing import checks_given_to as checks_given_to
from graphzero._compat.tracing import compile_guards as compile_guards
from graphzero._compat.tracing import constant_of as constant_of
from graphzero._compat.tracing import foreach_lerp_ as foreach_lerp_
from graphzero._compat.tracing import forget_fakes as forget_fakes
from graphzero._compat.tracing import forget_names as forget_names
from graphzero._compat.tracing import functional_value as functional_value
from graphzero._compat.tracing import functions as functions
from graphzero._compat.tracing import guarded_number as guarded_number
from graphzero._compat.tracing import inferring as inferring
from graphzero._compat.tracing import input_nodes as input_nodes
from graphzero._compat.tracing import is_traced_after as is_traced_after
from graphzero._compat.tracing import keep_constant as keep_constant
from graphzero._compat.tracing import kept_symbolic as kept_symbolic
from graphzero._compat.tracing import last_traced as last_traced
from graphzero._compat.tracing import make_fx as make_fx
from graphzero._compat.tracing import new_symbol as new_symbol
from graphzero._compat.tracing import preserve_node_meta as preserve_node_meta
from graphzero._compat.tracing import properties as properties
from graphzero._compat.tracing import reparametrize as reparametrize
from graphzero._compat.tracing import set_arguments as set_arguments
from graphzero._compat.tracing import shape_env as shape_env
from graphzero._compat.tracing import small_constants as small_constants
from graphzero._compat.tracing import symbol_name as symbol_name
from graphzero._compat.tracing import traced_call as traced_call
from graphzero._compat.tracing import traced_from as traced_from
from graphzero._compat.tracing import unknown as unknown

LazyGraphModule = _lazy_graph_module._LazyGraphModule
StridedShard = placement_types._StridedShard
