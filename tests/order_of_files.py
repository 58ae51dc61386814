"""In which order files of tests begin."""

# Files that take longest, the longest first: two processes that take whole files then end together.
LONGEST = (
    "test_ops.py", "test_random_layouts.py", "test_parallelized_modules.py", "test_nd_processes.py",
    "test_one_sided.py", "test_out_forms.py", "test_compiled_code.py", "test_parity.py", "test_placing.py",
    "test_state_processes.py", "test_examples.py", "test_docs.py", "test_tensor_parallel.py", "test_programs.py",
    "test_graph_nd.py", "test_user_models.py", "test_opt.py", "test_check.py", "test_first_step.py",
    "test_bad_sbp.py", "test_memory_budget.py", "test_reuse.py", "test_regions.py", "test_devices.py",
    "test_costs.py", "test_arena.py", "test_region.py", "test_checks.py", "test_replay.py",
    "test_torch_optimizers.py", "test_faults.py", "test_peers.py",
)  # fmt: skip
