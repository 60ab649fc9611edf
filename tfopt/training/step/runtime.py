"""Makes a model's `fit` and `evaluate` run tfopt's training step.

Keras looks up `fit`, `make_train_function`, `make_test_function` and the method that builds metrics on the model. So
they are set on the instance. The model's class does not change, and a saved model does not contain them. After a plain
`model.compile`, the next use of the model removes them.

`Runtime` lives as long as the model is compiled. The state of one `fit` is in `FitCallback`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.replace import first_callback, steps_per_execution, unwrap, wrap
from tfopt.compat.trainer import BUILD, check_fit, compile_config, element_spec, loss_calls, symbolic_build
from tfopt.data.epoch_order import UNCONTROLLED
from tfopt.errors import UnsupportedModelError, warn
from tfopt.training.checkpointing.resume import Resume
from tfopt.training.distributed.strategy import is_multi_worker
from tfopt.training.distributed.whole_batch import check_losses
from tfopt.training.memory import tensor_float_32_scope
from tfopt.training.plan import Plan
from tfopt.training.step.calls import MethodCall
from tfopt.training.step.data_errors import explain_specs
from tfopt.training.step.execution import Execution, Executions, loss_is_finite, of_one_replica
from tfopt.training.step.fit import FitCallback
from tfopt.training.step.guards import Guard, Watch
from tfopt.training.step.ledger import ATTRIBUTE, Ledger
from tfopt.training.step.per_batch import per_batch_callback
from tfopt.training.step.step import KerasStep, Step, without_islands
from tfopt.training.xla import compilation_cause, compilation_failed

METHODS = ("fit", "evaluate", "predict", "make_train_function", "make_test_function", BUILD)


class Runtime:
    """Trains and evaluates a model from `tfopt.compile` until it is compiled anew.

    Args:
        model: A compiled Keras model.
        plan: The plan of the training.
        make_step: Makes the step, with XLA or without.
        jit_compile: Whether to begin with XLA.
        explains: Whether errors of Keras and TensorFlow become errors that say what to do.
        when_built: Called before each training function is made, with the model built; None for nothing.
    """

    def __init__(
        self,
        model: keras.Model,
        plan: Plan,
        make_step: Callable[[bool], Step | KerasStep],
        *,
        jit_compile: bool,
        explains: bool = True,
        when_built: Callable[[], object] | None = None,
    ) -> None:
        self.model = model
        self.ledger = Ledger()
        self._make_step = make_step
        self._step = make_step(jit_compile)
        self._spec: Any = None  # of the last batch that the model was built for
        self._plan = plan
        self._resume = Resume(plan.config, model.distribute_strategy) if plan.config.checkpoint_dir else None
        self._guard = Guard(plan=plan, resume=self._resume, explains=explains)
        self._when_built = when_built
        self._strategy = model.distribute_strategy
        self._compiled = compile_config(model)
        self._fit: FitCallback | None = None  # the `fit` that is running
        self._evaluation: Executions | None = None  # the steps of the `evaluate` that is running
        # The steps of the loop that Keras prepares: made with its iterator, taken with the function that it asks for.
        self._prepared: Executions | None = None

    def install(self) -> None:
        """Sets the methods on the model."""
        check_fit()
        uninstall(self.model)
        setattr(self.model, ATTRIBUTE, self)
        own = type(self.model).test_step is not keras.Model.test_step  # the model evaluates in its own way
        wrap(self.model, self._call, *(name for name in METHODS if not (own and name == "make_test_function")))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if compile_config(self.model) is not self._compiled:  # model.compile was called after tfopt.compile
            uninstall(self.model)
            return getattr(self.model, name)(*args, **kwargs)
        return getattr(self, "build" if name == BUILD else name)(*args, **kwargs)

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        call = MethodCall(self.model, "fit", args, kwargs)
        if isinstance(call.get("x"), tf.data.Dataset) and call.get("shuffle") is None and call.names("shuffle"):
            call.set("shuffle", False)  # Keras cannot shuffle a dataset, and warns when it is told to
        with contextlib.ExitStack() as scopes:
            scopes.callback(setattr, self, "_fit", None)
            scopes.callback(self._plan.epoch.assign, UNCONTROLLED)
            scopes.enter_context(tensor_float_32_scope(self._plan.tensor_float_32))
            data = call.get("x"), call.get("y")
            scopes.enter_context(self._guard.explaining(call.get("class_weight")))
            watch = Watch(self._guard, self.model, data, self.ledger)
            checkpoints = None
            if self._resume is not None:
                checkpoints = scopes.enter_context(self._resume.around_fit(self.model, watch.check_state))
            given = call.get("callbacks")
            fit = self._fit = FitCallback(
                given,
                watch=watch,
                ledger=self.ledger,
                counter=self._plan.epoch,
                synchronize=self.synchronize,
                checkpoints=checkpoints,
            )
            scopes.enter_context(self._singly(given, call))
            scopes.enter_context(fit.scopes)
            call.set("callbacks", scopes.enter_context(first_callback(self.model, fit, given)))
            history: keras.callbacks.History = call.run()
            hold_masks(self.model)
            fit.finish()
            return history

    @contextlib.contextmanager
    def _singly(self, callbacks: Any, call: MethodCall) -> Iterator[None]:
        """Runs one step per call where a callback acts on each batch, as a learning rate for each batch does.

        Workers keep the plan's steps: they run calls of one size, and their callbacks may differ.
        """
        callback = None
        if (
            self._plan.config.steps_per_execution == "auto"
            and self._guard.explains
            and not is_multi_worker(self._strategy)
        ):
            validates = call.get("validation_data") is not None or bool(call.get("validation_split"))
            callback = per_batch_callback(callbacks, validates=validates)
        self.ledger.one_by_one = callback
        before = self.model.steps_per_execution
        if callback is None or before == 1:
            yield
            return
        self._set_steps(1)
        try:
            yield
        finally:
            self._set_steps(before)

    def _set_steps(self, steps: int) -> None:
        """Sets the steps per call. Functions that Keras made for another number are made anew."""
        self.model.steps_per_execution, self.model.predict_function = steps, None
        if "make_test_function" not in vars(self.model):
            self.model.test_function = None

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        call = MethodCall(self.model, "evaluate", args, kwargs)
        is_own = "make_test_function" not in vars(self.model)
        try:
            dividing = self._dividing(call.get("steps"), "test_function") if is_own else contextlib.nullcontext()
            with dividing, without_islands(self.model.jit_compile), self._guard.explaining():
                return call.run()
        finally:
            self._evaluation = None

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        call = MethodCall(self.model, "predict", args, kwargs)
        dividing = self._dividing(call.get("steps"), "predict_function")
        with dividing, without_islands(self.model.jit_compile), self._guard.explaining():
            return call.run()

    def _dividing(self, steps: int | None, function: str) -> contextlib.AbstractContextManager[None]:
        """Sets `steps_per_execution` to a divisor of the number of steps, for a function that Keras made.

        Keras only runs executions of one size, and would run more steps than requested.
        """
        sizes = range(1, self.model.steps_per_execution + 1)
        return steps_per_execution(self.model, max(size for size in sizes if not steps or steps % size == 0), function)

    def build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds metrics and optimizer. Keras would build them in the traced step, which fails inside loops."""
        self._prepared = None
        if isinstance(self._step, KerasStep):  # it may read a batch, and the order of the data depends on that
            getattr(type(self.model), BUILD)(self.model, iterator=iterator, data_batch=data_batch)
        if iterator is not None:
            # Workers may have data of different lengths, and must run executions of the same size. So the data decides
            # where their epoch ends, unless steps_per_epoch does.
            total = iterator.steps_per_epoch if is_multi_worker(self._strategy) else iterator.num_batches
            self._prepared = Executions(iterator, self.model.steps_per_execution, total)
            data_batch = keras.tree.map_structure(of_one_replica, element_spec(iterator))
        elif data_batch is not None:
            data_batch = keras.tree.map_structure(
                lambda item: None if item is None else tf.convert_to_tensor(item), data_batch
            )
        if isinstance(self._step, KerasStep):
            return
        with self._strategy.scope():
            spec = self._spec = self._step.spec(data_batch)
            with loss_calls() as calls, self._explaining():
                symbolic_build(self.model, spec)
            if self._step.division:
                check_losses(calls, self._step.division)
            if spec is not None:
                self._step.prepare(spec)
            if self.model.optimizer is not None and not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Says which shapes do not fit where Keras builds or traces the model for the batches at hand."""
        try:
            yield
        except Exception as error:
            if not self._guard.explains or self._spec is None:
                raise
            misfit = explain_specs(error, self.model, keras.utils.unpack_x_y_sample_weight(self._spec))
            if misfit is None:
                raise
            raise misfit from error

    def make_train_function(self, force: bool = False) -> None:
        prepared, self._prepared = self._prepared, None
        if self._fit is not None and prepared is not None:  # None: a callback trains on a single batch
            self._fit.executions = prepared
        if self.model.train_function is None or force:
            if self._when_built is not None:
                self._when_built()
            self.model.train_function = self._train_function()

    def make_test_function(self, force: bool = False) -> None:
        self._evaluation, self._prepared = self._prepared, None
        self.synchronize()  # Keras asks for the function at every evaluation
        if self.model.test_function is None or force:
            self.model.test_function = self._test_function()

    def _train_function(self) -> Callable[[Any], dict[str, Any]]:
        execute = self._execution(self._step.train, self.ledger)
        probed = False

        def train(iterator: Any) -> dict[str, Any]:
            nonlocal execute, probed
            if not _is_of_tensorflow(iterator):  # train_on_batch
                return execute.on_batch(next(iterator))
            fit = self._fit
            if fit is not None and not fit.has_begun:
                raise self._callbacks_are_missing()
            executions = None if fit is None else fit.executions
            count = self._size(executions)
            replayed = 0 if fit is None else fit.replay(iterator, count)
            count -= replayed
            if not count:
                return self.model.get_metrics_result()
            while_finite = fit is not None and bool(fit.ending)
            begin = time.perf_counter()
            if self._step.jit_compile and not probed:
                try:
                    batch = next(iterator)
                except StopIteration:
                    if replayed:  # the epoch has no more steps
                        return self.model.get_metrics_result()
                    raise
                try:
                    done, logs = execute.from_batch(batch, iterator, count, while_finite=while_finite)
                except Exception as error:
                    if not compilation_failed(error):
                        raise
                    self._give_up_xla(error)
                    execute = self._execution(self._step.train, self.ledger)
                    done, logs = execute.from_batch(batch, iterator, count, while_finite=while_finite)
            else:
                done, logs = execute.from_iterator(iterator, count, while_finite=while_finite)
            probed = True
            steps = int(done)
            if not steps:
                if replayed:  # the epoch has no more steps
                    return logs
                raise StopIteration
            self.ledger.called(time.perf_counter() - begin, steps)
            if fit is not None:
                fit.after(steps, logs)
            if steps < count and executions is not None:
                if while_finite and not loss_is_finite(logs):
                    executions.stopped(count - steps)
                else:
                    executions.data_ended()
            return logs

        return train

    def _test_function(self) -> Callable[[Any], dict[str, Any]]:
        execute = self._execution(self._step.test, None)

        def evaluate(iterator: Any) -> dict[str, Any]:
            if not _is_of_tensorflow(iterator):  # test_on_batch
                return execute.on_batch(next(iterator))
            count = self._size(self._evaluation)
            done, logs = execute.from_iterator(iterator, count)
            if not int(done):
                raise StopIteration
            if int(done) < count and self._evaluation is not None:
                self._evaluation.data_ended()
            return logs

        return evaluate

    def next_steps(self) -> int:
        """Number of steps of the next call of the training function."""
        executions = None if self._fit is None else self._fit.executions
        return int(self.model.steps_per_execution if executions is None else executions.iterator.steps_per_execution)

    def _size(self, executions: Executions | None) -> int:
        return self.model.steps_per_execution if executions is None else executions.next()

    def _callbacks_are_missing(self) -> UnsupportedModelError:
        return UnsupportedModelError(
            "fit must pass its callbacks to Keras' fit, because tfopt adds one that orders the data of an epoch and "
            f"saves checkpoints. Received: {self.model.name!r}, whose class {type(self.model).__name__} overrides fit. "
            "Let it take **kwargs, and call super().fit with them."
        )

    def _execution(self, run: Callable[[Any], Any], ledger: Ledger | None) -> Execution:
        def explained(batch: Any) -> Any:
            with self._explaining():
                return run(batch)

        return Execution(self.model, explained, ledger, watch_shapes=self._step.jit_compile and ledger is not None)

    def _give_up_xla(self, error: BaseException) -> None:
        cause = compilation_cause(error, self.model)
        warn(f"{cause}. The training goes on without XLA. Set jit_compile=False to start without XLA.")
        self.ledger.gave_up_xla(cause)
        self._step = self._make_step(False)
        if isinstance(self._step, Step):
            self._step.prepare(self._spec)
        self.model.jit_compile = False
        self._compiled = compile_config(self.model)
        self.model.test_function = self.model.predict_function = None

    @functools.cached_property
    def synchronize(self) -> Callable[[], None]:
        """Averages the variables that each replica updates by itself."""
        if isinstance(self._step, KerasStep) or not self._step.is_distributed:  # Keras leaves it to the strategy
            return lambda: None
        return tf.function(functools.partial(self._step.synchronize))  # a partial: see Execution


def hold_masks(model: keras.Model) -> None:
    """Sets pruned weights to zero again: an optimizer with `use_ema` averages weights before their masks are applied.

    Keras writes the averages into the weights at the end of `fit`.
    """
    for variable in model.trainable_variables:
        enforce = getattr(variable.constraint, "enforce", None)  # of a mask of tfopt.pruning
        if enforce is not None:
            enforce()


def uninstall(model: keras.Model) -> None:
    """Removes tfopt's methods from a model, if it has them."""
    unwrap(model, *METHODS, ATTRIBUTE)


def next_steps(model: keras.Model) -> int:
    """Returns how many batches the next call of a model's training function takes, if the epoch still has them.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse", steps_per_execution=4)
        >>> next_steps(model)
        4
    """
    runtime = getattr(model, ATTRIBUTE, None)
    return int(model.steps_per_execution) if runtime is None else runtime.next_steps()


def is_trained_by_tfopt(model: keras.Model) -> bool:
    """Returns whether tfopt's step trains a model.

    Example:
        >>> is_trained_by_tfopt(keras.Sequential())
        False
    """
    return getattr(model, ATTRIBUTE, None) is not None


def _is_of_tensorflow(iterator: Any) -> bool:
    return isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator)
