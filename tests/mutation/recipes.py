"""Faults of the recipes: of what each rank holds, what it sends, and what a step does with it (sections 3 and 4)."""

from tests.mutation.fault import Fault

COMPRESS = "tests/recipes/test_compress.py"
DILOCO = "tests/recipes/test_diloco.py"
MIMO = "tests/recipes/test_mimo.py"
PPO = "tests/recipes/test_ppo.py"
SENDS_LAST = "contextlib.nullcontext() if batch.last else"
OWN_NORM = (
    "norm: Any = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)\n",
    "norm: Any = nn.utils.get_total_norm(parts := [p.grad.to_local() for p in model.parameters()])\n"
    "        torch._foreach_mul_(parts, min(1.0, args.max_grad_norm / norm.item()))\n"
    "        return norm\n",
)


def of(recipe: str, name: str, old: str, new: str, *tests: str, mark: str = "") -> Fault:
    """A fault of a recipe."""
    return Fault(f"{recipe}: {name}", f"recipes/{recipe}/train.py", old, new, tests, mark)


def equal(layout: str) -> str:
    """The proof that a layout trains as the plain loop does."""
    return f"tests/recipes/test_equivalence.py::test_float64[{layout}]"


FAULTS = (
    of(
        "ddp_resnet",
        "the last micro-batch sends nothing",
        f"with {SENDS_LAST} model.no_sync():",
        "with model.no_sync() if batch.last else contextlib.nullcontext():",
        equal("ddp_resnet-2"),
    ),
    of(
        "ddp_resnet",
        "gradients of the step before stay",
        "    optimizer.zero_grad(set_to_none=True)\n",
        "",
        equal("ddp_resnet-2"),
    ),
    of(
        "ddp_resnet",
        "an evaluation normalises by its own samples",
        "    model.eval()\n",
        "",
        equal("ddp_resnet-2"),
    ),
    of(
        "ddp_resnet",
        "the training continues in eval mode after an evaluation",
        "    model.train()\n",
        "",
        equal("ddp_resnet-2"),
    ),
    of(
        "tensor_gpt",
        "what make_model has put into eval mode is trained after an evaluation",
        "        module.training = False\n",
        "        del module\n",
        "tests/recipes/test_any_size.py::test_no_rank_needs_samples",
    ),
    of(
        "ddp_resnet",
        "without --sync-bn, the running statistics of rank 0 are not sent",
        "model.broadcast_buffers = not args.sync_bn",
        "model.broadcast_buffers = False",
        "tests/recipes/test_strategies.py::test_ranks_follow_rank_0[ddp_resnet]",
    ),
    of(
        "ddp_gpt",
        "the loss is divided by the number of ranks twice",
        "batches.step(), dp_size * finite.loss_scale)",
        "batches.step(), finite.loss_scale)",
        equal("ddp_gpt-2"),
    ),
    of(
        "ddp_gpt",
        "gradients keep the loss scale",
        "    finite.unscale_gradients(sums)\n",
        "",
        "tests/train/test_float16.py::test_like_float32_and_resumes_exactly[ddp_gpt]",
    ),
    of(
        "ddp_gpt",
        "an update is looked at after it was made",
        "    finite.skip_if_not_finite(grad_norm)\n    optimizer.step()\n",
        "    optimizer.step()\n    finite.skip_if_not_finite(grad_norm)\n",
        "tests/faults/test_numbers.py::test_nan[ddp_gpt]",
        mark="faults",
    ),
    of(
        "ddp_gpt",
        "gradients are clipped to twice the norm",
        "nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)",
        "nn.utils.clip_grad_norm_(model.parameters(), 2 * args.max_grad_norm)",
        equal("ddp_gpt-2"),
    ),
    of(
        "dp_resnet",
        "the loss is divided by the samples of a micro-batch",
        "scale / batch.step_samples",
        "scale / len(batch.inputs)",
        equal("dp_resnet-1"),
    ),
    of(
        "dp_resnet",
        "the last micro-batch is left out",
        "    for batch in batches:\n        with contextlib.nullcontext():",
        "    for batch in [*batches][:1]:\n        with contextlib.nullcontext():",
        equal("dp_resnet-1"),
    ),
    of(
        "dp_resnet",
        "two processes train apart",
        "if world.size > 1:",
        "if world.size > 2:",
        "tests/recipes/test_bad_input.py::test_dp_resnet_in_two_processes",
    ),
    of(
        "multinode_resnet",
        "--compress bf16 sends float32",
        'if args.compress == "bf16":',
        'if args.compress == "fp16":',
        f"{COMPRESS}::test_bf16",
    ),
    of(
        "multinode_resnet",
        "PowerSGD begins before the warm-up is over",
        "max(2, args.warmup_steps)",
        "2",
        f"{COMPRESS}::test_powersgd",
    ),
    of(
        "multinode_resnet",
        "every micro-batch sends",
        f"with {SENDS_LAST} model.no_sync():",
        "with contextlib.nullcontext():",
        f"{COMPRESS}::test_sent_once_a_step",
    ),
    of(
        "multinode_resnet",
        "BatchNorm sees the rank's own samples",
        'model = sync_batchnorm.convert(model, mesh.get_group("dp"))',
        "pass",
        equal("multinode_resnet-2"),
    ),
    of(
        "allreduce_resnet",
        "a sum in place of the mean over the ranks",
        "    for gradient in gradients:\n        gradient.div_(model.group.size())\n",
        "",
        equal("allreduce_resnet-2-sync-flat-bucket-mb-0.02"),
    ),
    of(
        "allreduce_resnet",
        "the ring passes on a chunk that is not complete",
        "complete = chunks[(group.rank() - hop + 1) % size]",
        "complete = chunks[(group.rank() - hop) % size]",
        equal("allreduce_resnet-2-sync-ring-bucket-mb-0.02"),
    ),
    of(
        "allreduce_resnet",
        "buckets are sent before their gradients are there",
        "        self._arrived.clear()\n",
        "",
        equal("allreduce_resnet-2-sync-bucket-bucket-mb-0.02"),
    ),
    of(
        "allreduce_resnet",
        "the tree passes on the half that is not complete",
        "halves.append((peer, mine, out))",
        "halves.append((peer, out, mine))",
        equal("allreduce_resnet-2-sync-tree-bucket-mb-0.02"),
    ),
    of(
        "allreduce_resnet",
        "the ranks begin with weights of their own",
        '    broadcast([parameter.detach() for parameter in model.parameters()], mesh.get_group("dp"))\n',
        "",
        "tests/recipes/test_strategies.py::test_ranks_follow_rank_0[allreduce_resnet]",
    ),
    of(
        "allreduce_resnet",
        "each rank is evaluated with its own running statistics",
        """with rank 0's running statistics."""
        '"""\n    sums: metrics.Sums = {}\n    if not args.sync_bn:\n',
        """with rank 0's running statistics."""
        '"""\n    sums: metrics.Sums = {}\n    if args.sync_bn:\n',
        "tests/recipes/test_strategies.py::test_ranks_follow_rank_0[allreduce_resnet]",
    ),
    of(
        "allreduce_resnet",
        "the first micro-batch sends, and not the last",
        "        if self.is_last:\n",
        "        if not self._sent or self.is_last:\n",
        equal("allreduce_resnet-2-sync-bucket-bucket-mb-0.02"),
    ),
    of(
        "fsdp_gpt",
        "the last micro-batch sends nothing",
        "model.set_requires_gradient_sync(batch.last)",
        "model.set_requires_gradient_sync(not batch.last)",
        equal("fsdp_gpt-2-mlp-width-45"),
    ),
    of(
        "fsdp_gpt",
        "all groups of HSDP read the samples of the first",
        "return mesh.get_rank(), mesh.size()",
        'return mesh.get_local_rank("dp_shard"), mesh.size()',
        equal("fsdp_gpt-4-dp-replicate-2-mlp-width-45"),
    ),
    of(
        "fsdp_gpt",
        "each rank clips by the norm of its part",
        OWN_NORM[0],
        OWN_NORM[1],
        equal("fsdp_gpt-2-mlp-width-45"),
    ),
    of(
        "fsdp_gpt",
        "blocks stay gathered after their forward pass",
        "mp_policy=policy, reshard_after_forward=args.reshard_after_forward)",
        "mp_policy=policy, reshard_after_forward=False)",
        "tests/recipes/test_strategies.py::test_parts_are_dropped_after_use[fsdp_gpt]",
    ),
    of(
        "context_gpt",
        "embedding and head stay gathered after an evaluation",
        "    model.reshard()  # without a backward pass, embedding, norm and head would stay gathered\n",
        "",
        "tests/recipes/test_strategies.py::test_parts_are_dropped_after_use[context_gpt]",
    ),
    of(
        "accelerate_gpt",
        "nothing is clipped",
        'args.max_grad_norm or float("inf")',
        'float("inf")',
        equal("accelerate_gpt-2"),
    ),
    of(
        "accelerate_gpt",
        "the last micro-batch sends nothing",
        f"with {SENDS_LAST} model.accelerator.no_sync(model):",
        "with model.accelerator.no_sync(model) if batch.last else contextlib.nullcontext():",
        equal("accelerate_gpt-2"),
    ),
    of(
        "tensor_gpt",
        "ranks that share the matrices read different samples",
        'return mesh.get_local_rank("dp"), mesh["dp"].size()',
        "return mesh.get_rank(), mesh.size()",
        equal("tensor_gpt-2-tp-2"),
    ),
    of(
        "tensor_gpt",
        "the copies of a norm drift apart",
        "    share_norms(model)\n",
        "",
        "tests/recipes/test_strategies.py::test_copies_of_a_norm_stay_one[]",
    ),
    of(
        "tensor_gpt",
        "each rank clips by the norm of its part",
        OWN_NORM[0],
        OWN_NORM[1],
        equal("tensor_gpt-2-tp-2"),
    ),
    of(
        "tensor_gpt",
        "gradients of the step before stay",
        "    optimizer.zero_grad(set_to_none=True)\n",
        "",
        equal("tensor_gpt-2-tp-2"),
    ),
    of(
        "context_gpt",
        "late pieces are in the order of the ranks",
        "pieces[2 * size - 1 - rank]",
        "pieces[size + rank]",
        equal("context_gpt-2-cp-2-cp-kind-ring"),
    ),
    of(
        "context_gpt",
        "the gradient of a block loses what the other ranks have added",
        "return ours + wait() if wait else ours",
        "return ours + 0 * wait() if wait else ours",
        equal("context_gpt-2-cp-2-cp-kind-ring"),
    ),
    of(
        "context_gpt",
        "gathered blocks are taken for those of other ranks",
        "yield from enumerate(blocks.chunk(group.size()))",
        "yield from enumerate(reversed(blocks.chunk(group.size())))",
        equal("context_gpt-2-cp-2-cp-kind-allgather"),
    ),
    of(
        "context_gpt",
        "the ranks that share a sequence read different ones",
        'return mesh.get_local_rank("dp"), mesh["dp"].size()',
        "return mesh.get_rank(), mesh.size()",
        equal("context_gpt-2-cp-2-cp-kind-ulysses"),
    ),
    of(
        "pipeline_gpt",
        "each stage clips by its own norm",
        "    dist.all_reduce(square)\n",
        "",
        equal("pipeline_gpt-2-pp-2-schedule-1F1B-num-layers-5"),
    ),
    of(
        "pipeline_gpt",
        "the norm counts each pipeline",
        'square = norm.square() / model.mesh["dp"].size()',
        "square = norm.square()",
        equal("pipeline_gpt-2-pp-1-schedule-1F1B-num-layers-3"),
    ),
    of(
        "pipeline_gpt",
        "the gradient is divided by the micro-batches again",
        "scale_grads=False,",
        "scale_grads=True,",
        equal("pipeline_gpt-2-pp-2-schedule-1F1B-num-layers-5"),
    ),
    of(
        "pipeline_gpt",
        "gradients are added up over the stages in place of the pipelines",
        'dist.all_reduce(total, group=model.mesh.get_group("dp"))',
        'dist.all_reduce(total[:8], group=model.mesh.get_group("pp"))',
        equal("pipeline_gpt-2-pp-2-schedule-1F1B-num-layers-5"),
    ),
    of(
        "pipeline_gpt",
        "a tied embedding counts twice in the norm",
        "[p.grad for p in trained(model) if p is not copied]",
        "[p.grad for p in trained(model)]",
        equal("pipeline_gpt-4-pp-2-schedule-1F1B-num-layers-5-tied"),
    ),
    of(
        "diloco_gpt",
        "the outer step is one step late",
        "since = (self.steps - turn) % self.args.inner_steps",
        "since = (self.steps - turn - 1) % self.args.inner_steps",
        f"{DILOCO}::test_plain_loop[local SGD]",
    ),
    of(
        "diloco_gpt",
        "the outer momentum forgets the rounds before",
        "self.momentum[name].mul_(self.args.outer_momentum).add_(mean)",
        "self.momentum[name].zero_().add_(mean)",
        f"{DILOCO}::test_plain_loop[outer momentum after each step]",
    ),
    of(
        "diloco_gpt",
        "a checkpoint forgets the weights of the last outer step",
        '        more |= {f"before.{name}": one for name, one in self.before.items()}\n',
        "",
        f"{DILOCO}::test_resume_in_mid_round_bitwise[2-2]",
    ),
    of(
        "diloco_gpt",
        "a checkpoint has the weights of the first replica",
        "if name not in own} | self.mean_weights()",
        "if name not in own} | self.weights",
        f"{DILOCO}::test_any_recipe_gets_the_mean_and_the_first_optimizer",
    ),
    of(
        "diloco_gpt",
        "the weights of an evaluation stay",
        "        self.fill(own)\n",
        "",
        f"{DILOCO}::test_plain_loop[local SGD]",
    ),
    of(
        "syncbn_ppo",
        "advantages are normalised on each rank",
        "    dist.all_reduce(squares := centred.square().sum())\n",
        "    squares = centred.square().sum() * dist.get_world_size()\n",
        f"{PPO}::test_float64[2]",
    ),
    of(
        "syncbn_ppo",
        "each rank acts by the same noise",
        "seed.ACTION, times[:, None, None], envs.index[:, None],",
        "seed.ACTION, times[:, None, None], np.arange(len(envs.index))[:, None],",
        f"{PPO}::test_float64[2]",
    ),
    of(
        "syncbn_ppo",
        "each update acts by the same noise",
        "np.arange(args.rollout_steps) + (step - 1) * args.rollout_steps",
        "np.arange(args.rollout_steps)",
        f"{PPO}::test_each_update_and_epoch_has_its_own_draws",
    ),
    of(
        "syncbn_ppo",
        "the order of the minibatches is that of the first epoch",
        "seed.ORDER, epoch, index,",
        "seed.ORDER, 0, index,",
        f"{PPO}::test_each_update_and_epoch_has_its_own_draws",
    ),
    of(
        "syncbn_ppo",
        "running statistics do not move",
        "        model.train().module(rollout.observations.flatten(0, 1))\n",
        "",
        f"{PPO}::test_running_statistics_are_those_of_the_rollouts",
    ),
    of(
        "cellfree_mimo",
        "a user's own channel counts twice in what is sent",
        "lower + lower.tril(-1).mT",
        "lower + lower.mT",
        f"{MIMO}::test_packed_matrices_come_back",
    ),
    of(
        "cellfree_mimo",
        "the rates of the best access points are added up over the ranks",
        "dist.ReduceOp.MAX, group=mesh.get_group",
        "dist.ReduceOp.SUM, group=mesh.get_group",
        f"{MIMO}::test_equal_to_the_formulas[2-antennas-2]",
    ),
    of(
        "cellfree_mimo",
        "the time for pilots is not taken off",
        "return (1 - args.pilots / BLOCK) * rates",
        "return rates",
        f"{MIMO}::test_equal_to_the_formulas[1-users-2]",
    ),
    of(
        "cellfree_mimo",
        "the last drop of a checkpoint is forgotten",
        'done = min(found.progress["step"], len(parameter))',
        'done = min(found.progress["step"] - 1, len(parameter))',
        f"{MIMO}::test_resume_is_exact",
    ),
)
