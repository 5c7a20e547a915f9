"""PRIVATE_NAMES: each private name of torch and TorchRec that this package uses, with the reason.

A release may drop such a name without notice: :func:`missing` looks for all of them in the source of the installed
packages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class PrivateNames(NamedTuple):
    """Private names that one file of another package defines.

    Args:
        file: path below the folder of installed packages.
        names: the names.
        reason: what they are used for, and why no public name serves.
        upstream: issue or pull request about it; empty where none is known.
    """

    file: str
    names: tuple[str, ...]
    reason: str
    upstream: str = ""


PRIVATE_NAMES = (
    PrivateNames(
        "torch/nn/parallel/distributed.py",
        ("_module_parameters",),
        "parallel.settle_buckets: the parameters in DDP's order, by which it fills its buckets",
    ),
    PrivateNames(
        "torch/_C/_distributed_c10d.pyi",
        ("_push_all_rebuilt_params", "_DEFAULT_FIRST_BUCKET_BYTES"),
        "parallel.settle_buckets: a bucket that is laid out anew after the first step adds in another order, so that a "
        "resumed run differs in the last bit",
        "https://github.com/pytorch/pytorch/issues/62790",
    ),
    PrivateNames(
        "torch/_C/__init__.pyi",
        ("_cuda_clearCublasWorkspaces",),
        "capture: a CUDA graph must not read a workspace of cuBLAS that others free",
        "https://github.com/pytorch/pytorch/issues/193402",
    ),
    PrivateNames(
        "torch/utils/_pytree.py",
        ("tree_flatten", "tree_unflatten", "tree_leaves", "tree_map_only"),
        "adopt, capture, diagnose: a user's batch and outputs are any tree of tensors; Dynamo follows this one alone",
        "https://github.com/pytorch/pytorch/issues/65761",
    ),
    PrivateNames(
        "torch/utils/_python_dispatch.py",
        ("TorchDispatchMode",),
        "diagnose counts the ops of a step",
    ),
    PrivateNames(
        "torch/_decomp/decompositions.py",
        ("_to_copy", "_unsafe_view"),
        "an export follows the ops of a traced forward, of which these two have no public name",
    ),
    PrivateNames(
        "torch/_C/_VariableFunctions.pyi",
        (
            "_foreach_copy_",
            "_foreach_add_",
            "_foreach_norm",
            "_fused_adam_",
            "_assert_async",
            "_embedding_bag",
        ),
        "one kernel for many small tensors, and a check on a GPU without a sync",
        "https://github.com/pytorch/pytorch/pull/193607",
    ),
    PrivateNames(
        "torch/distributed/checkpoint/_fsspec_filesystem.py",
        ("FsspecReader", "FsspecWriter", "FileSystem"),
        "checkpoints in object stores",
        "https://github.com/pytorch/pytorch/issues/188772",
    ),
    PrivateNames(
        "torch/distributed/_shard/sharded_tensor/api.py",
        (
            "ShardedTensor",
            "_process_group",
        ),
        "TorchRec gives its tables and their optimizer state in this form",
    ),
    PrivateNames(
        "torch/distributed/_shard/sharding_spec/api.py",
        ("EnumerableShardingSpec",),
        "TorchRec's plans",
    ),
    PrivateNames(
        "torch/distributed/remote_device.py",
        ("_remote_device",),
        "a shard's place in TorchRec's plans",
    ),
    PrivateNames(
        "torch/distributed/distributed_c10d.py",
        ("_world",),
        "shared_memory: the groups that TorchRec makes for a step",
    ),
    PrivateNames(
        "torch/_C/_distributed_c10d.pyi",
        ("_device_types", "_get_backend", "_register_backend", "_timeout"),
        "shared_memory: another backend takes the place of a group's gloo; torch has no shared memory of its own",
        "https://github.com/pytorch/gloo/pull/490",
    ),
    PrivateNames(
        "torch/nn/modules/batchnorm.py",
        ("_BatchNorm",),
        "the class of all layers that keep statistics of batches",
    ),
    PrivateNames(
        "torch/nn/modules/module.py",
        (
            "_parameters",
            "_buffers",
            "_modules",
            "_forward_hooks",
            "_forward_pre_hooks",
            "_backward_pre_hooks",
        ),
        "state that is copied and put back must stay the same objects; hooks have no public list",
    ),
    PrivateNames(
        "torch/_C/__init__.pyi",
        ("_version", "_backward_hooks", "_get_mkldnn_enabled", "_set_mkldnn_enabled"),
        "whether somebody has written to a tensor or hooked its gradient; a trace through mkldnn's LSTM does not run",
    ),
    PrivateNames(
        "torch/_C/__init__.pyi",
        ("DisableTorchFunctionSubclass", "_storage_Use_Count"),
        "adopt looks at a lagging table without updating it",
    ),
    PrivateNames(
        "torch/_tensor.py",
        ("_post_accumulate_grad_hooks",),
        "adopt: a hook on a gradient would not run in a captured step, and has no public list",
    ),
    PrivateNames(
        "torch/storage.py",
        ("_cdata",),
        "which tensors share memory, also those that a user keeps behind a parameter",
    ),
    PrivateNames(
        "torch/optim/optimizer.py",
        (
            "_optimizer_step_pre_hooks",
            "_optimizer_step_post_hooks",
            "_global_optimizer_pre_hooks",
            "_global_optimizer_post_hooks",
        ),
        "adopt: hooks of one optimizer or of all would not run in a captured step, and have no public list",
    ),
    PrivateNames(
        "torch/optim/lr_scheduler.py",
        ("_wrapped_by_lr_sched",),
        "adopt: a scheduler replaces optimizer.step by a function that counts, which is no change of the user's",
    ),
    PrivateNames(
        "torch/distributed/optim/apply_optimizer_in_backward.py",
        ("_apply_optimizer_in_backward", "_optimizer_classes", "_optimizer_kwargs"),
        "optimizers that a caller has declared for a table, TorchRec's own way; it exports the function, and no reader",
    ),
    PrivateNames(
        "torch/_dynamo/eval_frame.py",
        ("_debug_get_cache_entry_list",),
        "adopt says which guard has failed",
        "https://github.com/pytorch/pytorch/issues/114082",
    ),
    PrivateNames(
        "torch/_ops.py",
        ("_overloadpacket", "_schema"),
        "which op ran, and which of its arguments it writes",
    ),
    PrivateNames(
        "torch/_dynamo/config.py",
        ("skip_nnmodule_hook_guards", "allow_rnn"),
        "adopt guards hooks, too",
    ),
    PrivateNames(
        "torch/_guards.py", ("tracing",), "adopt looks at a graph while Dynamo traces"
    ),
    PrivateNames(
        "torch/_subclasses/fake_tensor.py",
        (
            "DataDependentOutputException",
            "DynamicOutputShapeException",
        ),
        "capture: which ops depend on values, found without values",
    ),
    PrivateNames(
        "torch/_inductor/__init__.py",
        ("standalone_compile",),
        "capture compiles a traced graph",
    ),
    PrivateNames(
        "torch/_inductor/cpp_builder.py",
        ("get_cpp_compiler",),
        "whether a compiler is there, before a wait",
    ),
    PrivateNames(
        "torch/_inductor/runtime/cache_dir_utils.py",
        ("cache_dir",),
        "where compiled steps are kept",
    ),
    PrivateNames(
        "torch/_C/__init__.pyi",
        ("_current_graph_task_id",),
        "optim.OneBackward: whether two hooks run in one backward",
    ),
    PrivateNames(
        "torch/autograd/__init__.py",
        ("_profiler_enabled",),
        "diagnose: a profiler that was left on",
    ),
    PrivateNames(
        "torchrec/distributed/embeddingbag.py",
        (
            "_embedding_bag_configs",
            "_embedding_names",
            "_embedding_dims",
            "_dim_per_key",
            "_output_dists",
            "_lookups",
            "_env",
            "_apply_mean_pooling",
            "_has_mean_pooling_callback",
        ),
        "sharders.ShardedBags: means of row-wise tables, which TorchRec divides wrongly by; configs have no public way",
        "https://github.com/meta-pytorch/torchrec/issues/2362",
    ),
    PrivateNames(
        "torchrec/distributed/embedding.py",
        ("_embedding_configs", "_lookups", "_use_index_dedup"),
        "the configs of a sharded collection have no public way",
    ),
    PrivateNames(
        "torchrec/distributed/model_parallel.py",
        ("_dmp_wrapped_module",),
        "sync reaches DDP",
    ),
    PrivateNames(
        "torchrec/distributed/embedding_types.py",
        ("_sharded_module_order_overwrite",),
        "sharders: an argument of TorchRec's own sharder that ours passes on",
    ),
    PrivateNames(
        "torchrec/modules/embedding_modules.py",
        ("_is_weighted",),
        "no public name in a sharded collection",
    ),
    PrivateNames(
        "torchrec/optim/keyed.py",
        ("_optims", "_optimizer"),
        "a checkpoint takes each optimizer by itself",
    ),
)


def missing() -> Iterator[tuple[str, str]]:
    """Yields the private names that the installed packages lack, each with its file."""
    for private in PRIVATE_NAMES:
        spec = find_spec(private.file.split("/")[0])
        if spec is None or not spec.submodule_search_locations:
            continue
        path = Path(spec.submodule_search_locations[0]).parent / private.file
        text = path.read_text() if path.exists() else ""
        for name in private.names:
            if not re.search(rf"\b{re.escape(name)}\b", text):
                yield private.file, name
