"""Puts tfopt's training step under a model's own `fit` and `evaluate`.

Keras looks up `fit`, `make_train_function`, `make_test_function` and what builds the model on the model, so they are
set on the instance: its class stays what it is, a saved model holds nothing of them, and a plain `model.compile` takes
them off again when the model is next used.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfopt.compat.trainer import BUILD, check_fit, compile_config, element_spec, symbolic_build
from tfopt.data.position import UNCONTROLLED, EpochCounter
from tfopt.errors import TfoptWarning, UnsupportedModelError
from tfopt.training.checkpointing.resume import Resume
from tfopt.training.distributed.strategy import is_multi_worker
from tfopt.training.memory import tensor_float_32_scope
from tfopt.training.step.calls import MethodCall
from tfopt.training.step.execution import Execution, Executions, of_one_replica
from tfopt.training.step.guards import Guard
from tfopt.training.step.ledger import ATTRIBUTE, Ledger
from tfopt.training.step.step import Step
from tfopt.training.xla import compilation_cause, compilation_failed

METHODS = ("fit", "evaluate", "predict", "make_train_function", "make_test_function", BUILD)


class Runtime:
    """What trains a model from `tfopt.compile` until it is compiled anew.

    Args:
        model: A compiled Keras model.
        make_step: Makes the step, with XLA or without.
        jit_compile: Whether to begin with XLA.
        guard: Watches the loss and explains failures.
        resume: Saves and restores the training; None for neither.
        counter: Is given the number of each epoch before its data is read.
        tensor_float_32: Whether float32 matrix products may use TensorFloat-32 in `fit`.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        make_step: Callable[[bool], Step],
        jit_compile: bool,
        guard: Guard,
        resume: Resume | None = None,
        counter: EpochCounter,
        tensor_float_32: bool,
    ) -> None:
        self.model = model
        self.ledger = Ledger()
        self.steps_done = 0  # in this fit and, if it was resumed, before
        self._make_step = make_step
        self._step = make_step(jit_compile)
        self._guard = guard
        self._resume = resume
        self._counter = counter
        self._tensor_float_32 = tensor_float_32
        self._epochs: _Epochs | None = None  # of the fit that is going on
        # How the steps of the fit and of the evaluation that are going on are divided, and of the one that begins.
        self._training: Executions | None = None
        self._testing: Executions | None = None
        self._asked: Executions | None = None
        self._strategy = model.distribute_strategy
        self._compiled = compile_config(model)

    def install(self) -> None:
        """Sets the methods on the model."""
        check_fit()
        uninstall(self.model)
        setattr(self.model, ATTRIBUTE, self)
        for name in METHODS:
            original = getattr(type(self.model), name)
            if name == "make_test_function" and type(self.model).test_step is not keras.Model.test_step:
                continue  # the model evaluates in its own way
            setattr(self.model, name, functools.wraps(original)(functools.partial(self._call, name)))
        self.model.train_function = self.model.test_function = self.model.predict_function = None

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if compile_config(self.model) is not self._compiled:  # a plain compile came after ours
            uninstall(self.model)
            return getattr(self.model, name)(*args, **kwargs)
        return getattr(self, "build" if name == BUILD else name)(*args, **kwargs)

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        call = MethodCall(self.model, "fit", args, kwargs)
        if isinstance(call.get("x"), tf.data.Dataset) and call.get("shuffle") is None and call.names("shuffle"):
            call.set("shuffle", False)  # Keras cannot shuffle a dataset, and warns when it is told to
        self._epochs = _Epochs(self)
        given = call.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            self._epochs.set_model(self.model)
            self._epochs.set_params(given.params)
            given.callbacks.insert(0, self._epochs)
        else:
            # Before the others, so that they find the training restored, and read weights as they are saved.
            others = given if isinstance(given, list | tuple) else [] if given is None else [given]
            call.set("callbacks", [self._epochs, *others])
        self.steps_done = 0
        with contextlib.ExitStack() as scopes:
            scopes.callback(self._end_fit)
            scopes.enter_context(tensor_float_32_scope(self._tensor_float_32))
            scopes.enter_context(self._guard.watching(self.model, (call.get("x"), call.get("y")), self.ledger))
            if self._resume is not None:
                scopes.enter_context(self._resume.around_fit())
            history: keras.callbacks.History = call.run()
            return history

    def _end_fit(self) -> None:
        self._epochs = self._training = None

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        call = MethodCall(self.model, "evaluate", args, kwargs)
        is_own = "make_test_function" not in vars(self.model)
        try:
            with self._dividing(call.get("steps"), "test_function") if is_own else contextlib.nullcontext():
                return call.run()
        finally:
            self._testing = None

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        call = MethodCall(self.model, "predict", args, kwargs)
        with self._dividing(call.get("steps"), "predict_function"):
            return call.run()

    @contextlib.contextmanager
    def _dividing(self, steps: int | None, function: str) -> Iterator[None]:
        """Lets executions of a function of Keras' own end where a count of steps ends.

        Keras runs whole ones, beyond the count if need be, so their size becomes one that divides it.
        """
        model = self.model
        before = model.steps_per_execution
        fitting = max(size for size in range(1, before + 1) if not steps or steps % size == 0)
        if fitting == before:
            yield
            return
        model.steps_per_execution = fitting
        setattr(model, function, None)
        try:
            yield
        finally:
            model.steps_per_execution = before
            setattr(model, function, None)

    def build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds what Keras would build while it traces the step: inside loops and conditions that fails."""
        self._asked = None
        if iterator is not None:
            # Workers run executions of one size, and may hold data of different lengths, whose end they agree on.
            total = iterator.steps_per_epoch if is_multi_worker(self._strategy) else iterator.num_batches
            self._asked = Executions(iterator, self.model.steps_per_execution, total)
            data_batch = keras.tree.map_structure(of_one_replica, element_spec(iterator))
        elif data_batch is not None:
            data_batch = keras.tree.map_structure(
                lambda item: None if item is None else tf.convert_to_tensor(item), data_batch
            )
        with self._strategy.scope():
            symbolic_build(self.model, data_batch)
            if self.model.optimizer is not None and not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)

    def make_train_function(self, force: bool = False) -> None:
        self._training, self._asked = self._asked, None  # Keras asks for the function after it made the iterator
        if self.model.train_function is None or force:
            self.model.train_function = self._train_function()

    def make_test_function(self, force: bool = False) -> None:
        self._testing, self._asked = self._asked, None
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
            self._check_callbacks()
            count = self._size(self._training)
            replayed = 0 if self._resume is None else self._resume.replay(iterator, count)
            count -= replayed
            if not count:
                return self.model.get_metrics_result()
            begin = time.perf_counter()
            if self._step.jit_compile and not probed and not replayed:
                batch = next(iterator)
                try:
                    done, logs = execute.from_batch(batch, iterator, count)
                except Exception as error:
                    if not compilation_failed(error):
                        raise
                    self._give_up_xla(error)
                    execute = self._execution(self._step.train, self.ledger)
                    done, logs = execute.from_batch(batch, iterator, count)
            else:
                done, logs = execute.from_iterator(iterator, count)
            probed = probed or not replayed
            steps = int(done)
            if not steps:
                if replayed:  # they were the last of the epoch
                    return logs
                raise StopIteration
            self.steps_done += steps
            self.ledger.called(time.perf_counter() - begin, steps)
            self._guard.after(self.steps_done, steps, logs)
            if self._resume is not None:
                self._resume.after(self.steps_done, steps)
            if steps < count and self._training is not None:
                self._training.data_ended()
            return logs

        return train

    def _test_function(self) -> Callable[[Any], dict[str, Any]]:
        execute = self._execution(self._step.test, None)

        def evaluate(iterator: Any) -> dict[str, Any]:
            if not _is_of_tensorflow(iterator):  # test_on_batch
                return execute.on_batch(next(iterator))
            count = self._size(self._testing)
            done, logs = execute.from_iterator(iterator, count)
            if not int(done):
                raise StopIteration
            if int(done) < count and self._testing is not None:
                self._testing.data_ended()
            return logs

        return evaluate

    def _size(self, executions: Executions | None) -> int:
        return self.model.steps_per_execution if executions is None else executions.next()

    def _check_callbacks(self) -> None:
        if self._epochs is not None and not self._epochs.has_begun:
            raise UnsupportedModelError(
                "fit must hand on its callbacks to Keras' fit, since tfopt's own is among them: it sets the order of "
                f"an epoch, and saves. Received: {self.model.name!r}, whose class {type(self.model).__name__} "
                "overrides fit. Let it take **kwargs, and call super().fit with them."
            )

    def _execution(self, run: Callable[[Any], None], ledger: Ledger | None) -> Execution:
        return Execution(self.model, run, ledger, watch_shapes=self._step.jit_compile and ledger is not None)

    def _give_up_xla(self, error: BaseException) -> None:
        cause = compilation_cause(error, self.model)
        warnings.warn(
            f"{cause}. The training goes on without XLA. Set jit_compile=False to begin without.",
            TfoptWarning,
            stacklevel=2,
        )
        self.ledger.gave_up_xla(cause)
        self._step = self._make_step(False)
        self.model.jit_compile = False
        self._compiled = compile_config(self.model)
        self.model.test_function = self.model.predict_function = None

    @functools.cached_property
    def synchronize(self) -> Callable[[], None]:
        """Averages over the replicas what each has updated alone."""
        if not self._step.is_distributed:
            return lambda: None
        return tf.function(functools.partial(self._step.synchronize))  # else TensorFlow counts traces over all models


class _Epochs(keras.callbacks.Callback):
    """Ties a `fit` to the runtime. It has no hook for batches: with one, Keras would wait for each batch's figures."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime
        self.has_begun = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.has_begun = True
        runtime, iterator = self._runtime, self._executions.iterator
        if runtime._resume is not None:
            done = runtime._resume.begin(
                self.model, self.params, iterator.steps_per_epoch, iterator.data_adapter.num_batches
            )
            runtime.steps_done = runtime.ledger.resumed_from = done

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._executions.begin_epoch()
        # With steps_per_epoch Keras keeps an iterator from epoch to epoch, or makes it before this.
        at_once = self._executions.iterator.steps_per_epoch is None
        self._runtime._counter.assign(epoch, at_once=at_once)
        if self._runtime._resume is not None:
            self._runtime._resume.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._runtime.synchronize()
        self._runtime._guard.check()
        if self._runtime._resume is not None:
            self._runtime._resume.end_epoch(epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._runtime._counter.assign(UNCONTROLLED)
        if self._runtime._resume is not None:
            self._runtime._resume.end()

    @property
    def _executions(self) -> Executions:
        executions = self._runtime._training
        assert executions is not None  # Keras has made its iterator
        return executions


def uninstall(model: keras.Model) -> None:
    """Takes tfopt's methods off a model, if it has them."""
    for name in (*METHODS, ATTRIBUTE):
        if name in vars(model):
            delattr(model, name)
    model.train_function = model.test_function = model.predict_function = None


def _is_of_tensorflow(iterator: Any) -> bool:
    return isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator)
