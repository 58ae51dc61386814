"""In which order files of tests begin."""

# Files that take longest in both stages, the longest first: two processes that take whole files then end together.
LONGEST = (
    "test_docs.py", "test_stage_processes.py", "test_ops.py", "test_nd_processes.py", "test_resume.py",
    "test_layouts.py", "test_random_layouts.py", "test_user_code.py", "test_parallelized_modules.py", "test_search.py",
    "test_inductor.py", "test_exchanged_experts.py", "test_peers.py", "test_files_processes.py",
    "test_state_processes.py", "test_split_sequences.py", "test_compiled_code.py", "test_too_large.py",
    "test_micro_batches.py", "test_stage_failures.py", "test_staged_parity.py", "test_masked_sequences.py",
    "test_offload_activations.py", "test_auto_stages.py", "test_pipeline_budget.py", "test_examples.py",
    "test_planned_splits.py", "test_tune_and_plan.py", "test_failures.py", "test_trainer.py", "test_one_sided.py",
    "test_test_runs.py", "test_ragged_processes.py", "test_pipeline_plan.py",
    "test_big_processes.py", "test_site.py", "test_parity.py", "test_recomputed_steps.py", "test_recompute_choice.py",
    "test_interrupts.py", "test_proposals.py", "test_evaluation_processes.py", "test_micro_processes.py",
    "test_hash_seeds.py", "test_cut_network.py", "test_programs.py", "test_costs.py", "test_placing.py",
    "test_tensor_parallel.py", "test_user_models.py", "test_opt.py", "test_memory_budget.py", "test_check.py",
    "test_in_place.py", "test_graph_nd.py", "test_region.py", "test_devices.py", "test_bad_sbp.py", "test_kin.py",
    "test_set_shapes.py", "test_state_dict_fuzz.py", "test_optimizer_in_backward.py", "test_bfloat16_masters.py",
    "test_first_step.py", "test_arena.py", "test_inplace_to_pure.py", "test_micro_plan.py", "test_exact.py",
    "test_vocabulary.py", "test_regions.py", "test_plan.py", "test_replay.py", "test_checks.py", "test_tile_rows.py",
    "test_torch_optimizers.py", "test_faults.py", "test_experts.py",
)  # fmt: skip
