"""The only place that touches a private name of torch or lightning, so that an upgrade breaks one file.

Each is checked before it is set, or read with a default: see :mod:`lightning_pipesync.core.private_names`.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node
from torch.optim import Optimizer
from torch.utils import _pytree
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.data import DataLoader

from lightning_pipesync.core.private_names import missing, require

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torchmetrics import Metric

#: Packages of Lightning's distributions.
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


class Probe(torch.optim.SGD):
    """Tried in the place of SGD: if one is made, torch wraps SGD's ``step``, and subclasses' hooks are called twice."""


require(torch, "_foreach_copy_", "_foreach_mul_", "_foreach_zero_", "_foreach_norm")
require(torch.autograd, "_unsafe_preserve_version_counter")
require(torch.ops.aten.add_.Tensor, "_schema")  # without it, written_by() would find that nothing is written
require(nn.Module(), "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
require(Tensor, "_version")
require(torch.UntypedStorage, "_cdata")
require(Probe([torch.zeros(1)]), "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into its target, in one call."""
    if targets:
        torch._foreach_copy_(targets, sources)


def foreach_zero_(tensors: list[Tensor]) -> None:
    """Has all values of all tensors be zero, in one call."""
    if tensors:
        torch._foreach_zero_(tensors)


def foreach_mul_(tensors: list[Tensor], factor: float) -> None:
    """Multiplies all values of all tensors, in one call."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the L2 norm of each tensor as a 0-dim tensor: fp32, or fp64 if one of them is."""
    if not tensors:
        return []
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes <= {torch.float32} or dtypes <= {torch.float64}:
        return list(torch._foreach_norm(tensors, 2))  # half again as fast as with a dtype
    return list(torch._foreach_norm(tensors, 2, functools.reduce(torch.promote_types, dtypes, torch.float32)))


def version(tensor: Tensor) -> int:
    """Returns a number that grows whenever autograd sees ``tensor`` written in place."""
    return tensor._version


def mark_overflow(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Has ``scaler``, which has unscaled the gradients of ``optimizer``, skip the update and reduce its scale."""
    for found_inf in _found_inf(scaler, optimizer):
        found_inf.fill_(1.0)


def is_unscaled(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Returns whether ``scaler`` has unscaled the gradients of ``optimizer`` since its last update."""
    require(scaler, "_per_optimizer_states")
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED


def control_backward_sync(strategy: Any, control: Any) -> None:
    """Has ``fabric.no_backward_sync`` ask ``control``, in place of that which a strategy of Fabric has itself."""
    require(strategy, "_backward_sync_control")
    strategy._backward_sync_control = control


def run_hooks_before_step(precision: Any, module: Any, optimizer: Optimizer) -> None:
    """Does what a Trainer's precision plugin does between the backward pass and the update: hooks and clipping."""
    precision._after_closure(module, optimizer)


def handles_unscaling(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer`` unscales gradients within its step, as fused ones do."""
    _check_fused()
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@functools.cache
def _check_fused() -> None:
    require(Probe([torch.zeros(1)], fused=True), "_step_supports_amp_scaling")


def mark_stepped(optimizer: Optimizer) -> None:
    """Tells learning rate schedulers, which warn otherwise, that ``optimizer`` has taken a step."""
    _check_scheduled()
    optimizer._opt_called = True  # type: ignore[attr-defined]


@functools.cache
def _check_scheduled() -> None:
    optimizer = Probe([torch.zeros(1)])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    optimizer.step()
    require(optimizer, "_opt_called")


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that Lightning has wrapped, or the one given."""
    if not any(cls.__module__.partition(".")[0] in LIGHTNING for cls in type(optimizer).__mro__):
        return optimizer
    require(optimizer, "_optimizer")
    wrapped: Optimizer = optimizer._optimizer  # type: ignore[attr-defined]
    return wrapped


def twin_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> Optimizer:
    """Returns an optimizer of the same class and attributes with parameter groups and state of its own.

    The user's hooks on ``optimizer`` and what a scheduler has put around its ``step`` stay with the original.
    """
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.param_groups = groups
    twin.state = defaultdict(dict, state)
    return twin


def copy_loader(loader: DataLoader, sampler: Any, batch_sampler: Any) -> DataLoader:
    """Returns a shallow copy of ``loader`` with other samplers, which a DataLoader refuses to set after ``__init__``.

    Worker processes that persist stay with the original.
    """
    require(loader, "_iterator")
    loader = copy(loader)
    vars(loader).update(sampler=sampler, batch_sampler=batch_sampler, _iterator=None)
    return loader


def check_trainer(trainer: Trainer, precision: Any) -> None:
    """Checks, before a training, that a Trainer and its precision plugin have what is read and set later.

    Raises:
        RuntimeError: they lack something.
    """
    require(trainer, "_logger_connector")
    require(trainer._logger_connector, "should_update_logs")
    require(trainer._logger_connector, "_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
    require(trainer.fit_loop, "_combined_loader", "_data_fetcher", "_should_accumulate")
    require(trainer.lightning_module, "_trainer")
    require(precision, "_after_closure", "clip_grad_by_norm", "clip_grad_by_value")


def change_train_loaders(trainer: Trainer, change: Callable[[DataLoader], DataLoader]) -> None:
    """Changes the training loaders, if they are set up already, and begins to iterate over them anew."""
    loaders, fetcher = trainer.fit_loop._combined_loader, trainer.fit_loop._data_fetcher
    if loaders is not None and fetcher is not None:
        loaders.flattened = [change(one) if isinstance(one, DataLoader) else one for one in loaders.flattened]
        iter(fetcher)


def logs_this_batch(trainer: Trainer) -> bool:
    """Returns, within ``on_train_batch_end``, whether the Trainer is about to hand this batch's metrics to loggers."""
    accumulates = trainer.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate()
    return not accumulates and trainer._logger_connector.should_update_logs


def import_twin(name: str) -> ModuleType:
    """Imports a module of the distribution ``pytorch_lightning``, and leaves the messages of ``lightning`` alone.

    Both set the log and the category of the functions that they share, and the last one to be imported has its way.
    """
    from lightning_utilities.core import rank_zero

    log, category = rank_zero.log, rank_zero.rank_zero_deprecation_category
    try:
        return import_module(name)
    finally:
        rank_zero.log, rank_zero.rank_zero_deprecation_category = log, category


def register_strategy(registry: Any, name: str, strategy: Callable[..., Any]) -> None:
    """Has a registry of Lightning's know a strategy, described by the first line of its docstring."""
    registry.register(name, strategy, (strategy.__doc__ or "").partition("\n")[0], override=True)


def is_dtensor(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` is a ``DTensor``."""
    return isinstance(tensor, DTensor)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Splits nested containers into their leaves and what rebuilds them."""
    return _pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """Rebuilds nested containers from their leaves."""
    return _pytree.tree_unflatten(leaves, spec)


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors in nested containers, in order."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def paths_in(tree: Any) -> list[str]:
    """Returns where in nested containers each leaf is, as one would index it."""
    return [_pytree.keystr(path) for path, _ in _pytree.tree_flatten_with_path(tree)[0]]


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Returns nested containers with what ``function`` makes of each tensor in them, in order, in its place."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def stepping_unseen(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Within it autograd does not see that ``tensors`` are written in place."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def shown_metrics(trainer: Trainer) -> list[dict[str, Any]]:
    """Returns what was logged, by name: for callbacks, for loggers, for the progress bar."""
    return [dict(trainer.callback_metrics), dict(trainer.logged_metrics), dict(trainer.progress_bar_metrics)]


def show_metrics(trainer: Trainer, metrics: list[dict[str, Any]]) -> None:
    """Makes what :func:`shown_metrics` has returned on another rank the metrics of this one."""
    connector = trainer._logger_connector
    own: list[dict[str, Any]] = [
        connector._callback_metrics,
        connector._logged_metrics,
        connector._progress_bar_metrics,
    ]
    for mine, others in zip(own, metrics, strict=True):
        mine.update(others)


def accumulated(metric: Metric) -> tuple[dict[str, Any], int]:
    """Returns what a metric has accumulated, and from how many updates."""
    require(metric, "_update_count")
    return metric.metric_state, metric._update_count


def accumulate(metric: Metric, state: dict[str, Any], updates: int) -> None:
    """Has a metric be where another one was that :func:`accumulated` describes."""
    for name, value in state.items():
        setattr(metric, name, value)
    require(metric, "_update_count", "_computed")
    metric._update_count, metric._computed = updates, None


def keep_local(metric: Metric) -> None:
    """Has a metric never gather what other ranks have accumulated."""
    require(metric, "sync_on_compute", "_to_sync")
    metric.sync_on_compute = metric._to_sync = False


def is_pipe_split(node: Node) -> bool:
    """Returns whether ``node`` is where :func:`torch.distributed.pipelining.pipe_split` was called in a trace."""
    return node.target is torch.ops.pippy._pipe_split.default


def written_by(node: Node) -> list[Node]:
    """Returns the values that an operation in a graph writes to in place, or that those in a region of it do."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # a region without gradients or under autocast is a graph among the arguments
        nodes = [argument for argument in node.args if isinstance(argument, Node) and argument.op == "get_attr"]
        found = [attrgetter(str(one.target))(node.graph.owning_module) for one in nodes]
        regions = [one.graph for one in found if isinstance(one, GraphModule)]
        return [written for region in regions for inner in region.nodes for written in written_by(inner)]
    pairs = zip(schema.arguments, node.args, strict=False)  # what is left out has its default, and is not written to
    named = [(argument, node.kwargs[argument.name]) for argument in schema.arguments if argument.name in node.kwargs]
    written = [value for argument, value in [*pairs, *named] if argument.alias_info and argument.alias_info.is_write]
    return [value for value in tree_flatten(written)[0] if isinstance(value, Node)]


@contextmanager
def telling_own_gradients(tell: Callable[[str], object]) -> Iterator[None]:
    """Within it ``tell`` is called with what replaces or changes gradients by Python code, which no graph has."""
    if "apply" not in vars(torch.autograd.Function):
        raise missing(torch.autograd.Function, "apply")
    function, apply, register_hook = (
        torch.autograd.Function,
        vars(torch.autograd.Function)["apply"],
        Tensor.register_hook,
    )

    def told_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            tell("checkpoint(use_reentrant=True): set use_reentrant=False")
        elif not cls.__module__.startswith(
            ("torch._library", "torch._higher_order_ops")
        ):  # operators, which graphs have
            tell(f"the backward of the autograd.Function {cls.__qualname__}")
        return apply.__func__(cls, *args, **kwargs)

    def told_register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        tell("a hook that Tensor.register_hook has set in the forward pass")
        return register_hook(tensor, hook)

    function.apply, Tensor.register_hook = classmethod(told_apply), told_register_hook  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        function.apply, Tensor.register_hook = apply, register_hook  # type: ignore[method-assign]


def has_hooks(module: nn.Module) -> bool:
    """Returns whether ``module`` itself, not its submodules, has hooks that are called with it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Returns whether ``module`` itself, not its submodules, has hooks for the backward pass."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def memory_of(tensor: Tensor) -> int:
    """Returns a number that tells the memory of a tensor, which may be fake, from that of others."""
    return tensor.untyped_storage()._cdata


def saves_now(trainer: Trainer) -> bool:
    """Returns, within ``on_train_batch_end``, whether a ModelCheckpoint is about to save."""
    for callback in trainer.checkpoint_callbacks:
        of_lightning = (cls for cls in type(callback).__mro__ if cls.__module__.partition(".")[0] in LIGHTNING)
        if any(cls.__name__ == "ModelCheckpoint" for cls in of_lightning):
            require(callback, "_every_n_train_steps")
            period = callback._every_n_train_steps  # type: ignore[attr-defined]
            if period and trainer.global_step % period == 0:
                return True
    return False


def without_rank(loader: DataLoader) -> None:
    """Has the workers of ``loader`` draw the same random numbers on all ranks, if Lightning has seeded them."""
    from lightning.fabric.utilities.seed import pl_worker_init_function

    seeding = loader.worker_init_fn
    if isinstance(seeding, functools.partial) and seeding.func is pl_worker_init_function:
        loader.worker_init_fn = functools.partial(seeding.func, rank=0)


def found_overflow(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Returns, before ``scaler`` is updated, whether it skips the step of ``optimizer``."""
    return any(bool(found_inf.item()) for found_inf in _found_inf(scaler, optimizer))


def _found_inf(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> list[Tensor]:
    require(scaler, "_per_optimizer_states")
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def scaler_of(precision: Any) -> torch.amp.GradScaler | None:
    """Returns the loss scaler of a precision plugin of Lightning's; None if the precision needs none."""
    if precision.precision == "16-mixed":
        require(precision, "scaler")
    return getattr(precision, "scaler", None)


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Returns the store over which ``group`` was formed, whose keys are the group's own.

    It shares its connection with the process. A ``clone()`` would not, but while it connects, a connection of Gloo's in
    the same process may go silent.
    """
    return distributed_c10d._world.pg_map[group][1]


def address_of(store: dist.Store) -> str | None:
    """Returns ``host:port`` of the process that keeps what is in ``store``; None if that is no process."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else None
