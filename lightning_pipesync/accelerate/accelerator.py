"""Accelerate's Accelerator with a method in place of ``DistributedDataParallel``."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_pipesync.accelerate import loaders
from lightning_pipesync.accelerate.elastic import ElasticLoader, divided_anew
from lightning_pipesync.accelerate.launched import (
    check_method,
    check_num_processes,
    check_support,
    ranks_of_host,
)
from lightning_pipesync.accelerate.optimizer import SynchronizedOptimizer, synchronized_optimizers
from lightning_pipesync.accelerate.plugin import PipeSyncPlugin
from lightning_pipesync.accelerate.private import (
    check_accelerator,
    check_marked,
    is_prepared,
    mark_prepared,
    prepared_loaders,
    prepared_optimizers,
)
from lightning_pipesync.accelerate.saving import SavingAccelerator
from lightning_pipesync.accelerate.sharding import (
    prepare_beside_sharded,
    replicas_of,
    shards_by_fsdp2,
    warn_of_one_replica,
    with_replicas,
)
from lightning_pipesync.core.dtensors import is_sharded, local_of
from lightning_pipesync.core.parameters import check_optimizer
from lightning_pipesync.core.private_names import with_attributes
from lightning_pipesync.data.loaders import num_batches
from lightning_pipesync.methods.ea_pipe import EAPipe, EAPipeConfig
from lightning_pipesync.methods.ea_pipe.stage import OptimizerFactory
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.settings import warn_of_one_rank
from lightning_pipesync.methods.step import check_unscaling
from lightning_pipesync.training import clipping
from lightning_pipesync.training.module import SyncedModule
from lightning_pipesync.training.registry import METHODS
from lightning_pipesync.training.session import MethodPlan, Sessions


class PipeSyncAccelerator(SavingAccelerator):
    """``accelerate.Accelerator`` whose ``prepare`` attaches a method of this package to models and optimizers.

    The training loop does not change::

        accelerator = PipeSyncAccelerator(pipesync=PipeSyncPlugin("selsync", delta=0.3))
        model, optimizer, test_loader = accelerator.prepare(model, optimizer, test_loader)
        train_loader = accelerator.prepare_train_loader(train_loader)
        for x, y in train_loader:
            optimizer.zero_grad()
            accelerator.backward(loss_function(model(x), y))
            optimizer.step()

    With one process, or without a plugin, it is a plain Accelerator. With ``lighthouse`` each job is a replica, and
    they come and go; see docs/replicas.md.

    Args:
        pipesync: the method and its settings; None: those in the environment, see PipeSyncPlugin.from_environment.
        accelerator_kwargs: as in Accelerator.

    Attributes:
        pipesync: the method and its settings; None: a plain Accelerator.

    Raises:
        ValueError: a setting in the environment is wrong, the launcher started another number of processes than was
            configured, or models would be sharded in a way that leaves no replicas to the method.
    """

    #: What a training loader that is divided among jobs becomes.
    elastic_loader_type: ClassVar[type[ElasticLoader]] = ElasticLoader

    _loader_checked = _loader_is_for_training = _preparing = False

    def __init__(self, pipesync: PipeSyncPlugin | None = None, **accelerator_kwargs: Any) -> None:
        self.pipesync = PipeSyncPlugin.from_environment() if pipesync is None else pipesync
        if not torch.accelerator.is_available():
            accelerator_kwargs.setdefault("cpu", True)  # otherwise Accelerate looks for a GPU in every launched process
        if self.pipesync is not None:
            is_job = self.pipesync.config.num_jobs is not None
            accelerator_kwargs = with_replicas(accelerator_kwargs, self.pipesync.method, is_job)
        super().__init__(**accelerator_kwargs)
        check_accelerator(self)
        check_num_processes(self.num_processes)
        check_method(self.pipesync)
        if self.pipesync is not None:
            check_support(self)
            method = self.pipesync.method_type
            if not self.is_job:
                if not method.makes_passes:  # a pipeline tells so by itself
                    warn_of_one_rank(method.__name__, self.num_processes)
                warn_of_one_replica(self, method.__name__)
            self._watch_job(self.pipesync.config.timeout_s)
        self._sessions = Sessions()
        self._sessions.end_at_shutdown()  # a script need not call end_training()

    # --- set-up and end ---------------------------------------------------------------------------------------------

    @override
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares models, optimizers, loaders and schedulers, as Accelerate does; a collective call.

        Raises:
            ValueError: the ranks differ in settings or model, or the method does not support a model or optimizer.
        """
        self._preparing = True
        try:
            result = self._prepared(args, device_placement)
        finally:
            self._preparing = False
        check_marked(result)
        self._attach()
        return result

    def _prepared(self, args: tuple[Any, ...], device_placement: list[bool] | None) -> Any:
        """Prepares as Accelerate does; wraps models that it shards, if there is an ``fsdp_plugin``."""
        if not self._synchronizes or not shards_by_fsdp2(self):
            return super().prepare(*args, device_placement=device_placement)
        given = [one.module if isinstance(one, SyncedModule) else one for one in args]
        if any(isinstance(one, nn.Module) and is_sharded(one) for one in given):
            prepared = prepare_beside_sharded(self, given)
        else:
            result = super().prepare(*given, device_placement=device_placement)
            prepared = list(result) if len(given) > 1 else [result]
        wrapped = tuple(self._wrapped(one) if isinstance(one, nn.Module) else one for one in prepared)
        return wrapped if len(wrapped) > 1 else wrapped[0]

    def _wrapped(self, model: nn.Module) -> nn.Module:
        """Returns a model as :meth:`prepare` returns it."""
        wrapper = self._sessions.wrapper_of(model) or self._sessions.wrap(model, automatic=True)
        mark_prepared(wrapper)
        return wrapper

    @override
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares a model; its optimizer must be prepared as well before it is trained."""
        trained = not evaluation_mode and any(parameter.requires_grad for parameter in model.parameters())
        if not self._synchronizes or not trained:
            # On the CPU, Accelerate would wrap it in DistributedDataParallel, which refuses models without gradients.
            return super().prepare_model(model, device_placement, evaluation_mode or self._synchronizes)
        self._refuse_pipeline()
        known = self._sessions.wrapper_of(model)
        # evaluation_mode=True: everything but the wrapper DistributedDataParallel.
        prepared = super().prepare_model(known.module if known else model, device_placement, evaluation_mode=True)
        wrapper = self._wrapped(known or prepared)
        self._attach()
        return wrapper

    @override
    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Prepares an optimizer; the model that it trains must be prepared as well before a step."""
        if self._synchronizes:
            check_optimizer(optimizer)  # Accelerate asks for its state, which not every optimizer gives
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if not self._synchronizes:
            return prepared
        self._refuse_pipeline()
        if prepared.scaler is not None:
            check_unscaling(prepared.optimizer, "mixed_precision='fp16'", "a method")
        if not isinstance(prepared, SynchronizedOptimizer):
            synchronized = SynchronizedOptimizer(prepared.optimizer, device_placement=False, scaler=prepared.scaler)
            known = prepared_optimizers(self)
            known[[id(one) for one in known].index(id(prepared))] = synchronized
            prepared = synchronized
        prepared.sessions = self._sessions
        self._sessions.add_optimizer(prepared.optimizer)
        self._attach()
        return prepared

    def prepare_pipeline(
        self, layers: nn.Sequential, loss: Any, optimizer_factory: OptimizerFactory, **engine_kwargs: Any
    ) -> EAPipe:
        """Creates the pipeline of the plugin's method, whose ``train_batch(batch)`` replaces the loop's body.

        Args:
            layers: as in :class:`EAPipe`, like the other arguments.
            loss: a function of an output and a target.
            optimizer_factory: returns the optimizer of a stage's parameters.
            engine_kwargs: ``others``, ``virtual_stages``.

        Raises:
            ValueError: the method is not a pipeline, or as in its class.
        """
        if (plugin := self._pipelined) is None:
            names = " or ".join(repr(name) for name, method in METHODS.items() if method.makes_passes)
            raise ValueError(
                f"prepare_pipeline() needs PipeSyncPlugin({names}), and this Accelerator has {self.pipesync!r}: "
                "call prepare(model, optimizer), or change the method."
            )
        layers = super().prepare_model(layers, device_placement=False, evaluation_mode=True)
        if self.num_processes == 1:
            engine_kwargs.setdefault("virtual_stages", 1)
        method = cast("type[EAPipe]", plugin.method_type)
        engine = method(
            layers,
            loss,
            optimizer_factory,
            cast("EAPipeConfig", plugin.config),
            device=self.device,
            backend=self._traffic_backend,
            **engine_kwargs,
        )
        self._sessions.pipelines.append(engine)
        return engine

    # --- data --------------------------------------------------------------------------------------------------------

    @override
    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepares a loader of other than training data, or of training data in Accelerate's order.

        In pipelines all ranks load the same batches.
        """
        if self._loader_is_for_training:
            return self.prepare_train_loader(data_loader)
        if self._synchronizes and self._pipelined is not None and not is_prepared(data_loader):
            return loaders.for_pipeline(self, data_loader, loaders.shared_seed(self))
        return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def prepare_train_loader(self, data_loader: DataLoader[Any]) -> Any:
        """Prepares the training loader, in the order of ``partition`` and with data injection if that is set.

        Pipelines side by side divide it; the ranks of each load the same batches.

        Its order depends on the epoch only, so a run can resume within an epoch at the same batch:
        ``loader.set_epoch(epoch)``, then ``accelerator.skip_first_batches(loader, num_batches)``. Jobs that come and go
        divide it anew, see :class:`ElasticLoader`.

        Raises:
            ValueError: the data set has fewer samples than there are ranks, or these have different numbers of batches;
                data injection is set and the loader has no batches; or the replicas are jobs, and a setting of the
                loaders excludes that.
        """
        self._loader_checked, self._loader_is_for_training = True, False
        if is_prepared(data_loader):
            raise ValueError(
                "The loader was prepared before, and would be divided twice: pass the original loader to "
                "prepare_train_loader(), and not to prepare()."
            )
        if self._synchronizes and (plugin := self._pipelined) is not None:
            config = cast("EAPipeConfig", plugin.config)
            part = config.data_part(self.process_index, self.num_processes)
            return loaders.for_pipeline(self, data_loader, self._shared_seed(), *part)
        if (plugin := self._synced) is None:
            return self.prepare_data_loader(data_loader)
        if self.is_job:
            counted = divided_anew(self, data_loader, plugin.config, loaders.shared_seed(self), self._end_if_left)
            prepared: Any = self.elastic_loader_type(counted, self.join)
            mark_prepared(prepared)
            prepared_loaders(self).append(prepared)
            self._meet_others()
        else:
            seed = self._shared_seed()
            prepared = loaders.for_training(self, data_loader, plugin.config, lambda: self._training_data, seed)
            if not loaders.uses_work_queue(prepared):
                loaders.check_even(prepared)
        self._train_loader = prepared
        return prepared

    @contextmanager
    def preparing_train_loader(self, batches_per_step: int = 1) -> Iterator[None]:
        """Context manager in which the next loader that is prepared is the training loader.

        Args:
            batches_per_step: batches that the caller accumulates by itself, besides ``gradient_accumulation_steps``.
        """
        self._loader_is_for_training, self._accumulated = True, batches_per_step
        try:
            yield
        finally:
            self._loader_is_for_training = False

    @override
    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Returns the loader without its first batches, to resume within an epoch."""
        if isinstance(dataloader, (loaders.EpochLoader, ElasticLoader)):
            return dataloader.skip_first_batches(num_batches)
        if loaders.uses_work_queue(dataloader):  # the queue resumes where it was
            return dataloader
        return super().skip_first_batches(dataloader, num_batches)

    # --- a training step --------------------------------------------------------------------------------------------

    @override
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Computes gradients, as Accelerate does."""
        if not self._loader_checked and (plugin := self._synced) is not None:
            self._loader_checked = True
            loaders.check_training(plugin.config)
        with self.naming_ranks():
            super().backward(loss, **kwargs)

    @contextmanager
    @override
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulates gradients without communication; those of a sharded model are whole on each rank meanwhile."""
        inner = model.module if shards_by_fsdp2(self) and isinstance(model, SyncedModule) else model
        with super().no_sync(inner):
            yield

    @override
    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Waits for the gradients that are about to be applied, and unscales them if there is a loss scaler."""
        if not self._takes_gradients:
            super().unscale_gradients(optimizer)
            return
        chosen = synchronized_optimizers(self) if optimizer is None else optimizer
        for known in chosen if isinstance(chosen, (tuple, list)) else [chosen]:
            known.take_gradient()

    @override
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clips the gradient that is about to be applied by its norm; returns the norm before clipping.

        Raises:
            ValueError: each rank has only a part of the gradient, and ``parameters`` are not all of one optimizer's,
                or ``norm_type`` is not 2.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self._takes_gradients:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        parameters = [local_of(parameter) for parameter in parameters]
        return clipping.clip_norm(self._steps_of(parameters), parameters, max_norm, norm_type)

    @override
    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clips every value of the gradient that is about to be applied to ``[-clip_value, clip_value]``.

        Raises:
            ValueError: each rank has only a part of the gradient, and ``parameters`` are not all of one optimizer's.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._takes_gradients:
            parameters = [local_of(parameter) for parameter in parameters]
            clipping.clip_value(self._steps_of(parameters), parameters, clip_value)
        else:
            super().clip_grad_value_(parameters, clip_value)

    @contextmanager
    @override
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Lets loaders give the ranks of a method the same number of batches, with ``even_batches=True``.

        Raises:
            ValueError: ``even_batches`` is False, so that the ranks would take different numbers of steps.
        """
        if not any(isinstance(joinable, SyncedModule) for joinable in joinables):
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        if not (self.even_batches if even_batches is None else even_batches):
            raise ValueError(
                "even_batches=False gives the ranks different numbers of steps, and all ranks of a method must take "
                "the same number: set even_batches=True."
            )
        orders: list[Any] = [getattr(loader, "batch_sampler", None) for loader in prepared_loaders(self)]
        with ExitStack() as stack:
            for order in orders:
                if hasattr(order, "even_batches"):
                    stack.enter_context(with_attributes(order, even_batches=True))
            yield

    def metrics(self) -> dict[str, float]:
        """Returns this rank's metrics for logging, by ``METHOD/METRIC``, of a second one by ``METHOD_1/METRIC``."""
        found: dict[str, float] = {}
        for index, method in enumerate(self._sessions.methods):
            prefix = f"{method.name}_{index}" if index else method.name
            found |= {f"{prefix}/{key}": value for key, value in method.metrics().items()}
        return found

    # --- helpers ----------------------------------------------------------------------------------------------------

    @property
    def _takes_gradients(self) -> bool:
        """Whether a method reduces the gradients of this step: not while they are accumulated."""
        return bool(self._sessions.sessions) and self.sync_gradients

    @property
    def _traffic_backend(self) -> str | None:
        """``"gloo"`` if the user has set it; otherwise None: the transport chooses by the device."""
        return "gloo" if self.state.backend == "gloo" else None

    def _attach(self) -> None:
        """Attaches a method to prepared models and optimizers, when :meth:`prepare` is complete; a collective call."""
        if (plugin := self._synced) is not None and not self._preparing:
            accelerator = weakref.ref(self)  # what the threads of a method refer to would never be dropped
            plan = MethodPlan(
                plugin.method,
                plugin.config,
                ranks_of_host(),
                self._traffic_backend,
                loads_data=not self.is_job,
                steps_per_epoch=lambda: None if (held := accelerator()) is None else held._steps_per_epoch(),
                replicas_of=lambda module: replicas_of(self) if is_sharded(module) else None,
            )
            self._sessions.attach(plan)
            self._meet_others()

    def _steps_of(self, parameters: list[Tensor]) -> list[clipping.Step]:
        """Returns the steps of the optimizers that have some of the parameters, after reducing their gradients."""
        concerned, clipped = [], {*map(id, parameters)}
        for optimizer in synchronized_optimizers(self):
            method = optimizer.method
            if method is not None and not clipped.isdisjoint(map(id, parameters_of(optimizer.optimizer))):
                optimizer.take_gradient()
                concerned.append((method, optimizer.optimizer))
        return concerned

    def _refuse_pipeline(self) -> None:
        if (plugin := self._pipelined) is not None:
            raise ValueError(
                f"method={plugin.method!r} makes the passes itself, and does not support prepare(model, optimizer): "
                "call engine = accelerator.prepare_pipeline(layers, loss, optimizer_factory), and "
                "engine.train_batch(batch) in place of backward() and step()."
            )

    def _shared_seed(self) -> int:
        self.data_seed = loaders.shared_seed(self)
        return self.data_seed

    def _steps_per_epoch(self) -> int | None:
        number = None if self._train_loader is None else num_batches(self._train_loader)
        return None if number is None else math.ceil(number / self.batches_per_step)
